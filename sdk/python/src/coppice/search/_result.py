"""What a search has found, and how it is shown."""

from __future__ import annotations

import html
import json
import os
from dataclasses import dataclass, field
from typing import Any

from ._tree import Node


@dataclass
class SearchResult:
    """The tree of a search, while it grows and afterwards."""

    root: Node
    problems: list[BaseException] = field(default_factory=list)
    """Why actions failed, in the order in which they did."""

    @property
    def best(self) -> Node:
        """The node of the highest score; the first of equals. The root, if nothing was found."""
        found = [n for n in self.root.walk() if n is not self.root]
        return max(found, key=lambda n: n.score) if found else self.root

    @property
    def steps(self) -> int:
        return self.root.visits

    def trajectories(self) -> list[dict[str, Any]]:
        """For each leaf: the steps from the root to it, with their scores. For training."""
        out = []
        for leaf in self.root.walk():
            if leaf.children or leaf is self.root:
                continue
            path = [n for n in leaf.path() if n.action is not None][::-1]
            steps = [
                {"checkpoint_id": n.checkpoint_id, "action": n.action.name if n.action else "", "score": n.score,
                 "action_data": n.action.data if n.action else None, "data": n.data, "visits": n.visits, "value": n.value}
                for n in path
            ]
            out.append({"root_id": self.root.checkpoint_id, "score": leaf.score, "terminal": leaf.terminal, "steps": steps})
        return out

    def to_jsonl(self, path: str | os.PathLike[str]) -> int:
        """Writes the trajectories, one a line. Returns how many there are."""
        lines = self.trajectories()
        with open(path, "w", encoding="utf-8") as f:
            for line in lines:
                f.write(json.dumps(line, ensure_ascii=False) + "\n")
        return len(lines)

    def render(self, limit: int = 200) -> str:
        """The tree as text."""
        best = set(self.best.path())
        lines = []
        for i, node in enumerate(self.root.walk()):
            if i == limit:
                lines.append("…")
                break
            name = one_line(node.action.name) if node.action else "root"
            mark = "*" if node in best else " "
            lines.append(f"{mark} {'  ' * node.depth}{name}  score {node.score:.3f}  mean {node.mean:.3f}  visits {node.visits}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.render()

    def _repr_html_(self) -> str:
        """For notebooks. Names come from the task, and perhaps from a guest: they are escaped."""
        return f"<pre>{html.escape(self.render())}</pre>"


def one_line(text: str) -> str:
    """A name without what would change a terminal."""
    text = "".join(c if c.isprintable() else "\ufffd" for c in text)
    return text if len(text) <= 60 else text[:59] + "…"

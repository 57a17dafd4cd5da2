"""A tree of checkpoints, to look at."""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import dataclass

from . import models

SHOWN_WORKSPACES = 5
"""How many workspaces of one checkpoint a line names."""


@dataclass
class Tree:
    """A checkpoint and what is below it. A notebook draws it as a tree, and `print` shows it as text."""

    nodes: list[models.TreeNode]
    """Each node comes after its parent."""
    complete: bool
    """False if the server has more nodes."""

    def __len__(self) -> int:
        return len(self.nodes)

    def __iter__(self) -> Iterator[models.TreeNode]:
        return iter(self.nodes)

    def render(self, limit: int = 500) -> str:
        """The tree as text, of at most `limit` nodes."""
        return "\n".join(prefix + label(node) for prefix, node in self._lines(limit)) + self._rest(limit)

    def __str__(self) -> str:
        return self.render()

    def _repr_html_(self, limit: int = 500) -> str:
        """For notebooks: checkpoints with living workspaces are bold, and the id of each is its title."""
        lines = []
        for prefix, node in self._lines(limit):
            text = html.escape(label(node))
            lines.append(
                f'{prefix}<span title="{html.escape(node.checkpoint.id)}">{f"<b>{text}</b>" if node.workspaces else text}</span>'
            )
        return f"<pre>{chr(10).join(lines)}{self._rest(limit)}</pre>"

    def _rest(self, limit: int) -> str:
        if len(self.nodes) > limit:
            return f"\n… and {'' if self.complete else 'at least '}{len(self.nodes) - limit} more"
        return "" if self.complete else "\n… and more"

    def _lines(self, limit: int) -> Iterator[tuple[str, models.TreeNode]]:
        """The first nodes, depth first, each with the branches before it."""
        below: dict[str, list[models.TreeNode]] = {}
        for node in self.nodes[1:]:
            below.setdefault(node.checkpoint.parent_id or "", []).append(node)
        stack = [("", "", node) for node in self.nodes[:1]]
        while stack and limit > 0:
            limit -= 1
            prefix, indent, node = stack.pop()
            yield prefix, node
            children = below.get(node.checkpoint.id, [])
            for child in reversed(children):
                last = child is children[-1]
                stack.append((indent + ("└─ " if last else "├─ "), indent + ("   " if last else "│  "), child))


def label(node: models.TreeNode) -> str:
    """One line about a node."""
    at = node.checkpoint
    words = [f"{at.name} ({at.id})" if at.name else at.id]
    words += [at.kind] if at.kind != "user" else []
    words += [at.state] if at.state not in ("captured", "sealed") else []
    words += ["pinned"] if at.pinned else []
    words += [f"effects: {node.effects_count}"] if node.effects_count else []
    if node.workspaces:
        named = [f"{ws.name} {ws.state}" for ws in node.workspaces[:SHOWN_WORKSPACES]]
        more = len(node.workspaces) - len(named)
        words.append(f"[{', '.join(named)}{f', and {more} more' if more else ''}]")
    return "  ".join("".join(c if c.isprintable() else "\ufffd" for c in word) for word in words)

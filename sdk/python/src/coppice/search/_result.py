"""What a search has found, and how it is shown."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ._tree import Node

GOAL_REACHED = "goal reached"
BUDGET_SPENT = "budget spent"
EXHAUSTED = "nothing left to try"


@dataclass
class SearchResult:
    """What a search has found, afterwards or while it goes on."""

    best: Node
    """The node of the greatest value that is known; the first of equals. The root, if no value is known."""
    tried: int
    """How many actions this searcher has tried."""
    end: str
    """Why the search ended: "goal reached", "budget spent" or "nothing left to try". Empty while it goes on."""
    problems: list[BaseException]
    """Why actions could not be tried, in the order in which it happened. Each may have been tried again."""
    snapshot: Callable[[], Node] = field(repr=False)

    @cached_property
    def root(self) -> Node:
        """A copy of the tree, as this searcher knows it when it is first asked for."""
        return self.snapshot()

    def trajectories(self) -> list[dict[str, Any]]:
        """For each leaf: the steps from the root to it, with their values. For training."""
        out = []
        for leaf in self.root.walk():
            if leaf.children or leaf.parent is None:
                continue
            path = [n for n in leaf.path() if n.action is not None][::-1]
            steps = [
                {"checkpoint_id": n.id, "action": n.action.name, "action_data": n.action.data, "value": n.value,
                 "data": n.data, "visits": n.visits, "value_sum": n.value_sum}
                for n in path
                if n.action is not None
            ]
            out.append({"root_id": self.root.id, "value": leaf.value, "terminal": leaf.terminal, "steps": steps})
        return out

    def to_jsonl(self, path: str | os.PathLike[str]) -> int:
        """Writes the trajectories, one a line. Returns how many there are."""
        lines = self.trajectories()
        with open(path, "w", encoding="utf-8") as f:
            for line in lines:
                f.write(json.dumps(line, ensure_ascii=False) + "\n")
        return len(lines)

    def to_parquet(self, path: str | os.PathLike[str]) -> int:
        """Writes the trajectories as a Parquet file, one a row, and returns how many there are.

        It needs pyarrow: `pip install "coppice[parquet]"`. A row has the keys of `trajectories`, and its steps are a
        list of structs. `action_data` and `data`, which may be any JSON, are columns of text that is JSON, or null.
        The columns are the same in every file, also in one without rows: files of several searches are one data set.
        """
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as err:
            raise ImportError('Parquet needs pyarrow: pip install "coppice[parquet]"', name="pyarrow") from err
        text, number, count = pyarrow.string(), pyarrow.float64(), pyarrow.int64()
        step = pyarrow.struct(
            [("checkpoint_id", text), ("action", text), ("action_data", text), ("value", number), ("data", text),
             ("visits", count), ("value_sum", number)]
        )
        columns = [("root_id", text), ("value", number), ("terminal", pyarrow.bool_()), ("steps", pyarrow.list_(step))]
        rows = self.trajectories()
        for row in rows:
            for at in row["steps"]:
                at["action_data"], at["data"] = as_json(at["action_data"]), as_json(at["data"])
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, pyarrow.schema(columns)), path)
        return len(rows)

    def render(self, limit: int = 200) -> str:
        """The tree as text, of at most `limit` nodes. A star marks the way to the best one."""
        best = {n.id for n in self.best.path()}
        lines = []
        depth = {self.root.id: 0}
        for i, node in enumerate(self.root.walk()):
            if i == limit:
                lines.append("…")
                break
            if node.parent is not None:
                depth[node.id] = depth[node.parent.id] + 1
            name = one_line(node.action.name) if node.action else "root"
            mark = "* " if node.id in best else "  "
            numbers = f"value {node.value:.3f}  mean {node.mean:.3f}  visits {node.visits}"
            lines.append(f"{mark}{'  ' * depth[node.id]}{name}  {numbers}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.render()

    def _repr_html_(self) -> str:
        """For notebooks. Names come from the task, and perhaps from a guest: they are escaped."""
        return f"<pre>{html.escape(self.render())}</pre>"


def as_json(data: Any) -> str | None:
    return None if data is None else json.dumps(data)


def one_line(text: str) -> str:
    """A name without what would change a terminal."""
    text = "".join(c if c.isprintable() else "\ufffd" for c in text)
    return text if len(text) <= 60 else text[:59] + "…"

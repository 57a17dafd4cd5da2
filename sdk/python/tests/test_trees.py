"""How a tree of checkpoints looks."""

from __future__ import annotations

from typing import Any

import msgspec
from coppice import Coppice, Tree, models
from double import Answer, Double
from samples import AT, checkpoint


def id_of(n: int) -> str:
    return f"ckpt_{n:026d}"


def item(n: int, parent: int | None, *, workspaces: list[str] | None = None, effects: int = 0, **fields: Any) -> dict[str, Any]:
    living = [{"id": f"ws_{'0' * 26}", "name": name, "state": "ready", "created_at": AT} for name in workspaces or []]
    fields = {"id": id_of(n), **fields, **({} if parent is None else {"parent_id": id_of(parent)})}
    return {"checkpoint": checkpoint(**fields), "depth": 0, "effects_count": effects, "workspaces": living}


ITEMS = [
    item(0, None, name="before", kind="template"),
    item(1, 0, pinned=True, effects=2),
    item(2, 0, name="better"),
    item(3, 1, state="deleted"),
    item(4, 2, workspaces=["try-1"]),
    item(5, 3, workspaces=["a"] * 7),
]


def tree(items: list[dict[str, Any]], complete: bool = True) -> Tree:
    return Tree(msgspec.convert(items, list[models.TreeNode]), complete)


def test_as_text() -> None:
    assert str(tree(ITEMS)).splitlines() == [
        f"before ({id_of(0)})  template",
        f"├─ {id_of(1)}  pinned  effects: 2",
        f"│  └─ {id_of(3)}  deleted",
        f"│     └─ {id_of(5)}  [a ready, a ready, a ready, a ready, a ready, and 2 more]",
        f"└─ better ({id_of(2)})",
        f"   └─ {id_of(4)}  [try-1 ready]",
    ]


def test_as_html() -> None:
    lines = tree(ITEMS)._repr_html_().removeprefix("<pre>").removesuffix("</pre>").splitlines()
    assert lines[5] == f'   └─ <span title="{id_of(4)}"><b>{id_of(4)}  [try-1 ready]</b></span>' and len(lines) == 6
    rude = tree([item(0, None, name="<script>\x1b[2J")])  # no server sends such a name
    assert "<script>" not in rude._repr_html_() and "\x1b" not in str(rude)


def test_many_and_deep_ones() -> None:
    deep = tree([item(n, n - 1 if n else None) for n in range(3000)])
    assert len(str(deep).splitlines()) == 501 and str(deep).endswith("\n… and 2500 more")
    assert str(tree(ITEMS, complete=False)).endswith("\n… and more")
    assert str(tree([])) == "" and len(tree([])) == 0


def test_a_client_reads_it(double: Double, client: Coppice) -> None:
    double.script.append(Answer(200, {"root_id": id_of(0), "items": ITEMS}))
    found = client.tree(id_of(0), depth=3, limit=4)
    assert [n.checkpoint.id for n in found] == [id_of(n) for n in range(4)] and not found.complete
    assert double.requests[0].path == f"/v1/checkpoints/{id_of(0)}/tree" and double.requests[0].query["depth"] == ["3"]

"""A tree search repairs a module: each edge is an edit, and each node is a machine with the edits so far.

    python mcts_repair.py     with a server of `coppice dev`, or with COPPICE_SERVER and COPPICE_TOKEN

Three edits together mend the module, and no test run tells which. An interrupted search goes on where it was: the
statistics are in the annotations of the checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence

from coppice import Coppice, Workspace, search

MODULE = """\
def merge(spans):
    out = []
    for a, b in sorted(spans):
        if out and a < out[-1][1]:
            out[-1] = (out[-1][0], b)
        else:
            out.append((a, b))
    return out

def total(spans):
    return sum(b - a for a, b in spans)
"""

CHECK = """\
from spans import merge, total
checks = [
    lambda: merge([(3, 4), (1, 2)]) == [(1, 2), (3, 4)],
    lambda: merge([(1, 2), (2, 3)]) == [(1, 3)],
    lambda: merge([(1, 9), (2, 3)]) == [(1, 9)],
    lambda: merge([(1, 9), (2, 3), (9, 10)]) == [(1, 10)],
    lambda: total([(1, 3), (2, 4)]) == 3,
    lambda: total([(1, 9), (2, 3)]) == 8,
]
def holds(check):
    try:
        return check()
    except Exception:
        return False
print(sum(map(holds, checks)) / len(checks))
"""

EDITS = {
    "touching spans": ("a < out[-1][1]", "a <= out[-1][1]"),
    "the longer end": ("(out[-1][0], b)", "(out[-1][0], max(b, out[-1][1]))"),
    "total of merged": ("b in spans)", "b in merge(spans))"),
    "no sorting": ("sorted(spans)", "spans"),
    "closed spans": ("b - a for", "b - a + 1 for"),
}


def propose(done: list[str]) -> list[str]:
    """The edits to try after those that are done."""
    return [name for name in EDITS if name not in done]  # a real model goes here


class Repair:
    def actions(self, node: search.Node) -> Sequence[search.Action | str]:
        done = [action.name for action in node.trajectory()]
        return list(propose(done)) if len(done) < 3 else []

    def act(self, ws: Workspace, action: search.Action) -> search.Outcome:
        old, new = EDITS[action.name]
        text = ws.files.read_text("/root/spans.py")
        if old not in text:
            return search.Outcome(reason="the edit does not apply")
        ws.files.write("/root/spans.py", text.replace(old, new))
        passed = ws.run("python3 check.py", cwd="/root", timeout=60)
        return search.Outcome(float(passed.stdout) if passed.ok else 0.0)


with Coppice() as client, client.create("base") as ws:
    ws.files.write("/root/spans.py", MODULE)
    ws.files.write("/root/check.py", CHECK)
    start = ws.checkpoint()
    found = search.run(start, Repair(), search.UCT(c=0.3), budget=40, parallel=3, goal=1.0)
    print(f"{found.end} after {found.tried} edits were tried")
    print(found)  # the tree; a star marks the way to the best node
    print("repaired by: " + ", then ".join(action.name for action in found.best.trajectory()))
    changed = [file.path for file in start.diff(found.best.id).files if file.path.endswith(".py")]
    print("changed: " + ", ".join(changed))

"""Best of N: each of N forks of one checkpoint runs the tests of one proposal, and the best proposal is kept.

    python best_of_n.py       with a server of `coppice dev`, or with COPPICE_SERVER and COPPICE_TOKEN
"""

from __future__ import annotations

from collections.abc import Sequence

from coppice import Coppice, Workspace, search

N = 4

CHECK = """
from slug import slug
cases = {"Hello World": "hello-world", "  a  b ": "a-b", "C'est la vie!": "cest-la-vie", "x--y": "x-y"}
def right(text, want):
    try:
        return slug(text) == want
    except Exception:
        return False
print(sum(right(*case) for case in cases.items()) / len(cases))
"""

PROPOSALS = [
    "def slug(s):\n    return s.lower().replace(' ', '-')\n",
    "def slug(s):\n    return '-'.join(s.lower().split())\n",
    "import re\ndef slug(s):\n    return re.sub('[^a-z]+', '-', s.lower())\n",
    "import re\ndef slug(s):\n    return '-'.join(re.findall('[a-z]+', s.lower().replace(chr(39), '')))\n",
]


def propose(n: int) -> str:
    """The nth program that might solve the task."""
    return PROPOSALS[n % len(PROPOSALS)]  # a real model goes here: ask it N times


class Write:
    def actions(self, node: search.Node) -> Sequence[search.Action | str]:
        return [search.Action(f"proposal {n}", propose(n)) for n in range(N)]

    def act(self, ws: Workspace, action: search.Action) -> search.Outcome:
        ws.files.write("/root/slug.py", action.data)
        passed = ws.run("python3 check.py", cwd="/root", timeout=60)
        return search.Outcome(float(passed.stdout) if passed.ok else 0.0)


with Coppice() as client, client.create("base") as ws:
    ws.files.write("/root/check.py", CHECK)
    start = ws.checkpoint()
    found = search.run(start, Write(), search.BestOfN(N), budget=N, parallel=N)
    print(found)  # the tree; a star marks the way to the best node
    print(f"best: {found.best.value:.2f}, in checkpoint {found.best.id}")
    ws.restore(found.best.id)  # the workspace goes on from there
    print(ws.files.read_text("/root/slug.py"))

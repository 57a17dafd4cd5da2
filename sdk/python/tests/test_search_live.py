"""Searches of real checkpoints, beside a searcher of the Go SDK."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from conftest import Live
from coppice import AsyncCheckpoint, AsyncCoppice, AsyncWorkspace, Coppice, Workspace, search
from coppice.search import PUCT, UCT, Action, Beam, BestOfN, Checkpoints, Claim, Edge, Forks, Node, Outcome, Strategy

pytestmark = pytest.mark.live

TARGET = "cab"
FILE = "/word"


def value(word: str) -> float:
    """How much of the target a word begins with."""
    return len(os.path.commonprefix([word, TARGET])) / len(TARGET)


class Words:
    """Each action appends a letter to a file in the machine: the state is the machine's."""

    def __init__(self) -> None:
        self.tried: list[str] = []

    def actions(self, node: Node) -> Sequence[Action | str]:
        return [Action(letter, {"letter": letter}) for letter in "abc"] if node.depth < len(TARGET) else []

    async def act(self, ws: AsyncWorkspace, action: Action) -> Outcome | float:
        word = await ws.files.read_text(FILE) + action.data["letter"]
        self.tried.append(word)
        await ws.files.write(FILE, word)
        return Outcome(value(word), terminal=len(word) == len(TARGET), data={"word": word, "by": "python"})


async def root_of(c: AsyncCoppice, live: Live) -> AsyncCheckpoint:
    async with await c.create(live.image) as ws:
        await ws.files.write(FILE, "")
        return await ws.checkpoint(annotations={"note": "kept"})


async def check(root: AsyncCheckpoint, name: str = "") -> list[dict[str, str]]:
    """Compares all annotations with the tree, and returns the data of the nodes below the root."""
    store = Checkpoints(root, name)
    known = {n.checkpoint.id: n.checkpoint async for n in root.tree()}
    out = []
    for id, info in known.items():
        record, _ = await store.load(id)
        below = [e for e in record.edges if e.child]
        assert not any(e.in_flight for e in record.edges), (id, record)
        assert {e.child for e in below} == {k for k, c in known.items() if c.parent_id == id}
        for e in below:
            child, _ = await store.load(e.child)
            assert (e.visits, e.value_sum, e.min, e.max) == (child.visits, child.value_sum, child.min, child.max)
            assert (child.action, child.value) == (e.name, e.value)
        own = [] if record.value is None else [record.value]
        assert record.visits == len(own) + sum(e.visits for e in below)
        assert record.value_sum == pytest.approx(sum(own) + sum(e.value_sum for e in below))
        assert info.annotations["visits"] == record.visits and info.annotations["mean"] == pytest.approx(record.mean)
        assert info.annotations.get("score") == record.value
        if id != root.id:
            out.append(info.annotations[store.key]["data"])
        else:
            assert info.annotations["note"] == "kept"
            assert record.visits == len(known) - (record.value is None)
    return out


async def machines(c: AsyncCoppice) -> list[str]:
    return [w.id async for w in c.workspaces()]


@pytest.mark.parametrize("s", [UCT(c=0.5), PUCT(c=1.25), Beam(2, 3), BestOfN(5)], ids=["uct", "puct", "beam", "best"])
def test_strategies(live: Live, s: Strategy, tmp_path: Path) -> None:
    async def main() -> None:
        async with AsyncCoppice(live.url, live.token) as c:
            before = await machines(c)
            root = await root_of(c, live)
            found = await search.run_async(root, Words(), s, goal=1.0, fork={"labels": {"search": "words"}})
            assert not found.problems
            if not isinstance(s, BestOfN):
                assert found.end == "goal reached" and found.best.data == {"word": TARGET, "by": "python"}
                assert "".join(a.name for a in found.best.trajectory()) == TARGET
                winner = await c.checkpoint(found.best.id)
                assert winner.info.labels == {"search": "words"}
                async with await winner.fork() as forks:
                    assert await forks[0].files.read_text(FILE) == TARGET
            assert found.to_jsonl(tmp_path / "t") == len((tmp_path / "t").read_text().splitlines()) > 0
            words = [d["word"] for d in await check(root)]
            assert len(words) == len(set(words)) + (2 if isinstance(s, BestOfN) else 0) == found.tried
            assert await machines(c) == before

    asyncio.run(main())


def test_beside_a_searcher_in_go(live: Live) -> None:
    """One tree, two searchers at the same time, in two languages: each action is tried by one of them only."""
    program = os.environ.get("COPPICE_SEARCHER")
    if not program:
        pytest.skip("COPPICE_SEARCHER is not set: run sdk/python/test, which builds that program")

    async def main() -> None:
        async with AsyncCoppice(live.url, live.token) as c:
            before = await machines(c)
            root = await root_of(c, live)
            pipe = asyncio.subprocess.PIPE
            go = await asyncio.create_subprocess_exec(program, stdin=pipe, stdout=pipe, stderr=pipe)
            asked = {
                "url": live.url, "token": live.token, "root": root.id, "name": "together", "file": FILE,
                "letters": "abc", "target": TARGET, "budget": 1000,
            }
            task = Words()
            answer, found = await asyncio.gather(
                go.communicate(json.dumps(asked).encode() + b"\n"),
                search.run_async(
                    root, task, UCT(c=0.5), name="together", root_value=0.0, budget=1000, parallel=2, poll=0.05,
                    searcher="python",
                ),
            )
            assert go.returncode == 0, answer[1].decode()
            theirs = json.loads(answer[0])
            assert theirs["end"] == found.end == "nothing left to try"
            assert theirs["best"] == "".join(a.name for a in found.best.trajectory()) == TARGET
            assert theirs["tried"] + found.tried == 39 and min(theirs["tried"], found.tried) > 0
            kept = await check(root, "together")
            words = [d["word"] for d in kept]
            assert len(words) == len(set(words)) == 39 == 3 + 9 + 27
            by = Counter(d["by"] for d in kept)
            assert by == {"go": theirs["tried"], "python": found.tried} and len(task.tried) == found.tried
            record, _ = await Checkpoints(root, "together").load(root.id)
            assert record.visits == 40 and record.done and record.max == 1
            # The result has what both have done.
            assert sorted(n.data["word"] for n in found.root.walk() if n.parent is not None) == sorted(words)
            assert await machines(c) == before

    asyncio.run(main())


def test_a_crash(live: Live) -> None:
    """A searcher that made a child, and crashed before it wrote that down: its child is taken over."""

    async def main() -> None:
        async with AsyncCoppice(live.url, live.token) as c:
            root = await root_of(c, live)
            store = Checkpoints(c)
            edges = [Edge(letter, data={"letter": letter}) for letter in "abc"]
            edges[0].in_flight = {"crashed": Claim(1, datetime.now(timezone.utc) + timedelta(seconds=2))}
            edges[1].in_flight = {"crashed": Claim(1, datetime.now(timezone.utc) - timedelta(seconds=1))}
            record, version = await store.load(root.id)
            record.proposed, record.edges = True, edges
            await store.save(root.id, version, record)
            left = await Forks(c, Words(), store).expand(Node(root.id), [edges[0].action])
            assert left[0].child and left[0].error is None
            task = Words()
            found = await search.run_async(root, task, UCT(c=0.5), budget=100, poll=0.1)
            assert found.end == "nothing left to try" and found.tried == 38 and "a" not in task.tried
            assert left[0].child in {n.id for n in found.root.walk()}
            assert len(await check(root)) == 39

    asyncio.run(main())


def test_a_search_goes_on(live: Live) -> None:
    async def main() -> None:
        async with AsyncCoppice(live.url, live.token) as c:
            root = await root_of(c, live)
            first, second = Words(), Words()
            found = await search.run_async(root, first, UCT(c=0.5), budget=8, parallel=2)
            assert found.end == "budget spent" and found.tried == 8
            again = await search.run_async(await c.checkpoint(root.id), second, UCT(c=0.5), budget=12, parallel=4)
            assert again.tried == 12 == len(second.tried) and again.root.visits == 20
            assert not set(first.tried) & set(second.tried)

    asyncio.run(main())


def test_an_interrupted_search_leaves_no_machine(live: Live) -> None:
    class Slow(Words):
        async def act(self, ws: AsyncWorkspace, action: Action) -> float:
            self.tried.append(action.name)
            await ws.run("sleep 3600")
            return 0

    async def main() -> None:
        async with AsyncCoppice(live.url, live.token) as c:
            before = await machines(c)
            root = await root_of(c, live)
            for began in (0, 3):  # while it forks, and while it acts
                task = Slow()
                running = asyncio.create_task(search.run_async(root, task, UCT(c=1), parallel=3))
                while len(task.tried) < began or not running:
                    await asyncio.sleep(0.05)
                await asyncio.sleep(0.1)
                running.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await running
                assert await machines(c) == before
            record, _ = await Checkpoints(root).load(root.id)
            assert record.visits == 0 and not any(e.in_flight for e in record.edges)

    asyncio.run(main())


def test_plain_functions(coppice: Coppice, live: Live) -> None:
    threads: set[int] = set()

    class Plain:
        def actions(self, node: Node) -> Sequence[Action | str]:
            return ["x", "xx", "xxx"] if node.depth == 0 else []

        def act(self, ws: Workspace, action: Action) -> float:
            threads.add(threading.get_ident())
            return len(ws.run(["echo", action.name]).stdout) / 10

    with coppice.create(live.image) as ws:
        found = search.run(ws.checkpoint(), Plain(), UCT(c=0.5), budget=3, parallel=3)
    assert [a.name for a in found.best.trajectory()] == ["xxx"] and threading.get_ident() not in threads


def test_a_deleted_checkpoint(live: Live) -> None:
    """What is left to be tried below it is not tried, and nothing fails."""

    async def main() -> None:
        async with AsyncCoppice(live.url, live.token) as c:
            root = await root_of(c, live)
            found = await search.run_async(root, Words(), UCT(c=0.5), budget=3)
            for n in found.root.children:
                await (await c.checkpoint(n.id)).delete()
            again = await search.run_async(root, Words(), UCT(c=0.5))
            assert again.end == "nothing left to try" and again.tried == 0 and not again.problems

    asyncio.run(main())

"""Searchers in memory: one, several beside each other, and after crashes."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from coppice import search
from coppice.search import (
    PUCT, UCT, Action, Beam, BestOfN, Claim, Edge, Memory, Node, NodeChanged, NodeGone, Outcome, Record, RecordTooLarge,
    Search, SearchError, SearchResult, Strategy,
)
from coppice.search import _engine as engine
from simulation import ROOT, Broken, Shared, Words, check_tree, run, tree_of, word_of


def searcher(w: Words, s: Strategy, **options: Any) -> Search:
    return Search(ROOT, w, options.pop("store", w), s, **{"budget": 1000, "parallel": 1, "failures": 0, **options})


# -- one searcher

STRATEGIES: dict[str, Strategy] = {
    "uct": UCT(c=0.2), "widening": UCT(c=0.2, widening=2), "uct scaled": UCT(c=0.3, min_max=True), "puct": PUCT(c=0.5),
    "puct scaled": PUCT(c=0.5, min_max=True, fpu=0.2), "beam": Beam(width=2, depth=6),
}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("parallel", [1, 4, 16])
@pytest.mark.parametrize("name", STRATEGIES)
def test_it_finds_the_optimum(name: str, parallel: int, batch: int) -> None:
    """Each tree search may try a sixth of the 5,460 words."""

    async def main() -> None:
        w = Words("dbcadb", "abcd")
        r = await run(
            searcher(w, STRATEGIES[name], parallel=parallel, batch=batch, goal=1.0, root_value=0.0, budget=900)
        )
        assert r.end == "goal reached" and word_of(r.best) == "dbcadb" and r.best.value == 1
        nodes, _ = await check_tree(w)
        assert nodes == r.tried + 1 == len(w.tried) + 1

    asyncio.run(main())


@pytest.mark.parametrize("s", [UCT(c=0.2), PUCT(c=0.5)])
def test_it_is_better_than_chance(s: Strategy) -> None:
    """Half of the words would have to be tried on average."""
    r = asyncio.run(run(searcher(Words("dbcadb", "abcd"), s, goal=1.0)))
    assert r.end == "goal reached" and r.tried <= 200


def test_priors_lead_puct() -> None:
    w = Words("ccc", priors={"a": 1, "b": 1, "c": 8})
    asyncio.run(run(searcher(w, PUCT(c=1.25), goal=1.0)))
    assert w.tried == ["c", "cc", "ccc"]


def test_best_of_n() -> None:
    async def main() -> None:
        w = Words()
        r = await run(searcher(w, BestOfN(7), parallel=2, batch=2))
        assert "".join(sorted(w.tried)) == "aaabbcc" and r.end == "nothing left to try"
        assert [e.name for e in (await w.load(ROOT))[0].edges] == ["a", "b", "c", "a#2", "b#2", "c#2", "a#3"]
        assert r.best.action is not None and r.best.action.name == "c"
        await check_tree(w)

    asyncio.run(main())


def test_beam() -> None:
    async def main() -> None:
        w = Words()
        r = await run(searcher(w, Beam(width=1, depth=3), parallel=4))
        assert r.end == "nothing left to try" and word_of(r.best) == "cab"
        assert sorted(w.tried) == ["a", "b", "c", "ca", "caa", "cab", "cac", "cb", "cc"]
        await check_tree(w)

    asyncio.run(main())


def test_it_goes_on() -> None:
    """A search that has spent its budget goes on where it was, in another searcher too."""

    async def main() -> None:
        w = Words()
        for i, end in enumerate(["budget spent"] * 3 + ["nothing left to try"]):
            r = await run(searcher(w, UCT(c=0.5), budget=10))
            nodes, _ = await check_tree(w)
            assert r.end == end and nodes == min(10 * (i + 1), 39)
        assert len(w.tried) == len(set(w.tried)) == 39

    asyncio.run(main())


def test_one_search_runs_in_several_loops() -> None:
    w = Words()
    s = searcher(w, UCT(c=0.5), budget=10, parallel=3, store=Shared(w))
    assert asyncio.run(s.run()).end == "budget spent"
    s._budget = 1000
    assert asyncio.run(s.run()).end == "nothing left to try"
    assert len(w.tried) == len(set(w.tried)) == 39


def test_untried() -> None:
    """A hook that leaves actions out ends the search before they were tried, and the same search goes on without it."""

    async def main() -> None:
        w = Words()
        everything = False

        def untried(n: Node, actions: list[Action]) -> Sequence[Action]:
            return [a for a in reversed(actions) if everything or a.name != "c" or n.depth > 0]

        s = searcher(w, UCT(c=0.5, untried=untried))
        r = await run(s)
        assert r.end == "nothing left to try" and r.tried == 26 and w.tried[0] == "b"
        everything = True
        r = await run(s)
        assert r.end == "nothing left to try" and r.tried == 39

    asyncio.run(main())


def test_the_tree_and_the_steps() -> None:
    async def main() -> None:
        w = Words()
        steps: list[tuple[int, str, int]] = []

        async def on_step(r: SearchResult) -> None:
            await asyncio.sleep(0)
            steps.append((r.tried, word_of(r.best), sum(1 for _ in r.root.walk())))

        r = await run(searcher(w, UCT(c=0.2), goal=1.0, batch=3, on_step=on_step))
        assert steps == [(3, "c", 4), (6, "ca", 7), (9, "cab", 10)]
        got = [f"{n.depth}{word_of(n)} {n.visits} {n.mean:.3f}" for n in r.root.walk()]
        assert got == [
            "0 9 0.444", "1a 1 0.000", "1b 1 0.000", "1c 7 0.571", "2ca 4 0.750", "3caa 1 0.667", "3cab 1 1.000",
            "3cac 1 0.667", "2cb 1 0.333", "2cc 1 0.333",
        ]
        assert [a.name for a in r.best.trajectory()] == ["c", "a", "b"]

    asyncio.run(main())


def test_what_is_shown(tmp_path: Path) -> None:
    async def main() -> SearchResult:
        return await run(searcher(Words(), UCT(c=0.2), goal=1.0, batch=3))

    r = asyncio.run(main())
    lines = str(r).splitlines()
    assert lines[0] == "* root  value 0.000  mean 0.444  visits 9" and len(lines) == 10
    assert [line.split()[1] for line in lines if line.startswith("*")] == ["root", "c", "a", "b"]
    assert r.render(2).splitlines()[2:] == ["…"]
    leaves = r.trajectories()
    assert len(leaves) == 7 and r.to_jsonl(tmp_path / "t") == 7 == len((tmp_path / "t").read_text().splitlines())
    best = next(x for x in leaves if x["value"] == 1)
    assert [s["action"] for s in best["steps"]] == ["c", "a", "b"] and best["root_id"] == ROOT
    # What the task kept with a node is known of nodes that were read, as the best one is, and of no others.
    assert [s["data"] for s in best["steps"]] == [{"word": "c"}, {"word": "ca"}, {"word": "cab"}]
    assert [x["steps"][-1]["data"] for x in leaves].count(None) == 6


def test_parquet(tmp_path: Path) -> None:
    """Reads back what was written, with data of several kinds, and an empty file has the same columns."""
    from pyarrow.parquet import read_table

    root = Node("root")
    first = Node("a", root, Action("Änderung", {"line": 3}), 0.5, 2, 1.5, data=["x", None, "\ud800"])
    root.children = [first, Node("b", root, Action("stop", "now"), 0.25, 1, 0.25, terminal=True, data=0)]
    first.children = [Node("c", first, Action("go on"), 1.0, 1, 1.0)]
    r = SearchResult(first.children[0], 3, "", [], lambda: root)
    assert r.to_parquet(tmp_path / "some") == 2
    some = read_table(tmp_path / "some")
    rows = some.to_pylist()
    for row in rows:
        for step in row["steps"]:
            step.update({k: json.loads(step[k]) for k in ("action_data", "data") if step[k] is not None})
    assert rows == r.trajectories() and [len(row["steps"]) for row in rows] == [2, 1]

    assert SearchResult(root, 0, "", [], lambda: Node("root")).to_parquet(tmp_path / "none") == 0
    assert read_table(tmp_path / "none").schema == some.schema


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    root = Node("root")
    with pytest.raises(ImportError, match=r"coppice\[parquet\]"):
        SearchResult(root, 0, "", [], lambda: root).to_parquet(tmp_path / "t")
    assert not (tmp_path / "t").exists()


def test_names_are_shown_harmlessly() -> None:
    root = Node("root")
    child = Node("n", root, Action("<script>\x1b[2J\n"))
    root.children.append(child)
    shown = SearchResult(child, 1, "", [], lambda: root)
    assert "\x1b" not in shown.render() and shown.render().count("\n") == 1
    lines = shown._repr_html_().removeprefix("<pre>").removesuffix("</pre>").splitlines()
    assert lines[0].startswith("* root") and lines[1].startswith("*   &lt;script&gt;\ufffd[2J\ufffd  value")
    assert "<" not in "".join(lines)


def test_the_goal_cancels() -> None:
    """What is under way when the goal is reached is cancelled, and nobody has it afterwards."""

    async def main() -> None:
        w = Words("c")
        cancelled = []

        async def hook(word: str) -> None:
            if word != "c":
                try:
                    await asyncio.sleep(3600)
                except asyncio.CancelledError:
                    cancelled.append(word)
                    raise

        w.hook = hook
        r = await run(searcher(w, UCT(c=0), parallel=3, goal=1.0))
        assert r.end == "goal reached" and r.tried == 1 and sorted(cancelled) == ["a", "b"] and not r.problems
        await check_tree(w)

    asyncio.run(main())


def test_failures() -> None:
    async def main() -> None:
        w, left = Words(), 3

        async def hook(word: str) -> None:
            nonlocal left
            left -= 1
            if left >= 0:
                raise Broken("no capacity")

        w.hook = hook
        s = searcher(w, UCT(c=0), failures=1, poll=0.01)
        with pytest.raises(Broken):
            await run(s)
        assert s.result.tried == 0 and left == 1 and len(s.result.problems) == 2 and s.result.end == ""
        await check_tree(w)
        r = await run(s)
        assert r.end == "nothing left to try" and r.tried == 39
        await check_tree(w)

    asyncio.run(main())


@pytest.mark.parametrize("whole", [True, False])
def test_an_action_that_fails_for_a_while(whole: bool) -> None:
    """It is tried again. Whether the expansion fails, or one of its actions, makes no difference."""

    class Moody(Words):
        left = 5

        async def expand(self, node: Node, actions: Sequence[Action]) -> Sequence[Outcome]:
            if word_of(node) + actions[0].name == "ca" and self.left > 0:
                self.left -= 1
                if whole:
                    raise Broken
                return [Outcome(error=Broken())]
            return await super().expand(node, actions)

    async def main() -> None:
        w = Moody()
        r = await run(searcher(w, UCT(c=0.5), failures=5, poll=0.001, parallel=2))
        assert r.end == "nothing left to try" and r.tried == 39 and len(r.problems) == 5
        assert len(w.tried) == len(set(w.tried)) == 39
        await check_tree(w)

    asyncio.run(main())


NO_NUMBER = Outcome(float("nan"), child="x")


@pytest.mark.parametrize("outcomes", [[], [NO_NUMBER], [Outcome(1, child="x")] * 2, [None], None])
def test_wrong_outcomes(outcomes: Any) -> None:
    class Wrong(Words):
        async def expand(self, node: Node, actions: Sequence[Action]) -> Sequence[Outcome]:
            result: Sequence[Outcome] = outcomes
            return result

    async def main() -> None:
        w = Wrong()
        with pytest.raises((ValueError, TypeError, AttributeError)):
            await run(searcher(w, UCT(c=1), poll=0.001))
        await check_tree(w)

    asyncio.run(main())


def test_the_lease() -> None:
    """An expansion that takes longer is cancelled, so that no claim ends while its owner works."""

    async def main() -> None:
        w = Words()
        w.hook = lambda _: asyncio.sleep(3600)
        with pytest.raises(TimeoutError, match="longer than its lease of 0.1 s"):
            await run(searcher(w, UCT(c=1), lease=0.1))
        await check_tree(w)

    asyncio.run(main())


def test_cancel() -> None:
    async def main() -> None:
        w = Words()
        reached = asyncio.Event()

        async def hook(word: str) -> None:
            if len(word) == 2:
                reached.set()
                await asyncio.sleep(3600)

        w.hook = hook
        s = searcher(w, UCT(c=0), store=Shared(w), parallel=2)
        running = asyncio.create_task(run(s))
        await reached.wait()
        with pytest.raises(RuntimeError, match="running already"):
            await s.run()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert s.result.tried == 3 and word_of(s.result.best) == "c" and not s.result.problems
        assert len(asyncio.all_tasks()) == 1
        await check_tree(w)
        w.hook = None
        assert (await run(s)).end == "nothing left to try"

    asyncio.run(main())


@pytest.mark.parametrize("turns", range(0, 60, 3))
def test_a_cancellation_at_any_moment(turns: int) -> None:
    """What was done is written down, and nothing is claimed any more."""

    async def main() -> None:
        w = Words()
        w.hook = lambda _: asyncio.sleep(0)
        s = searcher(w, UCT(c=0.5), store=Shared(w), parallel=3, batch=2)
        running = asyncio.create_task(s.run())
        for _ in range(turns):
            await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        nodes, _ = await check_tree(w)
        assert nodes == len(w.tried) == s.result.tried
        assert (await run(s)).end == "nothing left to try" and len(w.tried) == len(set(w.tried)) == 39

    asyncio.run(main())


def test_a_record_that_is_too_large() -> None:
    class Large(Words):
        async def actions(self, node: Node) -> Sequence[Action]:
            return [Action("a", data="x" * 13000)]

    async def main() -> None:
        w = Large()
        with pytest.raises(RecordTooLarge, match="node root: 1 actions need 13.* propose fewer actions"):
            await run(searcher(w, UCT(c=1)))
        assert w.tried == [] and (await w.load(ROOT))[0] == Record()

    asyncio.run(main())


def test_a_reason() -> None:
    """An action that leads nowhere counts as tried."""

    class Refuser(Words):
        async def actions(self, node: Node) -> Sequence[Action]:
            return [Action("a")]

        async def expand(self, node: Node, actions: Sequence[Action]) -> Sequence[Outcome]:
            return [Outcome(reason="x" * 1000)]

    async def main() -> None:
        w = Refuser()
        r = await run(searcher(w, UCT(c=1)))
        record, _ = await w.load(ROOT)
        assert r.end == "nothing left to try" and r.tried == 1 and r.best is not None
        assert record.done and record.visits == 0 and record.edges[0].reason == "x" * 160

    asyncio.run(main())


def test_a_hook_that_fails_ends_the_search() -> None:
    def on_step(r: SearchResult) -> None:
        raise KeyError("mine")

    async def main() -> None:
        w = Words()
        with pytest.raises(KeyError, match="mine"):
            await run(searcher(w, UCT(c=1), failures=100, on_step=on_step, parallel=3))
        await check_tree(w)

    asyncio.run(main())


def test_settings() -> None:
    w = Words()
    for options in (
        {"parallel": 0}, {"batch": 0}, {"budget": -1}, {"failures": -1}, {"lease": 0}, {"poll": -1}, {"searcher": "-"},
        {"searcher": "x" * 129}, {"goal": float("nan")}, {"root_value": float("inf")},
    ):
        with pytest.raises(ValueError):
            searcher(w, UCT(c=1), **options)
    with pytest.raises(ValueError, match="needs a root"):
        Search("", w, w, UCT(c=1))
    with pytest.raises(ValueError, match="it is UCT, PUCT, BestOfN or Beam"):
        Search(ROOT, w, w, "UCT")  # type: ignore[arg-type]


def test_no_thread_is_used() -> None:
    before = threading.active_count()

    async def main() -> None:
        await run(searcher(Words(), UCT(c=1), parallel=8, on_step=lambda r: seen.append(threading.active_count())))

    seen: list[int] = []
    asyncio.run(main())
    assert max(seen) == before


# -- several searchers


@pytest.mark.parametrize("searchers", [1, 2, 4])
@pytest.mark.parametrize("s", [UCT(c=1), PUCT(c=1), Beam(width=100, depth=3)], ids=["uct", "puct", "beam"])
def test_every_word_is_tried_once(s: Strategy, searchers: int) -> None:
    async def main() -> None:
        w = Words()
        w.hook = lambda word: asyncio.sleep(len(word) * 0.007 + ord(word[-1]) % 5 / 1000)
        all_of_them = [
            searcher(w, s, store=Shared(w), parallel=4, searcher=f"searcher {i}", poll=0.01) for i in range(searchers)
        ]
        results = await asyncio.gather(*map(run, all_of_them))
        for r in results:
            assert r.end == "nothing left to try" and word_of(r.best) == "cab" and r.tried > 0
        nodes, _ = await check_tree(w)
        record, _ = await w.load(ROOT)
        assert nodes == len(set(w.tried)) == len(w.tried) == sum(r.tried for r in results) == record.visits == 39

    asyncio.run(main())


def test_conflicts() -> None:
    """Nothing is lost when others change the same nodes all the time."""

    async def main() -> None:
        w = Words("cabd", "abcd")
        shared = Shared(w)
        shared.others = True
        await asyncio.gather(*(
            run(searcher(w, UCT(c=0.5, virtual_loss=2), store=shared, parallel=3, poll=0.001)) for _ in range(4)
        ))
        nodes, _ = await check_tree(w)
        assert nodes == len(set(w.tried)) == len(w.tried) == 340 and shared.conflicts > 100

    asyncio.run(main())


class Clock:
    """The time of searchers, which a test moves on."""

    def __init__(self) -> None:
        self.now = datetime(2026, 11, 28, 15, tzinfo=timezone.utc)

    def __call__(self) -> datetime:
        return self.now


def timed(s: Search, clock: Clock) -> Search:
    tree_of(s).now = clock
    return s


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("again", ["first", "second"])
def test_a_crash(again: str, made: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others leave the actions of a searcher that crashed alone until its claims are over.

    Then they try them, or take over the children that it has made.
    """
    monkeypatch.setattr(engine, "WRITE_TIME", 0.05)

    async def main() -> None:
        w, clock = Words("cab", "abcde"), Clock()
        mine = Shared(w)
        under_way = []

        async def hook(word: str) -> None:
            under_way.append(word)
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                if not made:
                    raise

        w.hook = hook
        one = asyncio.create_task(
            timed(searcher(w, UCT(c=0.5), store=mine, parallel=3, searcher="first", lease=60, poll=0.01), clock).run()
        )
        while len(under_way) < 3:
            await asyncio.sleep(0.001)
        mine.dead = True
        one.cancel()
        with pytest.raises(asyncio.CancelledError):
            await one
        w.hook = None
        record, _ = await w.load(ROOT)
        until = clock.now + timedelta(seconds=90)
        assert [e.in_flight for e in record.edges] == [{"first": Claim(1, until)}] * 3 + [{}] * 2
        assert sorted(w.tried) == (["a", "b", "c"] if made else [])

        began, first = clock.now, None

        async def tick() -> None:
            nonlocal first
            while True:
                known, _ = await w.load(ROOT)
                if first is None and any(e.child for e in known.edges[:3]):
                    first = clock.now
                clock.now += timedelta(seconds=1)
                await asyncio.sleep(0.002)

        ticking = asyncio.create_task(tick())
        r = await run(timed(searcher(w, UCT(c=0.5), searcher=again, lease=6000, poll=0.001), clock))
        await asyncio.sleep(0.01)
        ticking.cancel()
        assert r.end == "nothing left to try" and word_of(r.best) == "cab"
        assert first is not None and (first - began >= timedelta(seconds=90)) == (again == "second")
        nodes, _ = await check_tree(w)
        assert nodes == len(set(w.tried)) == len(w.tried) == 155 and r.tried == (152 if made else 155)

    asyncio.run(main())


@pytest.mark.parametrize("searchers", [1, 2])
@pytest.mark.parametrize("parallel", [1, 3])
def test_lost_writes(parallel: int, searchers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A searcher that made a child while its store was away, and could not write it down, finds it later.

    Neither it nor another searcher makes it again.
    """
    monkeypatch.setattr(engine, "WRITE_TIME", 0.05)

    async def main() -> None:
        w = Words()
        first = Shared(w)

        class Lossy:
            def __init__(self, fails: bool) -> None:
                self.fails = fails

            async def actions(self, node: Node) -> Sequence[Action]:
                return await w.actions(node)

            async def expand(self, node: Node, actions: Sequence[Action]) -> Sequence[Outcome]:
                await asyncio.sleep(0.005)
                out = await w.expand(node, actions)
                if self.fails and w.tried[-1] in ("a", "b", "ca"):
                    first.dead = True
                    asyncio.get_running_loop().call_later(0.15, setattr, first, "dead", False)
                return out

        clocks = [Clock() for _ in range(searchers)]

        async def tick() -> None:
            while True:
                await asyncio.sleep(0.01)
                for c in clocks:
                    c.now += timedelta(seconds=5)

        ticking = asyncio.create_task(tick())
        results = await asyncio.gather(*(
            run(timed(
                Search(ROOT, Lossy(i == 0), first if i == 0 else Shared(w), UCT(c=0.5), budget=1000, parallel=parallel,
                       failures=1000, poll=0.01, lease=60),
                clocks[i],
            ))
            for i in range(searchers)
        ))
        ticking.cancel()
        for r in results:
            assert r.end == "nothing left to try" and word_of(r.best) == "cab"
        nodes, _ = await check_tree(w)
        assert nodes == len(set(w.tried)) == len(w.tried) == 39

    asyncio.run(main())


def test_lost_children_are_looked_for() -> None:
    """Each write of a node keeps actions that may have led to a child from all, until one has looked for it."""

    async def main() -> None:
        w = Words()
        s = searcher(w, UCT(c=1), searcher="me")
        root = tree_of(s).root
        root.lost = {"a"}
        await s._update(root, {}, lambda record: record.propose([Action("a"), Action("b")]))
        record, _ = await w.load(ROOT)
        for name in ("me", "other"):
            assert [e.abandoned(name, datetime.now(timezone.utc)) for e in record.edges] == [True, False]

    asyncio.run(main())


@pytest.mark.parametrize("hours, want", [(1, "b"), (-1, "a")])
def test_virtual_loss_is_shared(hours: int, want: str) -> None:
    """A searcher keeps away from where another one has much under way."""

    async def main() -> None:
        w = Words("cab", "ab")
        for letter in "ab":
            w.make(ROOT, letter, letter)
        half: dict[str, Any] = {"value": 0.5, "visits": 1, "value_sum": 0.5, "min": 0.5, "max": 0.5}
        a, b = Edge("a", child="a-1", **half), Edge("b", child="b-2", **half)
        a.in_flight = {"other": Claim(3, datetime.now(timezone.utc) + timedelta(hours=hours))}
        await w.save(ROOT, 1, Record(visits=2, value_sum=1, min=0.5, max=0.5, proposed=True, edges=[a, b]))
        w.tried.clear()
        await run(searcher(w, UCT(c=0.5), budget=1))
        assert len(w.tried) == 1 and w.tried[0][0] == want

    asyncio.run(main())


def test_claims_on_the_way() -> None:
    """An expansion is in flight on its whole way, and on no other."""

    async def main() -> None:
        w = Words()

        async def hook(word: str) -> None:
            if len(word) < 3:
                return
            for at, id in enumerate([ROOT, "c-3", "ca-4"]):
                record, _ = await w.load(id)
                for e in record.edges:
                    if e.name != word[at]:
                        assert not e.in_flight
                        continue
                    assert list(e.in_flight) == ["me"] and e.in_flight["me"].count == 1
                    left = e.in_flight["me"].until - datetime.now(timezone.utc)
                    assert timedelta(minutes=10) < left < timedelta(minutes=11)

        w.hook = hook
        r = await run(searcher(w, UCT(c=0), goal=1.0, searcher="me"))
        assert r.end == "goal reached"
        await check_tree(w)

    asyncio.run(main())


def test_deleted_nodes() -> None:
    """Nothing is tried below a node that somebody has deleted."""

    async def main() -> None:
        w = Words()
        mine = Shared(w)
        mine.gone = "b"
        r = await run(searcher(w, UCT(c=0.5), store=mine))
        assert r.end == "nothing left to try" and word_of(r.best) == "cab" and r.tried == 27 and not r.problems
        await check_tree(w)
        mine.gone = ROOT
        with pytest.raises(NodeGone):
            await run(searcher(w, UCT(c=0.5), store=mine))

    asyncio.run(main())


def test_endless_conflicts() -> None:
    class Never(Words):
        async def save(self, id: str, version: int, record: Record) -> int:
            raise NodeChanged(id)

    async def main() -> None:
        with pytest.raises(NodeChanged, match="1000 times"):
            await searcher(Never(), UCT(c=1), root_value=0.5).run()

    asyncio.run(main())


def test_a_crash_on_the_way_up() -> None:
    """A searcher has finished a subtree, and crashed before it told the parents: the next one tells them."""

    async def main() -> None:
        w = Words()
        await run(searcher(w, UCT(c=0.5)))
        for id, action in ((ROOT, "c"), ("c-3", "a")):
            record, version = await w.load(id)
            e = record.edge(action)
            assert e is not None
            record.done = e.done = False
            e.visits, e.value_sum, e.min, e.max = 1, e.value, e.value, e.value
            e.in_flight = {"crashed": Claim(1, datetime.now(timezone.utc) - timedelta(seconds=1))}
            record.count()
            await w.save(id, version, record)
        r = await run(searcher(w, UCT(c=0.5)))
        record, _ = await w.load(ROOT)
        assert r.end == "nothing left to try" and r.tried == 0 and record.visits == 39 and record.done
        await check_tree(w)

    asyncio.run(main())


def test_the_best_node_of_others_is_read() -> None:
    """The best node is known by its path and its data, also if another searcher has found it."""

    async def main() -> None:
        w = Words()
        await run(searcher(w, UCT(c=0.5)))
        r = await run(searcher(w, UCT(c=0.5)))
        assert r.tried == 0 and word_of(r.best) == "cab" and r.best.data == {"word": "cab"} and r.best.terminal

    asyncio.run(main())


def test_the_whole_tree_is_read() -> None:
    async def main() -> None:
        w = Words()
        await run(searcher(w, UCT(c=0.5)))
        s = searcher(w, UCT(c=0.5))
        r = await run(s)
        assert sum(1 for _ in r.root.walk()) < 40
        await s.read_all()
        below = [n for n in s.result.root.walk() if n.parent is not None]
        assert len(below) == 39 and all(n.data == {"word": word_of(n)} for n in below)

    asyncio.run(main())


def test_times() -> None:
    """A searcher that is slow, and not dead, has written down everything before others take over its actions."""
    from coppice.search import _checkpoints as checkpoints

    assert checkpoints.BEGUN_TIME + 2 * checkpoints.END_TIME + engine.WRITE_TIME < engine.MARGIN


def test_memory() -> None:
    async def main() -> None:
        m = Memory()
        assert await m.load("x") == (Record(), 1)
        version = await m.save("x", 1, Record(value=1.0))
        with pytest.raises(NodeChanged):
            await m.save("x", 1, Record())
        record, now = await m.load("x")
        record.value = 2.0
        assert version == now == 2 and (await m.load("x"))[0].value == 1
        m.add("x", "y", Record(action="a"))
        assert await m.children("x") == {"y": Record(action="a")}

    asyncio.run(main())


def test_errors_have_a_base() -> None:
    for kind in (NodeChanged, NodeGone, RecordTooLarge, search.RecordMangled):
        assert issubclass(kind, SearchError)

"""Strategies without machines, and searches on a live controller."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from conftest import Live
from coppice import AsyncCoppice, AsyncWorkspace, Config, Coppice, Workspace, search
from coppice.search import PUCT, UCT, Action, Beam, BestOfN, Node, Outcome, Strategy
from coppice.search._tree import count, from_record, record
from double import Answer, Double, Request
from samples import CKPT, OP, WS, checkpoint, workspace

TARGET = "cab"


def score(word: str) -> float:
    """How much of the target a word begins with."""
    same = 0
    while same < min(len(word), len(TARGET)) and word[same] == TARGET[same]:
        same += 1
    return same / len(TARGET)


def word(node: Node) -> str:
    return "".join(a.name[0] for a in node.trajectory())


def simulate(strategy: Strategy, steps: int, parallel: int = 1, priors: dict[str, float] | None = None) -> tuple[Node, list[str]]:
    """Runs a strategy on words, with expansions that end in a random order."""
    rng = random.Random(1)
    root = Node("root")
    running: list[tuple[Node, Action]] = []
    order: list[str] = []

    def end() -> None:
        node, action = running.pop(rng.randrange(len(running)))
        node.under_way.discard(action.name)
        for above in node.path():
            above.pending -= 1
        child = Node(f"n{len(order)}", action=action, terminal=node.depth + 1 == len(TARGET))
        child.parent = node
        child.score = score(word(child))
        order.append(word(child))
        node.add(child)

    while len(order) + len(running) < steps:
        choice = strategy.select(root) if len(running) < parallel else None
        if isinstance(choice, Node):
            choice.actions = [Action(c, prior=(priors or {}).get(c, 1.0)) for c in "abc"]
        elif choice is not None:
            node, action = choice
            node.under_way.add(action.name)
            for above in node.path():
                above.pending += 1
            running.append(choice)
        elif running:
            end()
        else:
            break
    while running:
        end()
    return root, order


def check(root: Node) -> None:
    """The statistics of every node are the sums of what is below it, and nothing is under way."""
    for node in root.walk():
        below = [n for n in node.walk() if n is not root]
        assert node.visits == len(below) and node.value == pytest.approx(sum(n.score for n in below))
        assert node.pending == 0 and not node.under_way
        assert len({c.action.name for c in node.children if c.action}) == len(node.children)


@pytest.mark.parametrize("parallel", [1, 4, 16])
@pytest.mark.parametrize("strategy", [UCT(), PUCT(), UCT(exploration=0.5), PUCT(exploration=3)])
def test_tree_searches_find_the_word(strategy: Strategy, parallel: int) -> None:
    root, order = simulate(strategy, 39, parallel)
    assert TARGET in order
    check(root)


@pytest.mark.parametrize("strategy", [UCT(), PUCT()])
def test_it_ends_when_all_was_tried(strategy: Strategy) -> None:
    root, order = simulate(strategy, 1000, 8)
    assert len(order) == len(set(order)) == 3 + 9 + 27
    check(root)


def test_uct_is_better_than_chance() -> None:
    _, order = simulate(UCT(exploration=0.3), 39)
    assert order.index(TARGET) <= 12  # of 39; without looking it is in the middle


def test_virtual_loss_spreads() -> None:
    """Of eight expansions at once, not all are below the best node."""
    root, _ = simulate(UCT(), 3)
    for child in root.children:
        child.actions = [Action(c) for c in "abc"]
    chosen = []
    for _ in range(8):
        choice = UCT().select(root)
        assert isinstance(choice, tuple)
        node, action = choice
        node.under_way.add(action.name)
        for above in node.path():
            above.pending += 1
        chosen.append(word(node))
    assert len(set(chosen)) == 3


def test_priors_lead_puct() -> None:
    _, order = simulate(PUCT(), 3, priors={"c": 0.98, "a": 0.01, "b": 0.01})
    assert order[0] == "c" and order[1].startswith("c")


def test_best_of_n() -> None:
    root, order = simulate(BestOfN(7), 100, 3)
    assert sorted(order) == list("aaabbcc") and len(root.children) == 7
    check(root)


def test_beam() -> None:
    root, order = simulate(Beam(width=1, depth=3), 100, 4)
    assert len(order) == 9 and TARGET in order
    assert [w[0] for w in order if len(w) == 2] == ["c"] * 3
    check(root)


def test_records() -> None:
    node = Node("n", action=Action("a", {"k": [1]}, 0.5), score=0.25, terminal=True, data={"x": None})
    again = from_record("n", json.loads(json.dumps(record(node))))
    assert again is not None and (again.action, again.score, again.terminal, again.data) == (
        node.action, 0.25, True, {"x": None},
    )


@pytest.mark.parametrize("found", [None, 5, "x", [], {}, {"action": 5}, {"action": {}}, {"action": {"name": 5}}])
def test_annotations_of_others(found: object) -> None:
    assert from_record("n", found) is None
    hostile = from_record("n", {"action": {"name": "a", "prior": "x"}, "score": 1e999, "failed": [1, "b"], "visits": -5})
    assert hostile is not None and hostile.score == 0 and hostile.failed == ["b"]
    count(hostile)
    assert hostile.visits == 1


def test_names_are_shown_harmlessly() -> None:
    root = Node("root")
    root.add(Node("n", action=Action("<script>\x1b[2J\n")))
    shown = search.SearchResult(root)
    assert "\x1b" not in shown.render() and shown.render().count("\n") == 1
    assert "<script>" not in shown._repr_html_()


class Machines:
    """A server with a checkpoint, its forks, and the checkpoints of those."""

    def __init__(self, double: Double) -> None:
        self.nodes = [checkpoint()]
        self.ended = 0
        self.may_fork = threading.Event()
        self.may_fork.set()
        self.lock = threading.Lock()
        double.script = [self.answer]

    def answer(self, r: Request) -> Answer:
        if r.path.endswith("/tree"):
            return Answer(200, {"items": [{"checkpoint": n, "depth": 0, "effects_count": 0, "workspaces": []} for n in self.nodes]})
        if r.path.endswith("/fork"):
            self.may_fork.wait(60)
            children = [{"timings": [], "workspace": workspace()}]
            return Answer(201, {"operation_id": OP, "checkpoint_id": CKPT, "timings": [], "children": children})
        if r.path.endswith("/checkpoints") and r.method == "POST":
            with self.lock:
                new = checkpoint(id=f"{CKPT[:-2]}{len(self.nodes):02}", parent_id=CKPT, annotations=r.json()["annotations"])
                self.nodes.append(new)
            return Answer(201, new)
        if r.method == "DELETE":
            with self.lock:
                self.ended += 1
            return Answer(200, workspace(state="terminated"))
        return Answer(200, next(n for n in self.nodes if n["id"] == r.path.rsplit("/", 1)[1]))  # PATCH


class Constant:
    def actions(self, node: Node) -> Sequence[Action | str]:
        return list("abcdefgh") if node.depth == 0 else []

    async def act(self, ws: AsyncWorkspace, action: Action) -> float:
        return 0.5


def test_a_cancelled_fork_leaves_no_machine(double: Double) -> None:
    machines = Machines(double)
    machines.may_fork.clear()

    async def main() -> None:
        async with AsyncCoppice(config=Config(server=double.url)) as c:
            running = asyncio.create_task(search.run_async(await c.checkpoint(CKPT), Constant(), UCT(), steps=1))
            while not any(r.path.endswith("/fork") for r in double.requests):
                await asyncio.sleep(0.01)
            running.cancel()
            asyncio.get_running_loop().call_later(0.1, machines.may_fork.set)
            with pytest.raises(asyncio.CancelledError):
                await running
            assert machines.ended == 1 and double.requests[-1].path.endswith(WS)

    asyncio.run(main())


def test_a_search_is_run_twice(double: Double) -> None:
    Machines(double)

    async def main() -> None:
        async with AsyncCoppice(config=Config(server=double.url)) as c:
            once = search.Search(await c.checkpoint(CKPT), Constant(), UCT(), steps=3)
            await once.run()
            found = await once.run()
            assert found.steps == 3 and len(found.root.children) == 3
            check(found.root)

    asyncio.run(main())


def test_plain_functions_run_at_once(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as `parallel` says; the threads of the loop depend on the processors."""
    Machines(double)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    together = threading.Barrier(8)

    class Plain:
        def actions(self, node: Node) -> Sequence[Action | str]:
            return list("abcdefgh") if node.depth == 0 else []

        def act(self, ws: Workspace, action: Action) -> float:
            together.wait(60)
            return 0.5

    with Coppice(config=Config(server=double.url)) as c:
        found = search.run(c.checkpoint(CKPT), Plain(), UCT(), steps=8, parallel=8)
    assert not found.problems and found.steps == 8


def test_annotations_of_one_name(double: Double) -> None:
    Machines(double)
    with Coppice(config=Config(server=double.url)) as c, pytest.raises(ValueError, match="of its own"):
        search.run(c.checkpoint(CKPT), Constant(), UCT(), name="score")


class Words:
    """Each action appends a letter to a file in the machine: the state is the machine's."""

    def __init__(self) -> None:
        self.tried: list[str] = []
        self.fail: set[str] = set()

    def actions(self, node: Node) -> Sequence[Action | str]:
        return list("abc") if node.depth < len(TARGET) else []

    async def act(self, ws: AsyncWorkspace, action: Action) -> Outcome | float:
        old = await ws.files.read_text("/word") if await ws.files.exists("/word") else ""
        new = old + action.name[0]
        self.tried.append(new)
        if new in self.fail:
            raise RuntimeError("this cannot be done")
        await ws.files.write("/word", new)
        return Outcome(score(new), terminal=len(new) == len(TARGET), data={"word": new})


@pytest.mark.live
@pytest.mark.parametrize("strategy", [UCT(), PUCT(), Beam(2, 3), BestOfN(5)], ids=["uct", "puct", "beam", "best"])
def test_live(live: Live, strategy: Strategy, tmp_path: Path) -> None:
    async def main() -> None:
        async with AsyncCoppice(live.url, live.token) as c, await c.create(live.image) as ws:
            node = await ws.checkpoint()
            found = await search.run_async(node, Words(), strategy, steps=39, parallel=8, goal=1.0)
            assert not found.problems
            check(found.root)
            if not isinstance(strategy, BestOfN):
                assert found.best.data == {"word": TARGET} and word(found.best) == TARGET
                winner = await c.checkpoint(found.best.checkpoint_id)
                async with await winner.fork() as forks:
                    assert await forks[0].files.read_text("/word") == TARGET
            assert found.to_jsonl(tmp_path / "t") == len((tmp_path / "t").read_text().splitlines()) > 0
            kept = [n.checkpoint async for n in node.tree()]
            for k in kept[1:]:
                assert k.annotations["search"]["visits"] >= 1 and k.annotations["score"] <= 1
            await node.refresh()
            assert node.annotations["search"]["visits"] == found.steps == len(kept) - 1
            assert [w async for w in c.workspaces(labels=["coppice-search"])] == []

    asyncio.run(main())


@pytest.mark.live
def test_a_search_goes_on(live: Live) -> None:
    async def main() -> None:
        async with AsyncCoppice(live.url, live.token) as c, await c.create(live.image) as ws:
            node = await ws.checkpoint()
            first = Words()
            first.fail = {"a"}
            found = await search.run_async(node, first, UCT(), steps=8, parallel=2)
            assert found.steps == 8 and len(found.problems) == 1
            second = Words()
            again = await search.run_async(await c.checkpoint(node.id), second, UCT(), steps=20, parallel=4)
            assert again.steps == 20 and len(second.tried) == 12
            assert not set(first.tried) & set(second.tried)
            check_failed(again.root)

    asyncio.run(main())


def check_failed(root: Node) -> None:
    assert root.failed == ["a"]
    assert root.visits == sum(1 for n in root.walk() if n is not root) + 1


@pytest.mark.live
def test_an_interrupted_search_leaves_no_machine(live: Live) -> None:
    class Slow(Words):
        async def act(self, ws: AsyncWorkspace, action: Action) -> float:
            self.tried.append(action.name)
            await ws.run("sleep 3600")
            return 0

    async def main() -> None:
        async with AsyncCoppice(live.url, live.token) as c, await c.create(live.image) as ws:
            task = Slow()
            running = asyncio.create_task(search.run_async(await ws.checkpoint(), task, UCT(), parallel=3))
            while len(task.tried) < 3:
                await asyncio.sleep(0.05)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert [w async for w in c.workspaces(labels=["coppice-search"])] == []

    asyncio.run(main())


@pytest.mark.live
def test_plain_functions(coppice: Coppice, live: Live) -> None:
    threads: set[int] = set()

    class Plain:
        def actions(self, node: Node) -> Sequence[Action | str]:
            return ["x", "xx", "xxx"] if node.depth == 0 else []

        def act(self, ws: Workspace, action: Action) -> float:
            threads.add(threading.get_ident())
            return len(ws.run(["echo", action.name]).stdout) / 10

    with coppice.create(live.image) as ws:
        found = search.run(ws.checkpoint(), Plain(), UCT(), steps=3, parallel=3)
    assert [a.name for a in found.best.trajectory()] == ["xxx"] and threading.get_ident() not in threads


@pytest.mark.live
def test_a_wrong_score(coppice: Coppice, live: Live) -> None:
    class Wrong:
        def actions(self, node: Node) -> Sequence[Action | str]:
            return ["a", "b"]

        def act(self, ws: Workspace, action: Action) -> float:
            return 7.0

    with coppice.create(live.image) as ws, pytest.raises(ValueError, match="from 0 to 1"):
        search.run(ws.checkpoint(), Wrong(), UCT(), steps=2, failures_allowed=0)

"""Searches whose nodes are checkpoints, on a server of this process."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from coppice import AsyncCoppice, AsyncWorkspace, Config, Coppice, Workspace, models, search
from coppice import _operations as op
from coppice._policy import Call
from coppice.search import UCT, Action, BestOfN, Checkpoints, Forks, Node, NodeChanged, NodeGone, Outcome, Record
from coppice.search import RecordMangled, RecordTooLarge
from double import Answer, Double, Request, problem
from samples import CKPT, OP, WS, checkpoint, operation, workspace

KEY = "coppice.search/v1"


class Machines:
    """A server with a checkpoint, its forks, and the checkpoints of those."""

    def __init__(self, double: Double) -> None:
        self.nodes = {CKPT: checkpoint()}
        self.parents: dict[str, str] = {}  # of machines
        self.alive: set[str] = set()
        self.forks: dict[str, dict[str, Any]] = {}  # by key
        self.forking = ""  # the state of a fork that is asked for: "" is that it is made at once
        self.slow_capture = threading.Event()
        self.slow_capture.set()
        self.refuse_capture: Answer | None = None
        self.never = threading.Event()
        self.lock = threading.Lock()
        double.script = [self.answer]

    def answer(self, r: Request) -> Answer:
        parts = r.path.split("/")[2:]
        if r.method == "POST" and parts[0] == "workspaces" and self.refuse_capture is None:
            self.slow_capture.wait(30)
        if parts[0] == "operations" and r.method == "GET":
            self.never.wait(0.2)
            return Answer(200, operation("running", kind="fork_checkpoint"))
        with self.lock:
            return self.do(r, parts)

    def do(self, r: Request, parts: list[str]) -> Answer:
        if r.path.endswith("/fork"):
            return self.fork(r, parts[1])
        if r.path.endswith("/cancel"):
            ended = {"code": "CANCELED", "message": "it ended"}
            return Answer(200, operation("failed", kind="fork_checkpoint", problem=ended))
        if parts[0] == "workspaces" and r.method == "POST":
            if self.refuse_capture is not None:
                return self.refuse_capture
            id = f"{CKPT[:-3]}{len(self.nodes):03}"
            self.nodes[id] = checkpoint(id=id, parent_id=self.parents[parts[1]], **r.json())
            return Answer(201, self.nodes[id])
        if parts[0] == "workspaces":
            self.alive.discard(parts[1])
            return Answer(200, workspace(id=parts[1], state="terminated"))
        if parts == ["checkpoints"]:
            assert r.query["state"] == ["capturing", "captured", "sealed"]
            (parent,) = r.query["parent_id"]
            return Answer(200, {"items": [n for n in self.nodes.values() if n.get("parent_id") == parent]})
        if parts[1] not in self.nodes:
            return problem(404, "CHECKPOINT_NOT_FOUND")
        node = self.nodes[parts[1]]
        if r.method == "PATCH":
            change = r.json()
            if node["state"] == "deleted":
                return problem(409, "STATE_CONFLICT")
            if change["version"] != node["version"]:
                return problem(409, "VERSION_CONFLICT", current_version=node["version"])
            annotations = {**node["annotations"], **change["annotations"]}
            node = {**node, "version": node["version"] + 1, "annotations": annotations}
            self.nodes[parts[1]] = node
        return Answer(200, node)

    def fork(self, r: Request, parent: str) -> Answer:
        key = r.headers["idempotency-key"]
        if self.forking:
            self.forks.setdefault(key, {})
            return Answer(202, operation("running", kind="fork_checkpoint"))
        if key not in self.forks:
            made = [f"{WS[:-3]}{len(self.parents) + i:03}" for i in range(r.json()["count"])]
            self.parents |= dict.fromkeys(made, parent)
            self.alive |= set(made)
            children = [{"timings": [], "workspace": workspace(id=id)} for id in made]
            self.forks[key] = {"operation_id": OP, "checkpoint_id": parent, "timings": [], "children": children}
        return Answer(201, self.forks[key])


class Constant:
    def actions(self, node: Node) -> Sequence[Action | str]:
        return list("abcdefgh") if node.depth == 0 else []

    async def act(self, ws: AsyncWorkspace, action: Action) -> Outcome | float:
        return 0.5


class Waiting(Constant):
    """It waits in each machine until it is cancelled."""

    def __init__(self) -> None:
        self.began = 0

    async def act(self, ws: AsyncWorkspace, action: Action) -> float:
        self.began += 1
        await asyncio.sleep(3600)
        return 0


def client_of(double: Double) -> AsyncCoppice:
    return AsyncCoppice(config=Config(server=double.url, max_pause=0.01))


def test_what_is_kept(double: Double) -> None:
    machines = Machines(double)
    machines.nodes[CKPT]["annotations"] = {"note": "kept"}

    class Task(Constant):
        async def act(self, ws: AsyncWorkspace, action: Action) -> Outcome | float:
            if action.name == "b":
                return Outcome(reason="it does not apply")
            return Outcome(0.25, terminal=True, data={"action": action.name})

    async def main() -> None:
        async with client_of(double) as c:
            root = await c.checkpoint(CKPT)
            found = await search.run_async(root, Task(), BestOfN(2), name="mine", fork={"labels": {"game": "x"}})
            assert found.end == "nothing left to try" and found.tried == 2 and str(found)

    asyncio.run(main())
    assert not machines.alive and len(machines.nodes) == 2
    root, child = machines.nodes.values()
    record = root["annotations"][KEY + "/mine"]
    assert root["annotations"]["note"] == "kept" and "score" not in root["annotations"]
    assert [(e["action"], e.get("child"), e.get("reason")) for e in record["edges"]] == [
        ("a", child["id"], None), ("b", None, "it does not apply"),
    ]
    assert record["done"] and record["visits"] == root["annotations"]["visits"] == 1 and record["value_sum"] == 0.25
    assert child["labels"] == {"game": "x"}
    assert child["annotations"] == {
        "score": 0.25, "mean": 0.25, "visits": 1,
        KEY + "/mine": {"action": "a", "value": 0.25, "terminal": True, "data": {"action": "a"}, "visits": 1,
                        "value_sum": 0.25, "min": 0.25, "max": 0.25, "done": True},
    }
    forks = [r.json() for r in double.requests if r.path.endswith("/fork")]
    assert forks == [{"count": 1, "labels": {"game": "x"}, "ttl_seconds": 3600}] * 2


def test_a_batch_is_one_fork(double: Double) -> None:
    machines = Machines(double)

    async def main() -> None:
        async with client_of(double) as c:
            found = await search.run_async(await c.checkpoint(CKPT), Constant(), UCT(c=1), batch=8, parallel=1)
            assert found.tried == 8

    asyncio.run(main())
    assert [r.json()["count"] for r in double.requests if r.path.endswith("/fork")] == [8] and not machines.alive


def test_plain_functions_run_at_once(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as `parallel` says; the threads of the loop depend on the processors."""
    machines = Machines(double)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    together = threading.Barrier(8)
    here: set[str] = set()

    class Plain:
        def actions(self, node: Node) -> Sequence[Action | str]:
            here.add(threading.current_thread().name)
            return list("abcdefgh") if node.depth == 0 else []

        def act(self, ws: Workspace, action: Action) -> float:
            together.wait(60)
            here.add(threading.current_thread().name)
            return 0.5

    with Coppice(config=Config(server=double.url)) as c:
        found = search.run(c.checkpoint(CKPT), Plain(), UCT(c=1), budget=8, parallel=8)
    assert not found.problems and found.tried == 8 and not machines.alive
    assert all(name.startswith("coppice-search") for name in here)
    assert not [t for t in threading.enumerate() if t.name.startswith("coppice-search") and not t.is_alive()]


def test_a_search_within_a_loop(double: Double) -> None:
    """As in a notebook."""
    Machines(double)

    async def main() -> None:
        with Coppice(config=Config(server=double.url)) as c:
            assert search.run(c.checkpoint(CKPT), Constant(), UCT(c=1), budget=3).tried == 3

    asyncio.run(main())


@pytest.mark.parametrize("when", ["fork", "act", "capture"])
def test_a_cancelled_search_leaves_no_machine(double: Double, when: str) -> None:
    machines = Machines(double)
    task: Constant = Waiting() if when == "act" else Constant()
    machines.forking = "running" if when == "fork" else ""
    if when == "capture":
        machines.slow_capture.clear()

    async def main() -> None:
        async with client_of(double) as c:
            root = await c.checkpoint(CKPT)
            running = asyncio.create_task(search.run_async(root, task, UCT(c=1), parallel=3))

            def begun() -> bool:
                paths = [r.path for r in double.requests]
                if when == "act":
                    assert isinstance(task, Waiting)
                    return task.began == 3
                if when == "fork":
                    return sum(p.endswith(OP) for p in paths) >= 3  # it waits for the operation
                return sum(p.startswith("/v1/workspaces/") and p.endswith("/checkpoints") for p in paths) == 3

            while not begun():
                await asyncio.sleep(0.01)
            running.cancel()
            asyncio.get_running_loop().call_later(0.1, machines.slow_capture.set)
            with pytest.raises(asyncio.CancelledError):
                await running

    asyncio.run(main())
    assert not machines.alive
    record = machines.nodes[CKPT]["annotations"][KEY]
    made = [e["child"] for e in record["edges"] if "child" in e]
    # What was being captured is written down: it would be tried again otherwise.
    assert len(made) == len(machines.nodes) - 1 == (3 if when == "capture" else 0)
    assert not any("in_flight" in e for e in record["edges"])
    if when == "fork":
        assert sum(r.path.endswith("/cancel") for r in double.requests) == 3 == len(machines.forks)


def test_a_fork_that_ends_although_nobody_waits(double: Double) -> None:
    """Its machines are terminated."""
    machines = Machines(double)

    async def main() -> None:
        async with client_of(double) as c:
            forks = Forks(c, Waiting(), Checkpoints(c))
            call = Call(op.forkCheckpoint, {"checkpoint_id": CKPT}, body={"count": 2}, key="k")
            await forks._t.call(call, models.ForkResult)
            assert len(machines.alive) == 2
            await forks._abandon(call, "")
            assert not machines.alive and len(machines.forks) == 1

    asyncio.run(main())


@pytest.mark.parametrize(
    "answer, unknown",
    [(problem(409, "STATE_CONFLICT"), False), (problem(500, "INTERNAL"), True),
     (Answer(202, operation("failed", problem={"code": "CAPTURE_FAILED", "message": "no"})), False)],
)
def test_a_capture_that_fails(double: Double, answer: Answer, unknown: bool) -> None:
    machines = Machines(double)
    machines.refuse_capture = answer

    async def main() -> None:
        async with client_of(double) as c:
            forks = Forks(c, Constant(), Checkpoints(c))
            outcomes = await forks.expand(Node(CKPT), [Action("a"), Action("b")])
            for o in outcomes:
                assert o.error is not None and o.unknown == unknown and not o.child

    asyncio.run(main())
    assert not machines.alive


def test_an_action_that_fails(double: Double) -> None:
    machines = Machines(double)

    class Failing(Constant):
        left = 3

        async def act(self, ws: AsyncWorkspace, action: Action) -> float:
            if self.left:
                self.left -= 1
                raise RuntimeError("not yet")
            return 1

    async def main() -> None:
        async with client_of(double) as c:
            root = await c.checkpoint(CKPT)
            found = await search.run_async(root, Failing(), UCT(c=1), poll=0.01, parallel=1)
            assert found.tried == 8 and [str(p) for p in found.problems] == ["not yet"] * 3
            with pytest.raises(RuntimeError, match="not yet"):
                task = Failing()
                task.left = 100
                await search.run_async(root, task, UCT(c=1), poll=0.01, name="again", failures=2)
            assert task.left <= 97

    asyncio.run(main())
    assert not machines.alive


def test_records_of_others(double: Double) -> None:
    machines = Machines(double)
    machines.nodes[CKPT]["annotations"] = {KEY: {"visits": -1}, KEY + "/list": [1]}

    async def main() -> None:
        async with client_of(double) as c:
            for name in ("", "list"):
                with pytest.raises(RecordMangled, match=f"annotation {KEY}.*remove it, or search under another name"):
                    await Checkpoints(c, name).load(CKPT)
            assert await Checkpoints(c, "other").load(CKPT) == (Record(), 1)
            with pytest.raises(RecordTooLarge):
                await Checkpoints(c).save(CKPT, 1, Record(data="x" * 13000))

    asyncio.run(main())


def test_versions(double: Double) -> None:
    machines = Machines(double)

    async def main() -> None:
        async with client_of(double) as c:
            store = Checkpoints(c)
            assert await store.save(CKPT, 1, Record(value=0.5)) == 2
            with pytest.raises(NodeChanged):
                await store.save(CKPT, 1, Record())
            record, version = await store.load(CKPT)
            assert record.value == 0.5 and version == 2
            machines.nodes[CKPT]["state"] = "deleted"
            for refused in (store.load(CKPT), store.save(CKPT, 2, Record()), store.load(CKPT[:-1] + "x")):
                with pytest.raises(NodeGone):
                    await refused

    asyncio.run(main())


def test_children_that_are_captured(double: Double) -> None:
    """A child that is being captured when a searcher looks for children counts as soon as it is there."""

    def page(*states: tuple[str, str]) -> Answer:
        def record(id: str) -> dict[str, Any]:
            return {KEY: {"action": "a " + id, "value": 0.5}}

        return Answer(200, {"items": [checkpoint(id=id, state=s, annotations=record(id)) for id, s in states]})

    double.script = [
        page(("one", "sealed"), ("two", "capturing"), ("three", "capturing")),
        page(("one", "sealed"), ("two", "capturing"), ("four", "capturing")),  # the capture of three failed
        page(("one", "sealed"), ("two", "captured"), ("four", "capturing")),  # and four began later
    ]

    async def main() -> None:
        async with client_of(double) as c:
            got = await Checkpoints(c).children(CKPT)
            assert {id: r.action for id, r in got.items()} == {"one": "a one", "two": "a two"}

    asyncio.run(main())


def test_names_of_searches() -> None:
    c = AsyncCoppice(config=Config(server="http://127.0.0.1:1"))
    assert Checkpoints(c, "é" * 32).key == KEY + "/" + "é" * 32
    with pytest.raises(ValueError, match="at most 64"):
        Checkpoints(c, "é" * 33)


def test_annotations_are_json(double: Double) -> None:
    """The record is sent as it is counted: byte for byte as the Go SDK writes it."""
    Machines(double)

    async def main() -> None:
        async with client_of(double) as c:
            await Checkpoints(c).save(CKPT, 1, Record(value=1.0, data="<é>", visits=1))

    asyncio.run(main())
    sent = double.requests[-1].body.decode()
    assert '"coppice.search/v1":{"value":1,"data":"\\u003cé\\u003e","visits":1,"value_sum":0,"min":0,"max":0}' in sent
    assert json.loads(sent)["version"] == 1

"""Carries out a search over forks of machines."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol, Union

from .._async.checkpoint import AsyncCheckpoint
from .._async.client import AsyncCoppice
from .._async.transport import AsyncTransport
from .._async.workspace import AsyncForks, AsyncWorkspace
from .._codes import VersionConflict
from .._errors import CoppiceError
from .._sync.checkpoint import Checkpoint
from .._sync.client import Coppice
from .._sync.workspace import Workspace
from ._result import SearchResult
from ._strategy import Strategy
from ._tree import Action, Node, Outcome, count, failures, from_record, record

Answer = Union[Outcome, float]


class AsyncTask(Protocol):
    """What is searched for, with coroutines."""

    def actions(self, node: Node) -> Sequence[Action | str] | Awaitable[Sequence[Action | str]]:
        """What can be tried at a node. It is asked once for each node, and again after a resume."""
        ...

    def act(self, ws: AsyncWorkspace, action: Action) -> Awaitable[Answer]:
        """Tries an action in a fork of the node's machine, and says what it led to."""
        ...


class Task(Protocol):
    """The same with plain functions. `act` runs in a thread, as many at once as `parallel` says."""

    def actions(self, node: Node) -> Sequence[Action | str]: ...

    def act(self, ws: Workspace, action: Action) -> Answer: ...


class Search:
    """One search. `name` tells its annotations from those of other searches of the same tree."""

    def __init__(
        self,
        root: AsyncCheckpoint,
        task: AsyncTask | Task,
        strategy: Strategy,
        *,
        name: str = "search",
        steps: int = 100,
        parallel: int = 8,
        goal: float | None = None,
        ttl: int = 3600,
        score_annotation: str = "score",
        failures_allowed: int = 16,
        on_step: Callable[[SearchResult], Any] | None = None,
    ) -> None:
        if steps < 0 or parallel < 1:
            raise ValueError("steps must be 0 or more, and parallel 1 or more")
        if name == score_annotation:
            raise ValueError(f"name and score_annotation are both {name!r}; each needs an annotation of its own")
        self._root = root
        self._task = task
        self._strategy = strategy
        self._key = name
        self._steps = steps
        self._parallel = parallel
        self._goal = goal
        self._ttl = ttl
        self._score = score_annotation
        self._allowed = failures_allowed
        self._on_step = on_step
        self._handles: dict[str, AsyncCheckpoint] = {root.id: root}
        self._locks: dict[str, asyncio.Lock] = {}
        self._sync: Coppice | None = None
        self._threads: ThreadPoolExecutor | None = None
        self.result = SearchResult(Node(root.id))

    async def run(self) -> SearchResult:
        """Searches until the steps are used up, nothing is left to try, or a score reaches the goal.

        What an earlier run of the same name has left in the tree is read first: its steps count.
        """
        await self._resume()
        running: set[asyncio.Task[None]] = set()
        failed_in_a_row = 0
        try:
            while True:
                while not self._reached() and len(running) < self._parallel and self._taken(running) < self._steps:
                    choice = self._strategy.select(self.result.root)
                    if isinstance(choice, Node):
                        choice.actions = await self._actions(choice)
                        continue
                    if choice is None:
                        break
                    running.add(self._begin(*choice))
                if not running:
                    break
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    problem = task.exception()
                    failed_in_a_row = failed_in_a_row + 1 if problem is not None else 0
                    if problem is not None:
                        self.result.problems.append(problem)
                    if problem is not None and (failed_in_a_row > self._allowed or not isinstance(problem, Exception)):
                        raise problem
                await self._tell()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)  # each ends its machine
            if self._threads is not None:
                self._threads.shutdown(wait=False)  # a function that still runs cannot be stopped
                self._threads = None
            if self._sync is not None:
                self._sync.close()
                self._sync = None
        return self.result

    def _taken(self, running: set[asyncio.Task[None]]) -> int:
        return self.result.root.visits + len(running)

    def _reached(self) -> bool:
        return self._goal is not None and self.result.best.score >= self._goal

    # -- the tree

    async def _resume(self) -> None:
        nodes: dict[str, Node] = {}
        self.result.root.children.clear()  # those of an earlier run are in the tree, too
        async for found in self._root.tree():
            info = found.checkpoint
            if info.id == self._root.id:
                nodes[info.id] = self.result.root
                self.result.root.failed = failures(info.annotations.get(self._key))
                self._handles[info.id].info = info
                continue
            parent = nodes.get(info.parent_id or "")
            node = from_record(info.id, info.annotations.get(self._key))
            if parent is None or node is None or info.state not in ("captured", "sealed"):
                continue
            node.parent = parent
            parent.children.append(node)
            nodes[info.id] = node
            self._handles[info.id] = AsyncCheckpoint(self._root._t, info)
        count(self.result.root)

    async def _actions(self, node: Node) -> list[Action]:
        answer = self._task.actions(node)
        if inspect.isawaitable(answer):
            answer = await answer
        actions = [Action(a) if isinstance(a, str) else a for a in answer]
        if len({a.name for a in actions}) != len(actions):
            raise ValueError("the actions of a node must have different names")
        return actions

    def _begin(self, node: Node, action: Action) -> asyncio.Task[None]:
        """Starts an expansion. Until it ends, it counts as a virtual loss up to the root."""
        node.under_way.add(action.name)
        for above in node.path():
            above.pending += 1
        return asyncio.create_task(self._expand(node, action))

    async def _expand(self, node: Node, action: Action) -> None:
        try:
            child = await self._try(node, action)
            node.add(child)
        except Exception:
            node.fail(action.name)
            await self._note(node, 0.0, failed=action.name)
            raise
        finally:
            node.under_way.discard(action.name)
            for above in node.path():
                above.pending -= 1
        await self._note(node, child.score)

    async def _try(self, node: Node, action: Action) -> Node:
        ws = await self._fork(node)
        try:
            outcome = await self._act(ws, action)
            child = Node("", action=action, score=outcome.score, terminal=outcome.terminal, data=outcome.data)
            child.visits, child.value = 1, outcome.score
            notes = {self._key: record(child), self._score: outcome.score}
            handle = await ws.checkpoint(annotations=notes)
            child.visits, child.value = 0, 0.0  # `add` counts it
            child.checkpoint_id = handle.id
            self._handles[handle.id] = handle
            return child
        finally:
            await asyncio.shield(quietly(ws.terminate()))

    async def _fork(self, node: Node) -> AsyncWorkspace:
        labels = {"coppice-search": self._key[:63]}
        forking = asyncio.ensure_future(self._handles[node.checkpoint_id].fork(1, ttl=self._ttl, labels=labels))
        try:
            return (await asyncio.shield(forking))[0]
        except asyncio.CancelledError:
            await asyncio.shield(end_fork(forking))  # the server makes the machine in any case
            raise

    async def _act(self, ws: AsyncWorkspace, action: Action) -> Outcome:
        act: Callable[..., Any] = self._task.act
        if inspect.iscoroutinefunction(act):
            answer = await act(ws, action)
        else:
            if self._threads is None:  # the loop's own has few threads where there are few processors
                self._threads = ThreadPoolExecutor(self._parallel, "coppice-search")
            run = contextvars.copy_context().run
            work = partial(run, act, Workspace(self._client()._t, ws.info), action)
            answer = await asyncio.get_running_loop().run_in_executor(self._threads, work)
        outcome = answer if isinstance(answer, Outcome) else Outcome(float(answer))
        if not 0.0 <= outcome.score <= 1.0:
            raise ValueError(f"the score of {action.name!r} is {outcome.score}; it must be from 0 to 1")
        return outcome

    def _client(self) -> Coppice:
        if self._sync is None:
            self._sync = Coppice(config=self._root._t.config)
        return self._sync

    async def _note(self, node: Node, score: float, failed: str | None = None) -> None:
        """Adds an outcome to the annotations of a node and of all above it, by compare-and-set.

        A search that goes on beside this one, in another process, adds its own.
        """
        for at in node.path():
            mine, failed = failed, None

            def change(now: dict[str, Any], mine: str | None = mine) -> dict[str, Any]:
                found = now.get(self._key)
                old = dict(found) if isinstance(found, dict) else {}
                old["visits"] = int(old.get("visits") or 0) + 1
                old["value"] = float(old.get("value") or 0.0) + score
                if mine is not None:
                    old["failed"] = [*failures(old), mine]
                return {self._key: old}

            async with self._locks.setdefault(at.checkpoint_id, asyncio.Lock()):
                try:
                    await self._handles[at.checkpoint_id].annotate(change)
                except VersionConflict as err:  # many processes at once: the next run counts anew
                    self.result.problems.append(err)

    async def _tell(self) -> None:
        if self._on_step is not None:
            answer = self._on_step(self.result)
            if inspect.isawaitable(answer):
                await answer


async def quietly(call: Awaitable[Any]) -> None:
    """Ends a machine. Should that fail, its time to live ends it."""
    try:
        await call
    except CoppiceError:
        pass


async def end_fork(forking: asyncio.Future[AsyncForks]) -> None:
    """Ends the machine of a fork that nobody waits for any longer."""
    try:
        forks = await forking
    except CoppiceError:
        return  # there is none
    await quietly(forks[0].terminate())


async def run_async(
    root: AsyncCheckpoint, task: AsyncTask | Task, strategy: Strategy, **options: Any
) -> SearchResult:
    """Searches from a checkpoint. See `Search` for the options."""
    return await Search(root, task, strategy, **options).run()


def run(root: Checkpoint | AsyncCheckpoint, task: AsyncTask | Task, strategy: Strategy, **options: Any) -> SearchResult:
    """Searches from a checkpoint, and returns when the search has ended. See `Search` for the options."""

    async def main() -> SearchResult:
        async with AsyncCoppice(config=root._t.config) as client:
            transport: AsyncTransport = client._t
            return await Search(AsyncCheckpoint(transport, root.info), task, strategy, **options).run()

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(main())
    # Within a notebook there is a loop already, which must not be blocked by itself.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, main()).result()

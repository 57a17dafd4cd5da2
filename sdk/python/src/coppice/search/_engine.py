"""Carries out a search: chooses, expands, evaluates and backs up, beside any number of other searchers."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any, Protocol, TypedDict

from ._memory import NodeChanged, NodeGone, Store
from ._record import EARLIER, MAX_NAME, Action, Edge, Outcome, Record, RecordTooLarge, SearchError
from ._result import BUDGET_SPENT, EXHAUSTED, GOAL_REACHED, SearchResult
from ._strategy import PUCT, UCT, Beam, BestOfN, Strategy
from ._tree import Decision, Node, Step, Tree, TreeNode
from ._waits import ended, whole

MARGIN = 30.0
"""Seconds that others wait for a searcher beyond its lease: it may be ending forks, and writing down what came out."""
WRITE_TIME = 15.0
"""Seconds in which it is written down what came out, also when the search was cancelled."""
MAX_CONFLICTS = 1000
"""How often one change of a record is tried while others change it."""

Change = Callable[[Record], None]
Ending = dict[TreeNode, dict[str, int]]
"""What is under way until it has been written down, at each node of a way, by action.

In one moment a node's record has the outcome, the claim is gone, and the action can be chosen no more: else another
worker or searcher would try it again.
"""


class Problem(Protocol):
    """What is searched. `Forks` is one whose nodes are checkpoints."""

    async def actions(self, node: Node) -> Sequence[Action]:
        """What can be tried at a node, best first, with priors. If that is nothing, the node is a leaf.

        One searcher asks once for each node; the record keeps the answer for all.
        """
        ...

    async def expand(self, node: Node, actions: Sequence[Action]) -> Sequence[Outcome]:
        """Tries actions at a node, all at once, and returns one outcome for each. An exception is one of all of them.

        If it writes the records of the children when it makes them, a crash loses no child. It is cancelled when the
        search ends or its lease is over. It may then still return what came out.
        """
        ...


class Options(TypedDict, total=False):
    """Settings of a searcher; see `Search`."""

    budget: int
    parallel: int
    batch: int
    goal: float | None
    root_value: float | None
    failures: int
    lease: float
    poll: float
    searcher: str
    on_step: Callable[[SearchResult], Any] | None


class Search:
    """One searcher. It may run several times, one after the other; each run goes on where the tree is."""

    def __init__(
        self,
        root: str,
        problem: Problem,
        store: Store,
        strategy: Strategy,
        *,
        budget: int = 100,
        parallel: int = 8,
        batch: int = 1,
        goal: float | None = None,
        root_value: float | None = None,
        failures: int = 16,
        lease: float = 600.0,
        poll: float = 1.0,
        searcher: str = "",
        on_step: Callable[[SearchResult], Any] | None = None,
    ) -> None:
        """Raises ValueError if a setting is out of its range.

        `root` is the id of the node to start from, and `root_value` its value, if it is known. This searcher tries at
        most `budget` actions, in all its runs, `parallel` expansions at once, of at most `batch` actions each.

        A node of the value `goal` ends the search, whoever found it. The search fails if more than `failures`
        expansions fail in a row. An expansion may take `lease` seconds; half a minute later, others stop waiting for a
        searcher that crashed. The clocks of searchers must agree to a few seconds. While this searcher waits for
        others, it looks every `poll` seconds at what they have done.

        `searcher` names it, in at most 128 bytes, so that its own work from before a crash ends at once when it starts
        again. No two that run at the same time may have the same name. Empty: a random name.

        `on_step` is called after each expansion that was written down, never concurrently. It may be a coroutine. If it
        raises an exception, the search ends with that.
        """
        if not isinstance(strategy, (UCT, PUCT, BestOfN, Beam)):
            raise ValueError(f"strategy {strategy!r}: it is UCT, PUCT, BestOfN or Beam")
        if not root:
            raise ValueError("a search needs a root")
        if budget < 0 or parallel < 1 or batch < 1 or failures < 0 or not 0 < lease < 1e9 or not 0 < poll < 1e9:
            raise ValueError("a setting of the search is out of its range")
        if searcher == EARLIER or len(searcher.encode()) > MAX_NAME:
            raise ValueError(f"searcher {searcher!r}: a name has at most {MAX_NAME} bytes, and is not {EARLIER!r}")
        for value in (goal, root_value):
            if value is not None and not math.isfinite(value):
                raise ValueError(f"a value of a node cannot be {value}")
        self._problem = problem
        self._store = store
        self._strategy = strategy
        self._budget = budget
        self._parallel = parallel
        self._batch = batch
        self._goal = goal
        self._root_value = root_value
        self._failures = failures
        self._lease = lease
        self._poll = poll
        self._searcher = searcher or secrets.token_hex(16)
        self._on_step = on_step
        self._tree = Tree(TreeNode(root), self._searcher, utc_now)
        self._tried = 0
        self._problems: list[BaseException] = []

        # What one run has.
        self._active = False
        self._workers: list[asyncio.Task[None]] = []
        self._running = 0  # expansions under way
        self._failed = 0  # expansions in a row
        self._stopping = False
        self._end = ""
        self._error: BaseException | None = None
        self._writing: dict[TreeNode, asyncio.Lock] = {}  # held during a compare-and-set
        self._telling = asyncio.Lock()
        self._changed = asyncio.Event()  # set when anything has changed

    @property
    def result(self) -> SearchResult:
        """What is known so far."""
        best, _ = self._tree.root.best()
        return SearchResult(best.view(), self._tried, self._end, list(self._problems), self._tree.snapshot)

    async def run(self) -> SearchResult:
        """Searches until the goal is reached, the budget is spent, or nothing is left to try.

        What others have done, and what this searcher has done before, counts. Raises what made the search fail. When it
        is cancelled, it ends what is under way, writes that down, and raises CancelledError.
        """
        if self._active:
            raise RuntimeError("the search is running already")
        self._active = True
        try:
            return await self._run()
        finally:
            self._active, self._workers = False, []

    async def _run(self) -> SearchResult:
        self._stopping, self._end, self._error = False, "", None
        self._running = self._failed = 0
        self._writing, self._telling, self._changed = {}, asyncio.Lock(), asyncio.Event()
        await self._start()
        self._workers = [asyncio.create_task(self._work()) for _ in range(self._parallel)]
        try:
            await asyncio.wait(self._workers)
        except asyncio.CancelledError:
            self._stop()
            await ended(self._workers)
            raise
        if self._error is not None:
            raise self._error
        await self._tidy()
        await self._read_best()
        return self.result

    async def read_all(self) -> None:
        """Reads what is not known of the tree: subtrees of other searchers, and the data of leaves.

        It takes a call of the store for each node that was not read. What was deleted is left as it was known.
        """
        allowed = asyncio.Semaphore(self._parallel)

        async def read(n: TreeNode) -> None:
            async with allowed:
                with contextlib.suppress(NodeGone):
                    await self._read(n)

        level = [self._tree.root]
        while level:
            old = [n for n in level if n.stale or n.version == 0 or n.behind()]
            await asyncio.gather(*map(read, old))
            level = [n.child(e) for n in level for e in n.record.edges if e.child]

    async def _start(self) -> None:
        """Reads the root, and writes its value if nobody has."""
        root = self._tree.root
        await self._read(root)

        def change(record: Record) -> None:
            if record.value is None and self._root_value is not None:
                record.value = float(self._root_value)

        if self._root_value is not None:
            await self._update(root, {}, change)

    # -- workers

    async def _work(self) -> None:
        """Does one thing after the other until the run ends."""
        try:
            while (d := await self._next()) is not None:
                errors, told = await self._do(d)
                if told:
                    await whole(self._tell())
                if errors and not self._stopping:
                    await asyncio.sleep(self._poll)  # what failed may be tried again
        except asyncio.CancelledError as err:
            if not self._stopping:  # somebody else has cancelled it
                self._finish(error=err)
        except (Exception, KeyboardInterrupt, SystemExit) as err:  # of a hook, or of this package
            self._finish(error=err)

    async def _next(self) -> Decision | None:
        """Waits until there is something to do. None: the run ends."""
        while True:
            root = self._tree.root.record
            if self._stopping:
                return None
            if self._goal is not None and root.visits and root.max >= self._goal:
                self._finish(GOAL_REACHED)
                return None
            if self._tried >= self._budget and not self._running:
                self._finish(BUDGET_SPENT)
                return None
            waiting, left = False, self._budget - self._tried
            if left > 0:
                d = self._strategy.choose(self._tree, min(self._batch, left))
                if d.step is not Step.NOTHING:
                    self._reserve(d)
                    return d
                if not d.waiting and not self._running:
                    self._finish(EXHAUSTED)
                    return None
                waiting = d.waiting
            await self._wait(waiting)

    async def _wait(self, poll: bool) -> None:
        """Waits for a change. While others have something under way, it looks at that now and then."""
        if not poll:
            await self._changed.wait()
            return
        try:
            await asyncio.wait_for(self._changed.wait(), self._poll)
        except asyncio.TimeoutError:
            self._tree.refresh()

    def _broadcast(self) -> None:
        """Wakes those that wait."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _finish(self, end: str = "", error: BaseException | None = None) -> None:
        """Ends the run."""
        if not self._end and self._error is None:
            self._end, self._error = end, error
        self._stop()

    def _stop(self) -> None:
        """Cancels what is under way."""
        self._stopping = True
        here = asyncio.current_task()
        for w in self._workers:
            if w is not here:
                w.cancel()
        self._broadcast()

    def _reserve(self, d: Decision) -> None:
        """Marks what is about to be done, so that no other worker does it."""
        assert d.node is not None
        if d.step is not Step.EXPAND:
            d.node.busy = True
            return
        self._running += 1
        self._tried += len(d.actions)
        until = self._tree.now() + timedelta(seconds=self._lease + MARGIN)
        d.node.mark(d.actions, 1, until.replace(microsecond=0))

    async def _do(self, d: Decision) -> tuple[list[BaseException], bool]:
        """Does what a strategy has chosen. Returns what failed, and whether an expansion was written down."""
        assert d.node is not None
        errors: list[BaseException] = []
        told = False
        try:
            try:
                if d.step is Step.EXPAND:
                    told = await self._expand(d.node, d.actions, errors)
                elif d.step is Step.READ:
                    await self._read(d.node)
                elif d.step is Step.PROPOSE:
                    await self._propose(d.node)
                else:
                    await self._adopt(d.node)
            except NodeGone:
                if d.node.parent is None:
                    raise
                d.node.record.done = True  # nothing is left to try at a node that was deleted
                errors.clear()
                await self._pass(d.node, {})
        except Exception as err:
            errors.append(err)
        finally:
            if d.step is Step.EXPAND:
                self._running -= 1
            else:
                d.node.busy = False
            self._broadcast()
        if self._stopping:
            return errors, told  # what failed was cancelled
        self._problems += errors
        if not errors and d.step is Step.EXPAND:
            self._failed = 0
        if errors:
            self._failed += 1
            if self._failed > self._failures:
                self._finish(error=errors[0])
        return errors, told

    async def _tell(self) -> None:
        """Reports what is known."""
        if self._on_step is None:
            return
        async with self._telling:
            answer = self._on_step(self.result)
            if inspect.isawaitable(answer):
                await answer

    # -- steps

    async def _propose(self, n: TreeNode) -> None:
        """Asks the problem for the actions of a node, and writes them unless another searcher was faster."""
        actions = self._strategy.proposals(n.depth, list(await self._problem.actions(n.view())))
        await self._update(n, {}, lambda record: record.propose(actions))
        await self._pass(n, {})

    async def _adopt(self, n: TreeNode) -> None:
        """Looks for children that a searcher made and could not write down, and ends claims that are over."""
        lost, n.lost = n.lost, set()
        try:
            children = await self._store.children(n.id)

            def change(record: Record) -> None:
                for id, child in children.items():
                    e = record.edge(child.action)
                    if e is not None and child.value is not None and not e.child and not e.done:
                        e.merge(id, child)
                for e in record.edges:
                    e.drop(self._tree.now())

            await self._update(n, {}, change)
            await self._pass(n, {})
        except BaseException:
            n.lost |= lost
            raise

    async def _expand(self, n: TreeNode, actions: list[Action], errors: list[BaseException]) -> bool:
        """Tries actions at a node and writes down what came out. `errors` gets what failed. Returns if anything came out."""
        got: list[Action] = list(actions)
        outcomes: list[Outcome] | None = None
        try:
            await self._claim(n, got)
            if got:
                await self._pass(n, {})
                outcomes = await self._evaluate(n, got, errors)
        except NodeGone:
            raise
        except Exception as err:
            errors.append(err)
        finally:  # also when it was cancelled
            await whole(self._settle(n, got, outcomes))
        return outcomes is not None

    async def _evaluate(self, n: TreeNode, actions: Sequence[Action], errors: list[BaseException]) -> list[Outcome]:
        """Has the problem try actions until the lease is over. If this is cancelled, what has come out counts."""
        work = asyncio.ensure_future(self._problem.expand(n.view(), actions))
        late = False
        try:
            await asyncio.wait([work], timeout=self._lease)
            late = not work.done()
        except asyncio.CancelledError:
            pass  # the run is being stopped
        if not work.done():
            work.cancel()
            await ended([work])
        problem: Exception = SearchError(f"the expansion of {n.id} was cancelled, and not by the search")
        if late:
            problem = TimeoutError(f"the expansion of {n.id} took longer than its lease of {self._lease:g} s")
        try:
            outcomes = [sound(o) for o in work.result()]
        except (asyncio.CancelledError, Exception) as err:
            if late or (isinstance(err, asyncio.CancelledError) and not self._stopping):
                raise problem from err
            raise
        if len(outcomes) != len(actions):
            raise ValueError(f"the expansion of {n.id} has {len(outcomes)} outcomes for {len(actions)} actions")
        for i, o in enumerate(outcomes):
            if isinstance(o.error, asyncio.CancelledError):
                outcomes[i] = o = replace(o, error=problem)
            if o.error is not None:
                errors.append(o.error)
        return outcomes

    async def _claim(self, n: TreeNode, actions: list[Action]) -> None:
        """Writes at the node that actions are under way. Takes out those that another searcher has.

        Claims are first written at the node, where only one searcher can have an action, then on the way to the root,
        where each is a virtual loss.
        """
        now = self._tree.now

        def taken(e: Edge | None) -> bool:
            if e is None or e.child or e.done:
                return True
            return e.others(self._searcher, now()) > 0 or e.abandoned(self._searcher, now())

        def change(record: Record) -> None:
            lost = [a for a in actions if taken(record.edge(a.name))]
            n.mark(lost, -1)
            self._tried -= len(lost)
            names = {a.name for a in lost}
            actions[:] = [a for a in actions if a.name not in names]

        await self._update(n, {}, change)

    async def _settle(self, n: TreeNode, actions: Sequence[Action], outcomes: Sequence[Outcome] | None) -> None:
        """Writes down what came out, and that the actions have ended; without outcomes, they were not tried.

        It tries so for WRITE_TIME. If a child is not written down then, it is looked for before its action is tried
        again. Raises what kept it from writing.
        """
        came = list(zip(actions, outcomes or []))
        self._tried -= len(actions) if outcomes is None else sum(1 for o in outcomes if o.error is not None)
        n.lost |= {a.name for a, o in came if o.unknown}
        made = {a.name for a, o in came if o.error is None and o.child}
        end: Ending = {n: {a.name: 1 for a in actions}}
        for at in n.up() if actions else ():
            if at.parent is not None:
                end[at.parent] = {at.action: len(actions)}
        problem: Exception | None = None

        def change(record: Record) -> None:
            for a, o in came:
                e = record.edge(a.name)
                if e is not None and o.error is None:
                    e.settle(o)

        async def write() -> None:
            nonlocal problem
            while True:
                try:
                    await self._update(n, end, change)
                    await self._pass(n, end)
                    problem = None
                    return
                except (NodeGone, RecordTooLarge):
                    raise
                except Exception as err:
                    problem = err
                await asyncio.sleep(self._poll)

        try:
            await asyncio.wait_for(write(), WRITE_TIME)
        except NodeGone:
            raise
        except asyncio.TimeoutError as err:
            n.lost |= made
            raise problem or TimeoutError(f"it took longer than {WRITE_TIME:g} s to write node {n.id}") from err
        except Exception:
            n.lost |= made
            raise
        finally:
            for at in list(end):  # where it could not be written
                end_at(end, at)

    # -- records

    async def _read(self, n: TreeNode) -> None:
        """Reads a node. An older version than the known one is dropped."""
        record, version = await self._store.load(n.id)
        n.stale = False
        if version <= n.version:
            return
        if not n.written:
            record.disown(self._searcher)
        if n.parent is not None and record.value is None:  # it was made without a record
            e = n.parent.record.edge(n.action)
            if e is not None and e.child == n.id:
                record.action, record.value = e.name, e.value
                record.count()
        n.record, n.version = record, version

    async def _update(self, n: TreeNode, end: Ending, change: Change) -> None:
        """Changes a node by compare-and-set. `change` may be called several times.

        It also writes this searcher's claims at the node, except those that end now.
        """
        async with self._writing.setdefault(n, asyncio.Lock()):
            for _ in range(MAX_CONFLICTS):
                if n.stale:
                    await self._read(n)
                    continue
                version, record = n.version, self._draft(n, end, change)
                if record is None:
                    return
                try:
                    version = await self._store.save(n.id, version, record)
                except NodeChanged:
                    n.stale = True
                except BaseException:
                    n.stale = True  # it is not known whether this was written
                    raise
                else:
                    n.record, n.version, n.written, n.stale = record, version, True, False
                    end_at(end, n)
                    return
        raise NodeChanged(f"node {n.id} was changed by others {MAX_CONFLICTS} times in a row; use fewer searchers")

    def _draft(self, n: TreeNode, end: Ending, change: Change) -> Record | None:
        """A node's record with a change. None: that is none, and nothing need be written."""
        try:
            record = n.record.clone()
            change(record)
            ends = end.get(n, {})
            for e in record.edges:
                e.claim(self._searcher, n.less(e.name, ends.get(e.name, 0)), self._tree.now())
                if e.name in n.lost:
                    e.abandon()
            record.count()
            if record != n.record:
                record.check_size()
                return record
        except RecordTooLarge as err:
            raise RecordTooLarge(f"node {n.id}: {err}") from err
        end_at(end, n)
        return None

    async def _pass(self, n: TreeNode, end: Ending) -> None:
        """Writes what is known of a node into its parents, up to the root. Deleted parents have nothing left to try."""
        for at in n.up():
            if at.parent is None:
                return

            def change(record: Record, at: TreeNode = at) -> None:
                e = record.edge(at.action)
                if e is not None:
                    e.merge(at.id, at.record)

            try:
                await self._update(at.parent, end, change)
            except NodeGone:
                if at.parent.parent is None:
                    raise
                at.parent.record.done = True

    async def _tidy(self) -> None:
        """Writes what could not be written before: the ends of claims, and the totals of subtrees in their parents.

        A searcher that crashed may have left a subtree that is done, of which its parents do not know. Nothing is tried
        there any more that would tell them.
        """
        for n in reversed(list(self._tree.nodes())):
            if any(self._searcher in e.in_flight for e in n.record.edges):
                with contextlib.suppress(NodeGone):
                    await self._update(n, {}, lambda record: None)
            e = n.parent.record.edge(n.action) if n.parent is not None else None
            if e is not None and e.child == n.id and n.record.done and not e.done:
                await self._pass(n, {})

    async def _read_best(self) -> None:
        """Reads what is not known on the way to the best node: another searcher may have found it.

        Where that cannot be read any more, the way ends.
        """
        last: TreeNode | None = None
        while True:
            _, unknown = self._tree.root.best()
            if unknown is None or unknown is last:
                return
            last = unknown
            with contextlib.suppress(NodeGone):
                await self._read(unknown)


def utc_now() -> datetime:
    return datetime.now(timezone.utc)


def end_at(end: Ending, n: TreeNode) -> None:
    """Ends what is under way at a node."""
    for action, by in end.pop(n, {}).items():
        n.count(action, -by)


def sound(o: Outcome) -> Outcome:
    """An outcome whose value is a number; otherwise one of an action that could not be tried."""
    if o.error is None and o.child and not math.isfinite(o.value):
        return replace(o, error=ValueError(f"the value of its child {o.child} is {o.value}"))
    return replace(o, value=float(o.value))

"""Searches whose nodes are checkpoints, whose records are their annotations, and whose expansions are forks."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, Union

import msgspec

from .. import _operations as op
from .. import _policy as policy
from .. import _requests as requests
from .. import models
from .._async.checkpoint import AsyncCheckpoint
from .._async.client import AsyncCoppice
from .._async.transport import AsyncTransport
from .._async.workspace import AsyncWorkspace
from .._codes import CheckpointNotFound, StateConflict, VersionConflict
from .._errors import APIError, CoppiceError, WaitTimeout
from .._policy import Call
from .._sync.client import Coppice
from .._sync.workspace import Workspace
from ._memory import NodeChanged, NodeGone
from ._record import MAX_SEARCH, Action, Outcome, Record, RecordMangled, failed, from_plain, record_of
from ._tree import Node
from ._waits import attempt, ended

if TYPE_CHECKING:
    from typing_extensions import Unpack

KEY = "coppice.search/v1"
"""The annotation that holds the record of a node. Its version changes with the format."""

# Annotations beside the record, for people and for retention policies: numbers of the search that wrote last.
KEY_SCORE = "score"
"""The node's own value."""
KEY_MEAN = "mean"
"""The mean value of the node and all below it."""
KEY_VISITS = "visits"
"""How many values that are."""

FORK_TTL = 3600
"""Seconds that a fork lives that nobody terminates."""
BEGUN_TIME = 5.0
"""Seconds to ask what a request has started whose answer is no longer waited for."""
END_TIME = 4.0
"""Seconds to wait for a capture that is under way when an expansion is cancelled, and then for the end of the fork."""
CAPTURE_TIME = 60.0
"""Seconds that a searcher waits for a child that is being captured."""
CAPTURE_PAUSE = 0.2
"""Seconds between two looks at it."""

Answer = Union[Outcome, float]


class AsyncTask(Protocol):
    """What is searched for, with coroutines."""

    def actions(self, node: Node) -> Sequence[Action | str] | Awaitable[Sequence[Action | str]]:
        """What can be tried at a node, best first; a string is the name of an action without data and prior.

        It is asked once for each node; the node's record keeps the answer.
        """
        ...

    def act(self, ws: AsyncWorkspace, action: Action) -> Awaitable[Answer]:
        """Tries an action in a fork of the node's machine, and says what it led to: an Outcome, or its value.

        An Outcome with a reason led to no node, and gets no checkpoint. An exception says that the action could not be
        tried; it may be tried again.
        """
        ...


class Task(Protocol):
    """The same with plain functions. They run in threads, as many at once as expansions have actions under way."""

    def actions(self, node: Node) -> Sequence[Action | str]: ...

    def act(self, ws: Workspace, action: Action) -> Answer: ...


class Checkpoints:
    """A store whose nodes are checkpoints, and whose records are their annotations."""

    def __init__(self, client: AsyncCoppice | AsyncCheckpoint, name: str = "") -> None:
        """`name` tells the search from others over the same checkpoints, in at most 64 bytes of UTF-8.

        It becomes part of the annotation's key. Searches by UCT and PUCT may go on under the same name; BestOfN and
        Beam need a name of their own, as they leave out actions. Raises ValueError if it is too long.
        """
        size = len(name.encode())
        if size > MAX_SEARCH:
            raise ValueError(f"the name of the search has {size} bytes; at most {MAX_SEARCH} are possible")
        self._t: AsyncTransport = client._t
        self.key = f"{KEY}/{name}" if name else KEY

    def annotations(self, record: Record) -> dict[str, Any]:
        """The annotations that keep a record. Raises RecordTooLarge."""
        out: dict[str, Any] = {self.key: msgspec.Raw(record.encode()), KEY_MEAN: record.mean, KEY_VISITS: record.visits}
        if record.value is not None:
            out[KEY_SCORE] = record.value
        return out

    async def load(self, id: str) -> tuple[Record, int]:
        """The record of a checkpoint, and its version. Raises NodeGone and RecordMangled."""
        call = Call(op.getCheckpoint, {"checkpoint_id": id})
        try:
            found = await self._t.call(call, models.Checkpoint)
        except CheckpointNotFound as err:
            raise NodeGone(str(err)) from err
        if found.state in ("deleted", "failed"):
            raise NodeGone(f"checkpoint {id} is {found.state}")
        return self._record(found) or Record(), found.version

    async def save(self, id: str, version: int, record: Record) -> int:
        """Writes a checkpoint's record if the checkpoint has this version still, and returns the new one.

        Raises NodeChanged, NodeGone and RecordTooLarge.
        """
        body = models.PatchCheckpointRequest(version=version, annotations=self.annotations(record))
        try:
            found = await self._t.call(Call(op.patchCheckpoint, {"checkpoint_id": id}, body=body), models.Checkpoint)
        except VersionConflict as err:
            raise NodeChanged(str(err)) from err
        except (CheckpointNotFound, StateConflict) as err:
            await self.gone(id, err)
            raise
        return found.version

    async def children(self, id: str) -> dict[str, Record]:
        """The records of a checkpoint's children, by id.

        It waits for those that are being captured when it begins: their searcher has done their actions. Raises
        NodeGone, and TimeoutError after a minute.
        """
        until = time.monotonic() + CAPTURE_TIME
        out, capturing = await self._children(id)
        while capturing:
            if time.monotonic() > until:
                raise TimeoutError(f"a child of {id} was not captured within {CAPTURE_TIME:g} s")
            await asyncio.sleep(CAPTURE_PAUSE)
            out, now = await self._children(id)
            capturing &= now
        return out

    async def _children(self, id: str) -> tuple[dict[str, Record], set[str]]:
        """Also returns which children with a record are being captured."""
        query = {"parent_id": id, "state": ["capturing", "captured", "sealed"]}
        out: dict[str, Record] = {}
        capturing: set[str] = set()
        try:
            async for found in self._t.pages(Call(op.listCheckpoints, query=query), models.Checkpoint):
                record = self._record(found)
                if record is not None and found.state == "capturing":
                    capturing.add(found.id)
                elif record is not None:
                    out[found.id] = record
        except CheckpointNotFound as err:
            raise NodeGone(str(err)) from err
        return out, capturing

    def _record(self, found: models.Checkpoint) -> Record | None:
        if self.key not in found.annotations:
            return None
        try:
            return from_plain(found.annotations[self.key])
        except RecordMangled as err:
            raise RecordMangled(
                f"annotation {self.key} of checkpoint {found.id}: {err}; remove it, or search under another name"
            ) from err

    async def gone(self, id: str, refusal: APIError) -> None:
        """Raises NodeGone if a refusal says that a checkpoint is no more."""
        if isinstance(refusal, CheckpointNotFound):
            raise NodeGone(str(refusal)) from refusal
        if isinstance(refusal, StateConflict):  # also that of a deleted checkpoint
            try:
                await self.load(id)
            except NodeGone:
                raise
            except CoppiceError:
                return


class Forks:
    """A problem whose expansions are forks of checkpoints.

    It forks a node once for each action, has the task do the action in the fork, records the result as a new
    checkpoint, and terminates the fork.
    """

    def __init__(
        self,
        client: AsyncCoppice | AsyncCheckpoint,
        task: AsyncTask | Task,
        store: Checkpoints,
        *,
        threads: int = 8,
        **fork: Unpack[requests.ForkLaunch],
    ) -> None:
        """`fork` has options of the forks, such as labels, which the checkpoints get as well, or what they may reach.

        Without `ttl` they live for an hour, so that a searcher that crashes leaves none behind. `threads` bounds the
        threads of a task with plain functions.
        """
        self._t: AsyncTransport = client._t
        self._task = task
        self._store = store
        self._threads = threads
        self._fork: dict[str, Any] = {"ttl": FORK_TTL, **fork}
        self._sync: Coppice | None = None
        self._pool: ThreadPoolExecutor | None = None

    def close(self) -> None:
        """Ends the threads. A function that still runs in one cannot be stopped."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None
        if self._sync is not None:
            self._sync.close()
            self._sync = None

    async def actions(self, node: Node) -> list[Action]:
        """What can be tried at a node."""
        ask: Callable[..., Any] = self._task.actions
        # A task whose `act` is a coroutine uses no threads.
        plain = not inspect.iscoroutinefunction(ask) and not inspect.iscoroutinefunction(self._task.act)
        answer = await self._in_thread(ask, node) if plain else ask(node)
        if inspect.isawaitable(answer):
            answer = await answer
        return [Action(a) if isinstance(a, str) else a for a in answer]

    async def expand(self, node: Node, actions: Sequence[Action]) -> list[Outcome]:
        """Forks a node and does the actions. If it is cancelled, it ends the forks, and returns what has come out."""
        fork = await self._forked(node.id, len(actions))
        tries = []
        for i, action in enumerate(actions):
            child = fork.children[i] if i < len(fork.children) else None
            if child is None or child.workspace is None or child.problem is not None:
                problem = child.problem if child is not None else None
                error = policy.failure(problem, f"the fork for action {action.name!r}", fork.operation_id)
                tries.append(asyncio.ensure_future(refused(error)))
            else:
                tries.append(asyncio.ensure_future(self._try(AsyncWorkspace(self._t, child.workspace), action)))
        try:
            await asyncio.wait(tries)
        except asyncio.CancelledError:
            for t in tries:
                t.cancel()
            await ended(tries)
        return [came_of(t) for t in tries]

    async def _forked(self, id: str, count: int) -> models.ForkResult:
        """Forks a checkpoint. If it is cancelled, it ends the fork and what that has made."""
        body = models.ForkCheckpointRequest(count=count, **requests.launch(self._fork))
        call = Call(op.forkCheckpoint, {"checkpoint_id": id}, body=body, key=policy.new_key())
        try:
            return await self._t.start(call, models.ForkResult)
        except asyncio.CancelledError:
            await attempt(self._abandon(call, ""), BEGUN_TIME + END_TIME)
            raise
        except WaitTimeout as err:
            await attempt(self._abandon(call, err.operation_id), END_TIME)
            raise
        except (CheckpointNotFound, StateConflict) as err:
            await self._store.gone(id, err)
            raise

    async def _abandon(self, call: Call, operation_id: str) -> None:
        """Ends a fork that is no longer waited for, and terminates what it has made."""
        made: models.ForkResult | None = None
        if not operation_id:
            operation_id, made = await self._begun(call)
        if operation_id:
            ending = Call(op.cancelOperation, {"operation_id": operation_id}, {"wait": int(END_TIME)})
            operation = await self._t.call(ending, models.Operation)
            if operation.state == "succeeded":
                made = policy.convert(operation.result, models.ForkResult, f"operation {operation.id}")
        workspaces = [c.workspace for c in made.children if c.workspace is not None] if made is not None else []
        await asyncio.gather(*(AsyncWorkspace(self._t, w).terminate() for w in workspaces), return_exceptions=True)

    async def _begun(self, call: Call) -> tuple[str, models.ForkResult | None]:
        """Asks what a request has started, or made: it is sent again under its key, without a wait."""
        again = Call(call.op, call.path, {"wait": 0}, call.body, key=call.key)
        try:
            status, body = await self._t.read(again)
        except APIError as err:
            return err.operation_id, None
        if status != 202:
            return "", policy.decode(body, models.ForkResult, call.op.id)
        return policy.decode(body, models.Operation, call.op.id).id, None

    async def _try(self, ws: AsyncWorkspace, action: Action) -> Outcome:
        """Does one action in its fork, and terminates the fork. Should that fail, its time to live ends it."""
        try:
            outcome = await self._act(ws, action)
            if outcome.error is not None or outcome.reason:
                return outcome
            record = record_of(action.name, outcome)
            return await self._capture(ws, outcome, self._store.annotations(record))
        finally:
            await attempt(ws.terminate(), END_TIME)

    async def _act(self, ws: AsyncWorkspace, action: Action) -> Outcome:
        act: Callable[..., Any] = self._task.act
        if inspect.iscoroutinefunction(act):
            answer = await act(ws, action)
        else:
            answer = await self._in_thread(self._plain, ws.info, action)
            if inspect.isawaitable(answer):
                answer = await answer
        if not isinstance(answer, Outcome):
            answer = Outcome(float(answer))
        return Outcome(float(answer.value), answer.terminal, answer.data, answer.reason, "", answer.error)

    def _plain(self, info: models.Workspace, action: Action) -> Any:
        act: Callable[..., Any] = self._task.act
        return act(Workspace(self._client()._t, info), action)

    async def _capture(self, ws: AsyncWorkspace, outcome: Outcome, annotations: Mapping[str, Any]) -> Outcome:
        """Makes a checkpoint of a fork. When it is cancelled, it waits a little longer.

        Without the checkpoint's id the child could not be written down, and its action would be tried again.
        """
        labels = self._fork.get("labels")
        capture = asyncio.ensure_future(ws.checkpoint(labels=labels, annotations=annotations))
        try:
            await asyncio.wait([capture])
        except asyncio.CancelledError:
            await ended([capture], END_TIME)
        if not capture.done():
            capture.cancel()
            await ended([capture])
        try:
            id = capture.result().id
        except WaitTimeout as err:
            return await self._captured(outcome, err)
        except APIError as err:
            return failed(err, unknown=err.status >= 500)
        except (asyncio.CancelledError, CoppiceError) as err:
            return failed(err, unknown=True)
        return Outcome(outcome.value, outcome.terminal, outcome.data, child=id)

    async def _captured(self, outcome: Outcome, late: WaitTimeout) -> Outcome:
        """Waits a little longer for a checkpoint that is being made."""
        waiting = await attempt(self._t.wait(late.operation_id, time.monotonic() + END_TIME), END_TIME + BEGUN_TIME)
        if waiting.cancelled() or waiting.exception() is not None:
            return failed(late, unknown=True)
        operation: models.Operation = waiting.result()
        if operation.state == "failed":
            return failed(policy.failure(operation.problem, f"operation {operation.id}", operation.id))
        made = policy.convert(operation.result, models.Checkpoint, f"operation {operation.id}")
        return Outcome(outcome.value, outcome.terminal, outcome.data, child=made.id)

    # -- plain functions

    async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a plain function in a thread. The loop's own pool has few threads where there are few processors."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, "coppice-search")
        work = partial(contextvars.copy_context().run, function, *args)
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def _client(self) -> Coppice:
        if self._sync is None:
            self._sync = Coppice(config=self._t.config)
        return self._sync


async def refused(error: Exception) -> Outcome:
    return failed(error)


def came_of(ended_try: asyncio.Future[Outcome]) -> Outcome:
    """The outcome of a try that has ended."""
    if ended_try.cancelled():
        return failed(asyncio.CancelledError())
    error = ended_try.exception()
    return failed(error) if error is not None else ended_try.result()

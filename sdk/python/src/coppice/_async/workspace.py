"""Running machines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .. import _operations as op
from .. import _requests as requests
from .. import models
from .._policy import Call
from .._policy import failure as failure_of
from .._results import Command, Result, exec_request, result_of, shown
from . import runtime
from .files import AsyncFiles
from .network import AsyncNetwork
from .session import AsyncSession
from .transport import AsyncTransport, read_bounded
from .watches import AsyncWatches

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .checkpoint import AsyncCheckpoint


class AsyncWorkspace:
    """A running machine. As a context manager it is terminated at the end."""

    def __init__(self, transport: AsyncTransport, info: models.Workspace) -> None:
        self._t = transport
        self.info = info
        """What was known when it was last asked for; `refresh` asks again."""
        self.files = AsyncFiles(transport, info.id)
        self.network = AsyncNetwork(transport, info.id)
        self.watches = AsyncWatches(transport, info.id)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} {self.id} {self.state}>"

    async def __aenter__(self) -> AsyncWorkspace:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.terminate()

    @property
    def id(self) -> str:
        return self.info.id

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def state(self) -> str:
        return self.info.state

    @property
    def checkpoint_id(self) -> str | None:
        """Its head: the checkpoint that it was last forked from, restored to or captured as."""
        return self.info.checkpoint_id

    async def refresh(self) -> AsyncWorkspace:
        self.info = await self._t.call(self._call(op.getWorkspace), models.Workspace)
        return self

    async def update(
        self,
        *,
        labels: Mapping[str, str | None] | None = None,
        ttl: int | None = None,
        idle: int | None = None,
        on_idle: str | None = None,
        auto_resume: bool | None = None,
        version: int | None = None,
    ) -> AsyncWorkspace:
        """Changes what is given. A label of None is removed; a time of 0 is removed."""
        body = models.PatchWorkspaceRequest(
            labels=dict(labels) if labels is not None else None, ttl_seconds=ttl, idle_seconds=idle, on_idle=on_idle,
            auto_resume=auto_resume, version=version,
        )
        self.info = await self._t.call(self._call(op.patchWorkspace, body), models.Workspace)
        return self

    # -- programs

    async def run(
        self,
        command: Command,
        *,
        stdin: str | bytes | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        timeout: float | None = None,
        check: bool = False,
        on_stdout: Callable[[str], Any] | None = None,
        on_stderr: Callable[[str], Any] | None = None,
        idempotency_key: str = "",
    ) -> Result:
        """Runs a program to its end. A string is a line for `sh -c`; a list has no shell.

        `timeout` kills the program after so many seconds. With `check`, a failure raises CommandFailed. The callbacks
        get the output as it arrives. The result has the last MiB of each stream.
        """
        streamed = on_stdout is not None or on_stderr is not None
        body = exec_request(
            command, stdin=stdin, env=dict(env) if env else None, cwd=cwd, user=user, timeout=timeout, wait=not streamed
        )
        call = self._call(op.exec, body)
        call.key = idempotency_key
        if streamed:
            session = AsyncSession(self._t, await self._t.call(call, models.Session))
            result = await session.result(on_stdout, on_stderr)
        else:
            # The answer comes when the program ends. A connection to a server that vanished ends by TCP's keepalive.
            call.read_timeout = None if timeout is None else timeout + self._t.config.read_timeout
            result = result_of(shown(command), await self._t.call(call, models.ExecResult))
        return result.check() if check else result

    async def start(
        self,
        command: Command,
        *,
        stdin: str | bytes | None = None,
        stdin_open: bool = False,
        pty: tuple[int, int] | bool = False,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        timeout: float | None = None,
        idempotency_key: str = "",
    ) -> AsyncSession:
        """Starts a program and returns its session at once. `pty` gives it a terminal, of (columns, rows) or 80 x 24."""
        size = (80, 24) if pty is True else pty or None
        body = exec_request(
            command, stdin=stdin, env=dict(env) if env else None, cwd=cwd, user=user, timeout=timeout, wait=False,
            stdin_open=stdin_open or None, pty=size,
        )
        call = self._call(op.exec, body)
        call.key = idempotency_key
        return AsyncSession(self._t, await self._t.call(call, models.Session))

    async def step(
        self,
        command: Command | None = None,
        *,
        when: str | None = None,
        files: Mapping[str, str | bytes] | None = None,
        stdin: str | bytes | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        timeout: float | None = None,
        checkpoint: models.CreateCheckpointRequest | None = None,
        idempotency_key: str = "",
    ) -> models.StepActionResult:
        """Writes files, runs a program, and then makes a checkpoint, as one operation. The workspace goes on.

        `when` is `always` (the default), `on_change` (unless the machine is unchanged) or `on_success` (if the exit code
        is 0). If the program has run and the checkpoint failed, the result has a `problem`. The program may run for 60
        seconds, or `timeout`.
        """
        made = requests.action(
            command, files=files, stdin=stdin, env=env, cwd=cwd, user=user, timeout=timeout, checkpoint=checkpoint
        )
        call = self._call(op.stepWorkspace, requests.within(made, when))
        call.key = idempotency_key
        result = await self._t.start(call, models.StepActionResult)
        if result.checkpoint_id:
            self.info.checkpoint_id = result.checkpoint_id
        return result

    async def sessions(self) -> AsyncIterator[AsyncSession]:
        """The sessions of the present epoch, newest first."""
        async for info in self._t.pages(self._call(op.listSessions), models.Session):
            yield AsyncSession(self._t, info)

    async def processes(self) -> list[models.Process]:
        return (await self._t.call(self._call(op.listProcesses), models.ProcessList)).items

    async def console(self) -> bytes:
        """The end of the machine's serial console. The guest wrote it."""
        async with self._t.stream(self._call(op.getConsole)) as answer:
            return await read_bounded(answer, 1 << 20, "console")

    # -- the tree

    async def checkpoint(
        self,
        name: str | None = None,
        *,
        labels: Mapping[str, str] | None = None,
        annotations: Mapping[str, Any] | None = None,
        pinned: bool | None = None,
        prepare: int | None = None,
        sealed: bool = False,
        idempotency_key: str = "",
    ) -> AsyncCheckpoint:
        """Records the whole machine. With `sealed`, waits until it is in the store, a minute at most.

        With `prepare`, as many machines are kept ready for its forks, for 2 minutes.
        """
        from .checkpoint import AsyncCheckpoint

        call = self._call(op.createCheckpoint, checkpoint_request(name, labels, annotations, pinned, prepare))
        call.key = idempotency_key
        node = AsyncCheckpoint(self._t, await self._t.start(call, models.Checkpoint))
        self.info.checkpoint_id = node.id
        if sealed:
            await node.refresh(sealed=True)
        return node

    async def checkpoints(self) -> AsyncIterator[AsyncCheckpoint]:
        """The checkpoints that were taken of this workspace, newest first."""
        from .checkpoint import AsyncCheckpoint

        async for info in self._t.pages(self._call(op.listWorkspaceCheckpoints), models.Checkpoint):
            yield AsyncCheckpoint(self._t, info)

    async def fork(
        self,
        count: int = 1,
        *,
        name: str | None = None,
        all_or_nothing: bool = True,
        checkpoint_name: str | None = None,
        idempotency_key: str = "",
        **options: Unpack[requests.ForkLaunch],
    ) -> AsyncForks:
        """Checkpoints this workspace and forks the checkpoint. See `Checkpoint.fork`."""
        body = models.ForkWorkspaceRequest(
            count=count, branch_name=name, all_or_nothing=all_or_nothing, **requests.launch(options),
            checkpoint=models.CreateCheckpointRequest(name=checkpoint_name) if checkpoint_name else None,
        )
        call = self._call(op.forkWorkspace, body)
        call.key = idempotency_key
        result = await self._t.start(call, models.ForkResult)
        self.info.checkpoint_id = result.checkpoint_id
        return children(self._t, result)

    async def restore(self, checkpoint: AsyncCheckpoint | str, *, idempotency_key: str = "") -> AsyncWorkspace:
        """Rolls this workspace back, in place: it is the same workspace in its next epoch."""
        target = checkpoint if isinstance(checkpoint, str) else checkpoint.id
        call = self._call(op.restoreWorkspace, models.RestoreWorkspaceRequest(checkpoint_id=target))
        call.key = idempotency_key
        self.info = (await self._t.start(call, models.RestoreResult)).workspace
        return self

    async def suspend(self) -> AsyncWorkspace:
        """Checkpoints it and stops it. It takes no memory and no CPU until `resume`."""
        self.info = await self._t.start(self._call(op.suspendWorkspace), models.Workspace)
        return self

    async def resume(self) -> AsyncWorkspace:
        """Its programs go on where they were."""
        self.info = await self._t.start(self._call(op.resumeWorkspace), models.Workspace)
        return self

    async def terminate(self) -> AsyncWorkspace:
        """Takes it down for good. Its checkpoints stay."""
        self.info = await self._t.start(self._call(op.deleteWorkspace), models.Workspace)
        return self

    # -- facts

    async def usage(self) -> models.Usage:
        """What it has used, in all its epochs."""
        return await self._t.call(self._call(op.getWorkspaceUsage), models.Usage)

    async def reseal_reports(self) -> AsyncIterator[models.ResealRecord]:
        """What it got new at its fork and at each restore, newest first."""
        async for record in self._t.pages(self._call(op.listResealReports), models.ResealRecord):
            yield record

    async def attestation(self, epoch: int | None = None) -> bytes:
        """The signed report of a reseal, byte for byte, for `coppice attest verify`."""
        call = self._call(op.getAttestation)
        call.query = {"epoch": epoch}
        return (await self._t.read(call))[1]

    def _call(self, operation: op.Operation, body: Any = None) -> Call:
        return Call(operation, {"workspace_id": self.id}, body=body)


def checkpoint_request(
    name: str | None,
    labels: Mapping[str, str] | None,
    annotations: Mapping[str, Any] | None,
    pinned: bool | None,
    prepare: int | None = None,
) -> models.CreateCheckpointRequest:
    return models.CreateCheckpointRequest(
        name=name,
        labels=dict(labels) if labels else None,
        annotations=dict(annotations) if annotations else None,
        pinned=pinned,
        prepare=prepare,
    )


def children(transport: AsyncTransport, result: models.ForkResult) -> AsyncForks:
    """The children of a fork that became ready. The problems of the others are in `failures`."""
    out = AsyncForks()
    out.operation_id = result.operation_id
    for child in result.children:
        if child.workspace is not None:
            out.append(AsyncWorkspace(transport, child.workspace))
        else:
            out.failures.append(failure_of(child.problem, "a child of the fork", result.operation_id))
    return out


class AsyncForks(list[AsyncWorkspace]):
    """The workspaces of a fork. As a context manager they are terminated at the end."""

    def __init__(self, items: Sequence[AsyncWorkspace] = ()) -> None:
        super().__init__(items)
        self.failures: list[Exception] = []
        """Why the other children failed; empty with `all_or_nothing`."""
        self.operation_id = ""

    async def __aenter__(self) -> AsyncForks:
        return self

    async def __aexit__(self, *_: object) -> None:
        failed = await runtime.every([child.terminate for child in self])
        if failed:
            raise failed[0]

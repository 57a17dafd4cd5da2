"""Workspaces as sandboxes of Inspect (the package inspect_ai).

    pip install 'coppice[inspect]'

    Task(dataset=…, solver=…, sandbox="coppice")
    Task(dataset=…, solver=…, sandbox=SandboxEnvironmentSpec("coppice", CoppiceConfig(setup="pip install -e .")))

Each sample has a workspace of its own. With `setup`, it runs once for the task: each sample and each epoch begins as a
fork of the machine after it.
"""

from __future__ import annotations

import asyncio
import re
import sys
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, Literal, Optional, Union, overload

from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxConnection,
    SandboxEnvironment,
    SandboxEnvironmentConfigType,
    SandboxEnvironmentLimits,
    SandboxUnavailableError,
    sandboxenv,
)
from pydantic import BaseModel, ConfigDict

from coppice import AsyncCoppice, AsyncSession, AsyncWorkspace, Result, errors
from coppice._requests import ForkLaunch
from coppice.adapters._shielded import shielded

LABEL = "inspect-task"
"""The label of each workspace and of each checkpoint, with the task's name."""

MAX_STDIN = 256 << 10
"""Input up to this size goes along with the request."""

MAX_COMMAND = 256 << 10
"""A longer command goes by a file: the server takes a MiB at most."""

NOT_PERMITTED = ("not permitted to run", "not executable")
"""What the guest says of a program that the user may not run."""

LAUNCH = "import os, sys; p = sys.argv[1]; a = open(p, 'rb').read().split(b'\\0'); os.unlink(p); os.execvp(a[0], a)"

UNAVAILABLE = (
    errors.ConnectionFailedError, errors.WorkspaceNotFound, errors.WorkspaceNotReady, errors.GuestUnreachable, errors.GuestProtocol,
)


class CoppiceConfig(BaseModel):
    """How the sandboxes of a task are made."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    image: Optional[str] = None
    """The image; the server's default otherwise."""
    checkpoint: Optional[str] = None
    """The id or the name of a checkpoint: each sandbox begins as a fork of it. Not together with `image`."""
    setup: Optional[str] = None
    """A line for `sh -c`, which root runs once for the task. Each sandbox begins as a fork of the machine after it."""
    setup_timeout: int = 1800
    user: Optional[str] = None
    """Who runs commands, and reads and writes files. Without one, the image's user runs commands, and root works with files."""
    cwd: str = "/workspace"
    """The working directory. It is made if it does not exist."""
    vcpus: Optional[int] = None
    memory_mib: Optional[int] = None
    disk_gib: Optional[int] = None
    allow: Optional[tuple[str, ...]] = None
    """What the sandbox may reach, such as `pypi.org`; nothing otherwise, or what the checkpoint's workspace could."""
    ttl: int = 86400
    """Seconds after which a sandbox ends, even if the evaluation crashed."""


def config_of(config: SandboxEnvironmentConfigType | None) -> CoppiceConfig:
    """A text is the id of a checkpoint, or the name of an image."""
    if config is None:
        return CoppiceConfig()
    if isinstance(config, str):
        return CoppiceConfig(checkpoint=config) if config.startswith("ckpt_") else CoppiceConfig(image=config)
    if not isinstance(config, CoppiceConfig):
        raise TypeError(f"the sandbox 'coppice' is configured by a CoppiceConfig, not by {type(config).__name__}")
    return config


async def make(client: AsyncCoppice, task_name: str, config: CoppiceConfig, start: str | None) -> AsyncWorkspace:
    """A workspace: a fork of the checkpoint `start`, or one of the image."""
    labels = {LABEL: task_name[:128]}
    if start is not None:
        options: ForkLaunch = {"labels": labels, "ttl": config.ttl}
        if config.allow is not None:
            options["allow"] = config.allow
        return (await (await client.checkpoint(start)).fork(1, **options))[0]
    return await client.create(
        config.image, vcpus=config.vcpus, memory_mib=config.memory_mib, disk_gib=config.disk_gib, labels=labels, ttl=config.ttl,
        allow=config.allow or (),
    )


async def image_user(ws: AsyncWorkspace) -> str | None:
    """Who runs commands without `user`, as numbers. None is root, or an image that cannot say."""
    try:
        result = await ws.run(["sh", "-c", 'echo "$(id -u):$(id -g)"'], cwd="/")
    except (errors.CommandNotFound, errors.CommandNotStarted):
        return None
    who = result.stdout.strip()
    return who if result.ok and re.fullmatch(r"[1-9]\d*:\d+", who) else None


async def end(client: AsyncCoppice, ws: AsyncWorkspace | None) -> None:
    """Ends a workspace, and closes its client."""
    try:
        if ws is not None:
            await shielded(ws.terminate())
    except errors.NotFoundError:
        pass
    finally:
        await shielded(client.aclose())


@sandboxenv(name="coppice")
class CoppiceSandboxEnvironment(SandboxEnvironment):
    """One workspace. `workspace` is it, for what Inspect has no word for: checkpoints, forks, the network."""

    prepared: dict[CoppiceConfig, str] = {}
    """The checkpoints after `setup`, by configuration: Inspect calls `task_init` without the name of a task."""
    runs_as: str | None = None
    """Who runs commands, if it is not root."""

    def __init__(self, client: AsyncCoppice, workspace: AsyncWorkspace, config: CoppiceConfig) -> None:
        super().__init__()
        self.client = client
        self.workspace = workspace
        self.config = config

    # -- the life of sandboxes

    @classmethod
    async def task_init(cls, task_name: str, config: SandboxEnvironmentConfigType | None) -> None:
        made = config_of(config)
        if made.setup is None:
            return
        if made in cls.prepared:
            return  # Inspect calls this once more for each directory and each environment of a configuration
        client = AsyncCoppice()
        ws: AsyncWorkspace | None = None
        try:
            ws = await shielded(make(client, task_name, made, made.checkpoint), lambda ws: ws.terminate())
            result = await ws.run(made.setup, user="root", timeout=made.setup_timeout)
            if not result.ok:
                raise RuntimeError(f"setup failed with status {result.exit_code}: {(result.stderr or result.stdout)[-2000:]}")
            node = await shielded(ws.checkpoint(labels={LABEL: task_name[:128]}), lambda node: node.delete())
            cls.prepared[made] = node.id
        finally:
            await end(client, ws)

    @classmethod
    async def task_cleanup(cls, task_name: str, config: SandboxEnvironmentConfigType | None, cleanup: bool) -> None:
        start = cls.prepared.pop(config_of(config), None)
        if start is None or not cleanup:
            return
        async with AsyncCoppice() as client:
            try:
                await (await client.checkpoint(start)).delete()
            except (errors.PreconditionError, errors.NotFoundError):
                pass  # it has checkpoints below it, which somebody made to keep

    @classmethod
    async def sample_init(
        cls, task_name: str, config: SandboxEnvironmentConfigType | None, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        made = config_of(config)
        client = AsyncCoppice()
        ws: AsyncWorkspace | None = None
        try:
            start = cls.prepared.get(made, made.checkpoint)
            ws = await shielded(make(client, task_name, made, start), lambda ws: ws.terminate())
            await ws.files.mkdir(made.cwd, parents=True)
            one = cls(client, ws, made)
            one.runs_as = made.user or await image_user(ws)
            if one.runs_as is not None:
                await ws.run(["chown", one.runs_as, made.cwd], user="root", check=True)
        except BaseException:
            await end(client, ws)
            raise
        return {"default": one}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: SandboxEnvironmentConfigType | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        for environment in environments.values():
            one = environment.as_type(CoppiceSandboxEnvironment)
            await end(one.client, one.workspace)

    @classmethod
    async def cli_cleanup(cls, id: str | None) -> None:
        """Ends workspaces of evaluations, and deletes checkpoints after `setup`: all of this project, or the one of an id.

        It cannot know which evaluations still run: it ends theirs, too.
        """
        async with AsyncCoppice() as client:
            work: list[tuple[str, Callable[[], Awaitable[object]]]] = []
            work += [(ws.id, ws.terminate) async for ws in client.workspaces(labels=[LABEL]) if id in (None, ws.id, ws.name)]
            work += [(n.id, n.delete) async for n in client.checkpoints(labels=[LABEL]) if id in (None, n.id, n.name)]
            failed = 0
            for what, remove in work:
                try:
                    await remove()
                except errors.NotFoundError:
                    pass
                except errors.CoppiceError as problem:
                    failed += 1
                    print(f"{what}: {problem}", file=sys.stderr)
        if failed:
            raise RuntimeError(f"{failed} of {len(work)} workspaces and checkpoints are left, see above")

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        return CoppiceConfig(**config)

    @classmethod
    def default_concurrency(cls) -> int | None:
        return None  # the server limits and queues them

    async def connection(self, *, user: str | None = None) -> SandboxConnection:
        return SandboxConnection(type="coppice", command=f"coppice ws shell {self.workspace.name}")

    # -- programs

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """Runs a program. After a timeout it is killed and not run again: it has run, and may have had effects."""
        stdin = input.encode() if isinstance(input, str) else input
        who = user or self.config.user
        try:
            result = await self._run(cmd, stdin, self._path(cwd or "."), env, who, timeout)
        except errors.CommandNotFound as problem:
            return ExecResult(False, 127, "", f"{cmd[0]}: {problem.detail}\n")
        except errors.CommandNotStarted as problem:
            if any(text in problem.detail for text in NOT_PERMITTED):
                raise PermissionError(f"{cmd[0]}: {problem.detail}") from problem
            return ExecResult(False, 126, "", f"{problem.detail}\n")
        except (errors.InvalidField, errors.FileNotFound) as problem:  # of the user, or of the directory
            return ExecResult(False, 126, "", f"{cmd[0]}: {problem.detail}{f' (user {who})' if who else ''}\n")
        except UNAVAILABLE as problem:
            raise SandboxUnavailableError(str(problem)) from problem
        if result.timed_out:
            raise TimeoutError(f"{cmd[0]} was killed after {timeout} seconds")
        return ExecResult(result.exit_code == 0, result.exit_code, result.stdout, result.stderr)

    async def _run(
        self, cmd: list[str], stdin: bytes | None, cwd: str, env: dict[str, str] | None, user: str | None, timeout: int | None
    ) -> Result:
        """Runs a program, and reads its output while it runs: afterwards the server has the last MiB only."""
        words = "\0".join(cmd).encode()
        if len(words) > MAX_COMMAND:
            path = f"/tmp/.coppice-{uuid.uuid4().hex}"
            await self.workspace.files.write(path, words, mode=0o600, user=user or self.runs_as)
            cmd = ["python3", "-c", LAUNCH, path]
        much = stdin is not None and len(stdin) > MAX_STDIN
        session = await shielded(
            self.workspace.start(
                cmd, stdin=None if much else stdin, stdin_open=much, cwd=cwd, env=env, user=user, timeout=timeout
            ),
            lambda session: session.delete(),
        )
        writer = asyncio.create_task(feed(session, stdin)) if much and stdin is not None else None
        try:
            return await session.result(limit=SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE)
        except asyncio.CancelledError:
            await shielded(session.delete())  # nothing else would end the program
            raise
        finally:
            if writer is not None:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)

    # -- files

    async def write_file(self, file: str, contents: str | bytes) -> None:
        """Writes into the file itself, which keeps its owner and its mode."""
        path = self._path(file)
        try:
            await self.workspace.files.write(path, contents, in_place=True, user=self.config.user)
        except errors.FileConflict as problem:
            raise IsADirectoryError(f"{file} is a directory") from problem
        except errors.FileDenied as problem:
            raise PermissionError(f"{file}: {problem.detail}") from problem
        except UNAVAILABLE as problem:
            raise SandboxUnavailableError(str(problem)) from problem

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    async def read_file(self, file: str, text: bool = True) -> Union[str, bytes]:
        path, user, limit = self._path(file), self.config.user, SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        try:
            info = await self.workspace.files.stat(path, user=user)
            if info.type == "dir":
                raise IsADirectoryError(f"{file} is a directory")
            if info.size > limit:
                raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
            data = await self.workspace.files.read(path, limit=limit, user=user)
        except (errors.FileNotFound, errors.FileConflict) as problem:
            raise FileNotFoundError(f"{file}: {problem.detail}") from problem
        except errors.FileDenied as problem:
            raise PermissionError(f"{file}: {problem.detail}") from problem
        except UNAVAILABLE as problem:
            raise SandboxUnavailableError(str(problem)) from problem
        return data.decode() if text else data

    def _path(self, path: str) -> str:
        return path if path.startswith("/") else f"{self.config.cwd.rstrip('/')}/{path}"


async def feed(session: AsyncSession, data: bytes) -> None:
    """Writes to the standard input of a program, in pieces."""
    try:
        for at in range(0, len(data), 1 << 20):
            await session.write(data[at : at + (1 << 20)])
        await session.close_stdin()
    except (errors.PreconditionError, errors.ConflictError, errors.NotFoundError):
        pass  # it ended, or closed its input, without reading everything

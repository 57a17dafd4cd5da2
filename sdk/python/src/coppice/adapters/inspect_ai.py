"""Workspaces as sandboxes of Inspect (the package inspect_ai).

    pip install 'coppice[inspect]'

    Task(dataset=…, solver=…, sandbox="coppice")
    Task(dataset=…, solver=…, sandbox=SandboxEnvironmentSpec("coppice", CoppiceConfig(setup="pip install -e .")))

Each sample has a workspace of its own. With `setup`, it runs once for the task: each sample and each epoch begins as a
fork of the machine after it.
"""

from __future__ import annotations

import asyncio
import uuid
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

LABEL = "inspect-task"
"""The label of each workspace, with the task's name."""

MAX_STDIN = 256 << 10
"""Input up to this size goes along with the request."""

MAX_COMMAND = 256 << 10
"""A longer command goes by a file: the server takes a MiB at most."""

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
    """Seconds after which a sandbox ends, whatever became of the evaluation."""


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


@sandboxenv(name="coppice")
class CoppiceSandboxEnvironment(SandboxEnvironment):
    """One workspace. `workspace` is it, for what Inspect has no word for: checkpoints, forks, the network."""

    prepared: dict[CoppiceConfig, str] = {}
    """The checkpoints after `setup`. Inspect calls `task_init` once for each configuration, without the name of a task."""

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
        async with AsyncCoppice() as client, await make(client, task_name, made, made.checkpoint) as ws:
            result = await ws.run(made.setup, timeout=made.setup_timeout)
            if not result.ok:
                raise RuntimeError(f"setup failed with status {result.exit_code}: {(result.stderr or result.stdout)[-2000:]}")
            cls.prepared[made] = (await ws.checkpoint(labels={LABEL: task_name[:128]})).id

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
        try:
            ws = await make(client, task_name, made, cls.prepared.get(made, made.checkpoint))
            try:
                await ws.files.mkdir(made.cwd, parents=True)
                if made.user is not None:
                    await ws.run(["chown", made.user, made.cwd], check=True)
            except BaseException:
                await ws.terminate()
                raise
        except BaseException:
            await client.aclose()
            raise
        return {"default": cls(client, ws, made)}

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
            try:
                await one.workspace.terminate()
            except errors.NotFoundError:
                pass
            finally:
                await one.client.aclose()

    @classmethod
    async def cli_cleanup(cls, id: str | None) -> None:
        """Ends the workspaces that evaluations have left: all of this project, or the one of an id."""
        async with AsyncCoppice() as client:
            left = [ws async for ws in client.workspaces(labels=[LABEL]) if id in (None, ws.id, ws.name)]
            for ws in left:
                await ws.terminate()

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        return CoppiceConfig(**config)

    @classmethod
    def default_concurrency(cls) -> int | None:
        return None  # the server has quotas, and a queue

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
            raise PermissionError(f"{cmd[0]}: {problem.detail}") from problem
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
            await self.workspace.files.write(path, words, mode=0o600, user=user)
            cmd = ["python3", "-c", LAUNCH, path]
        much = stdin is not None and len(stdin) > MAX_STDIN
        session = await self.workspace.start(
            cmd, stdin=None if much else stdin, stdin_open=much, cwd=cwd, env=env, user=user, timeout=timeout
        )
        writer = asyncio.create_task(feed(session, stdin)) if much and stdin is not None else None
        try:
            return await session.result(limit=SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE)
        except asyncio.CancelledError:
            await asyncio.shield(session.delete())  # the sample is over: nobody would end the program
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

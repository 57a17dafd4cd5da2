"""Workspaces as sandboxes of the OpenAI Agents SDK (the package openai-agents).

    pip install 'coppice[openai-agents]'

    sandbox = SandboxRunConfig(client=CoppiceSandboxClient(), options=CoppiceSandboxClientOptions(image="base"))
    await Runner.run(SandboxAgent(name="…"), "…", run_config=RunConfig(sandbox=sandbox))

A session is a workspace. `workspace_of(session)` is it, for checkpoints, forks and the network. A fork, or any other
workspace, becomes a session by `client.attach(workspace)`.
"""

from __future__ import annotations

import io
import posixpath
import re
import tarfile
import tempfile
import uuid
from pathlib import Path
from typing import IO, Any, Literal, Optional, cast

from agents.sandbox.errors import (
    ExecTimeoutError,
    ExecTransportError,
    ExposedPortUnavailableError,
    WorkspaceArchiveReadError,
    WorkspaceArchiveWriteError,
    WorkspaceReadNotFoundError,
)
from agents.sandbox.manifest import Manifest
from agents.sandbox.session.base_sandbox_session import BaseSandboxSession
from agents.sandbox.session.runtime_helpers import RESOLVE_WORKSPACE_PATH_HELPER, RuntimeHelperScript
from agents.sandbox.session.sandbox_client import BaseSandboxClient, BaseSandboxClientOptions
from agents.sandbox.session.sandbox_session import SandboxSession
from agents.sandbox.session.sandbox_session_state import SandboxSessionState
from agents.sandbox.session.workspace_payloads import coerce_write_payload
from agents.sandbox.snapshot import SnapshotBase, SnapshotSpec, resolve_snapshot
from agents.sandbox.types import ExecResult, ExposedPortEndpoint, User
from agents.sandbox.util.tar_utils import UnsafeTarMemberError, validate_tarfile
from coppice import AsyncCoppice, AsyncSession, AsyncWorkspace, errors
from coppice._requests import ForkLaunch
from coppice.adapters._shielded import shielded

LABEL = "openai-agents"
"""The label of each workspace that a client makes, by which those that a program left can be found."""

MAX_READ = 256 << 20
MAX_OUTPUT = 10 << 20
"""How much of each output stream a command returns: the end of it."""
MAX_MEMBERS = 250_000
MAX_HEADERS = 256 << 20
"""How many members an archive of a guest may have, and how many bytes of headers."""
MAX_HEADER = 1 << 20

# What an archive can restore: no pipe, device or socket. $1 is the archive, $2 the directory, and the others are paths below
# it to leave out.
PACK = """
set -eu
archive=$1 root=$2
shift 2
cd -- "$root"
umask 077
for path; do
    set -- "$@" -path "$path" -prune -o
    shift
done
find . "$@" \\( -type f -o -type d -o -type l \\) -print0 > "$archive.list"
tar --no-recursion --hard-dereference --null -T "$archive.list" -cf "$archive"
"""


class CoppiceSandboxClientOptions(BaseSandboxClientOptions):
    """How a workspace is made."""

    type: Literal["coppice"] = "coppice"
    image: Optional[str] = None
    """The image; the server's default otherwise."""
    checkpoint: Optional[str] = None
    """The id or the name of a checkpoint: the workspace begins as a fork of it. Not together with `image`."""
    vcpus: Optional[int] = None
    memory_mib: Optional[int] = None
    disk_gib: Optional[int] = None
    allow: Optional[tuple[str, ...]] = None
    """What it may reach, such as `pypi.org`; nothing otherwise, or what the checkpoint's workspace could."""
    exposed_ports: tuple[int, ...] = ()
    ttl: int = 86400
    """Seconds after which it ends, even if the program crashed."""
    max_archive: int = 1 << 30
    """The most bytes of files that a snapshot keeps."""


class CoppiceSandboxSessionState(SandboxSessionState):
    type: Literal["coppice"] = "coppice"
    workspace_id: str
    options: CoppiceSandboxClientOptions

    def _sanitize_persisted_provider_identity(self, data: dict[str, Any], *, mount_authority_redacted: bool) -> None:
        if mount_authority_redacted:
            data["workspace_id"] = ""
            data["workspace_root_ready"] = False


class CoppiceSandboxSession(BaseSandboxSession):
    """One workspace."""

    state: CoppiceSandboxSessionState

    def __init__(self, workspace: AsyncWorkspace, state: CoppiceSandboxSessionState) -> None:
        self.workspace = workspace
        self.state = state
        self._root_ready = state.workspace_root_ready

    # -- its life

    async def _ensure_backend_started(self) -> None:
        if (await self.workspace.refresh()).state == "suspended":
            await self.workspace.resume()

    async def _prepare_backend_workspace(self) -> None:
        root = self.state.manifest.root
        await self.workspace.files.mkdir(root, parents=True)
        if (await self.workspace.files.stat(root)).uid == 0:
            # The image's user may be another one, who runs the agent's commands.
            who = await self._run(["sh", "-c", 'echo "$(id -u):$(id -g)"'], None, None, cwd="/")
            owner = who.stdout.decode("ascii", "replace").strip()
            if who.ok() and re.fullmatch(r"[1-9]\d*:\d+", owner):
                given = await self._run(["chown", owner, root], None, "root", cwd="/")
                if not given.ok():
                    raise RuntimeError(f"{root} cannot be given to {owner}: {given.stderr.decode('utf-8', 'replace')[-2000:]}")
        self._root_ready = True

    async def _shutdown_backend(self) -> None:
        try:
            await self.workspace.terminate()
        except errors.NotFoundError:
            pass

    async def running(self) -> bool:
        try:
            return (await self.workspace.refresh()).state == "ready"
        except errors.NotFoundError:
            return False

    # -- commands

    async def exec(
        self,
        *command: str | Path,
        timeout: float | None = None,
        shell: bool | list[str] = True,
        user: str | User | None = None,
    ) -> ExecResult:
        """Runs a command, as a user without the guest's `sudo`."""
        words = self._prepare_exec_command(*command, shell=shell, user=None)
        return await self._run(words, timeout, name_of(user))

    async def _exec_internal(self, *command: str | Path, timeout: float | None = None) -> ExecResult:
        return await self._run([str(c) for c in command], timeout, None)

    async def _run(self, words: list[str], timeout: float | None, user: str | None, cwd: str | None = None) -> ExecResult:
        env = await self.state.manifest.environment.resolve()
        if cwd is None:
            cwd = self.state.manifest.root if self._root_ready else "/"
        try:
            begun = self.workspace.start(words, cwd=cwd, env=env, user=user, timeout=timeout)
            session = await shielded(begun, lambda session: session.delete())
            try:
                result = await session.result(limit=MAX_OUTPUT)
            except BaseException:
                await ended(session)
                raise
        except errors.CommandNotFound as problem:
            return ExecResult(stdout=b"", stderr=f"{words[0]}: {problem.detail}\n".encode(), exit_code=127)
        except errors.CommandNotStarted as problem:
            return ExecResult(stdout=b"", stderr=f"{words[0]}: {problem.detail}\n".encode(), exit_code=126)
        except errors.CoppiceError as problem:
            raise ExecTransportError(command=words, cause=problem) from problem
        if result.timed_out:
            raise ExecTimeoutError(command=words, timeout_s=timeout, cause=None)
        return ExecResult(stdout=result.stdout_bytes, stderr=result.stderr_bytes, exit_code=result.exit_code)

    # -- files

    def _runtime_helpers(self) -> tuple[RuntimeHelperScript, ...]:
        return (RESOLVE_WORKSPACE_PATH_HELPER,)

    def _current_runtime_helper_cache_key(self) -> object | None:
        return self.state.workspace_id

    async def _validate_path_access(self, path: Path | str, *, for_write: bool = False) -> Path:
        return await self._validate_remote_path_access(path, for_write=for_write)

    async def read(self, path: Path, *, user: str | User | None = None) -> io.IOBase:
        return io.BytesIO(await self._read(path, MAX_READ, name_of(user)))

    async def _read(self, path: Path, limit: int, user: str | None) -> bytes:
        where = (await self._validate_path_access(path)).as_posix()
        try:
            return await self.workspace.files.read(where, limit=limit, user=user)
        except errors.FileNotFound as problem:
            raise WorkspaceReadNotFoundError(path=path, cause=problem) from problem
        except errors.CoppiceError as problem:
            raise WorkspaceArchiveReadError(path=path, cause=problem) from problem

    async def _read_bounded(self, path: Path, *, max_bytes: int) -> bytes:
        where = (await self._validate_path_access(path)).as_posix()
        out = bytearray()
        try:
            async for piece in self.workspace.files.stream(where):
                out += piece[: max_bytes - len(out)]
                if len(out) >= max_bytes:
                    break
        except errors.FileNotFound:
            raise WorkspaceReadNotFoundError(path=path) from None
        except errors.CoppiceError:
            raise WorkspaceArchiveReadError(path=path) from None
        return bytes(out)

    async def write(self, path: Path, data: io.IOBase, *, user: str | User | None = None) -> None:
        payload = coerce_write_payload(path=path, data=data)
        where = (await self._validate_path_access(path, for_write=True)).as_posix()
        who = name_of(user)
        try:
            await self.workspace.files.mkdir(posixpath.dirname(where), parents=True, user=who)
            await self.workspace.files.write(where, pieces(payload.stream), in_place=True, user=who)
        except errors.CoppiceError as problem:
            raise WorkspaceArchiveWriteError(path=path, cause=problem) from problem

    async def persist_workspace(self) -> io.IOBase:
        """The working directory as an archive, which the guest's tar makes as root. A checkpoint has all of the machine instead.

        Hard links become files of their own. Pipes, devices and sockets are left out. What `hydrate_workspace` would refuse is
        an error here, while the files are there.
        """
        root = self._workspace_root_path()
        where = f"/var/tmp/.coppice-{uuid.uuid4().hex}.tar"
        skip = [f"./{fnmatch_escaped(path.as_posix())}" for path in sorted(self._persist_workspace_skip_relpaths())]
        archive = tempfile.TemporaryFile()  # the reader closes it
        try:
            made = await self._run(["sh", "-c", PACK, "sh", where, root.as_posix(), *skip], None, "root")
            if not made.ok():
                raise WorkspaceArchiveReadError(path=root, context={"stderr": made.stderr.decode("utf-8", "replace")[-2000:]})
            size = 0
            async for piece in self.workspace.files.stream(where):
                size += len(piece)
                if size > self.state.options.max_archive:
                    reason = f"it has more than {self.state.options.max_archive} bytes: see max_archive of the options"
                    raise WorkspaceArchiveReadError(path=root, context={"reason": reason})
                archive.write(piece)
            validate(archive)
            archive.seek(0)
        except UnsafeTarMemberError as problem:
            archive.close()
            context = {"reason": problem.reason, "member": problem.member}
            raise WorkspaceArchiveReadError(path=root, context=context, cause=problem) from problem
        except (tarfile.TarError, OSError, errors.CoppiceError) as problem:
            archive.close()
            raise WorkspaceArchiveReadError(path=root, cause=problem) from problem
        except BaseException:
            archive.close()
            raise
        finally:
            for path in (where, where + ".list"):
                try:
                    await shielded(self.workspace.files.remove(path))
                except errors.CoppiceError:
                    pass  # an error that led here says more
        return cast(io.IOBase, archive)

    async def hydrate_workspace(self, data: io.IOBase) -> None:
        root = self._workspace_root_path()
        with tempfile.TemporaryFile() as archive:
            size = 0
            for piece in pieces(data):
                size += len(piece)
                if size > self.state.options.max_archive:
                    reason = f"it has more than {self.state.options.max_archive} bytes: see max_archive of the options"
                    raise WorkspaceArchiveWriteError(path=root, context={"reason": reason})
                archive.write(piece)
            try:
                validate(archive)
            except UnsafeTarMemberError as problem:
                context = {"reason": problem.reason, "member": problem.member}
                raise WorkspaceArchiveWriteError(path=root, context=context, cause=problem) from problem
            except (tarfile.TarError, OSError) as problem:
                raise WorkspaceArchiveWriteError(path=root, cause=problem) from problem
            archive.seek(0)
            try:
                await self.workspace.files.mkdir(root.as_posix(), parents=True)
                await self.workspace.files.write_tar(root.as_posix(), pieces(cast(io.IOBase, archive)))
            except errors.CoppiceError as problem:
                raise WorkspaceArchiveWriteError(path=root, cause=problem) from problem

    # -- ports

    async def _resolve_exposed_port(self, port: int) -> ExposedPortEndpoint:
        try:
            opened = await self.workspace.network.open_port(port)
        except errors.CoppiceError as problem:
            raise ExposedPortUnavailableError(
                port=port, exposed_ports=self.state.exposed_ports, reason="backend_unavailable", cause=problem
            ) from problem
        host, _, at = opened.listen.rpartition(":")
        return ExposedPortEndpoint(host=host.strip("[]"), port=int(at))


class CoppiceSandboxClient(BaseSandboxClient[CoppiceSandboxClientOptions]):
    """Makes sessions. Without a client of Coppice it takes the server as `Coppice()` does."""

    backend_id = "coppice"
    supports_default_options = True

    def __init__(self, client: AsyncCoppice | None = None) -> None:
        self.client = client or AsyncCoppice()
        self._own = client is None

    async def __aenter__(self) -> CoppiceSandboxClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Closes the connections of a client that was made here. One that was given is its owner's."""
        if self._own:
            await self.client.aclose()

    async def create(
        self,
        *,
        snapshot: SnapshotSpec | SnapshotBase | None = None,
        manifest: Manifest | None = None,
        options: CoppiceSandboxClientOptions | None = None,
    ) -> SandboxSession:
        made = options or CoppiceSandboxClientOptions()
        wanted = self._validate_manifest_for_create(manifest if manifest is not None else Manifest())
        ws = await shielded(self._make(made), lambda ws: ws.terminate())
        try:
            return self._session(ws, made, wanted, snapshot)
        except BaseException:
            await shielded(ws.terminate())
            raise

    async def attach(self, workspace: AsyncWorkspace | str, *, manifest: Manifest | None = None) -> SandboxSession:
        """A session over a workspace that is there, such as a fork. `delete` ends the workspace."""
        ws = await self.client.workspace(workspace if isinstance(workspace, str) else workspace.id)
        wanted = self._validate_manifest_for_create(manifest if manifest is not None else Manifest())
        session = self._session(ws, CoppiceSandboxClientOptions(), wanted, None)
        inner_of(session)._set_start_state_preserved(True)
        return session

    async def delete(self, session: SandboxSession) -> SandboxSession:
        await inner_of(session).shutdown()
        return session

    async def resume(self, state: SandboxSessionState) -> SandboxSession:
        """The same workspace. If it has ended, a new one, which gets the files of the state's snapshot at its start."""
        if not isinstance(state, CoppiceSandboxSessionState):
            raise TypeError("CoppiceSandboxClient.resume wants the state of one of its sessions")
        state.assert_path_grants_rebound()
        ws: AsyncWorkspace | None = None
        if state.workspace_id and not state.mount_authority_rebound:
            try:
                ws = await self.client.workspace(state.workspace_id)
            except errors.NotFoundError:
                pass
            if ws is not None and ws.state not in ("ready", "suspended"):
                ws = None
        preserved = ws is not None
        if ws is None:
            ws = await shielded(self._make(state.options), lambda ws: ws.terminate())
            state.workspace_id, state.workspace_root_ready = ws.id, False
        inner = CoppiceSandboxSession(ws, state)
        inner._set_start_state_preserved(preserved)
        return self._wrap_session(inner)

    def deserialize_session_state(self, payload: dict[str, object]) -> SandboxSessionState:
        return self._deserialize_session_state_payload(payload, CoppiceSandboxSessionState)

    async def _make(self, options: CoppiceSandboxClientOptions) -> AsyncWorkspace:
        if options.checkpoint is not None:
            launch: ForkLaunch = {"ttl": options.ttl, "labels": {LABEL: "session"}}
            if options.allow is not None:
                launch["allow"] = options.allow
            return (await (await self.client.checkpoint(options.checkpoint)).fork(1, **launch))[0]
        return await self.client.create(
            options.image, vcpus=options.vcpus, memory_mib=options.memory_mib, disk_gib=options.disk_gib, ttl=options.ttl,
            allow=options.allow or (), labels={LABEL: "session"},
        )

    def _session(
        self,
        ws: AsyncWorkspace,
        options: CoppiceSandboxClientOptions,
        manifest: Manifest,
        snapshot: SnapshotSpec | SnapshotBase | None,
    ) -> SandboxSession:
        id = uuid.uuid4()
        state = CoppiceSandboxSessionState(
            session_id=id, manifest=manifest, snapshot=resolve_snapshot(snapshot, str(id)), workspace_id=ws.id, options=options,
            exposed_ports=options.exposed_ports,
        )
        return self._wrap_session(CoppiceSandboxSession(ws, state))


def inner_of(session: SandboxSession) -> CoppiceSandboxSession:
    inner = session._inner
    if not isinstance(inner, CoppiceSandboxSession):
        raise TypeError("the session is not one of a CoppiceSandboxClient")
    return inner


def workspace_of(session: SandboxSession) -> AsyncWorkspace:
    """The workspace of a session: for checkpoints, forks, restores and the network."""
    return inner_of(session).workspace


def name_of(user: str | User | None) -> str | None:
    return user.name if isinstance(user, User) else user


def pieces(stream: io.IOBase) -> Any:
    """The bytes of a stream."""
    while piece := stream.read(1 << 18):
        yield piece.encode() if isinstance(piece, str) else bytes(piece)


async def ended(session: AsyncSession) -> None:
    """Kills a command whose result nobody waits for."""
    try:
        await shielded(session.delete())
    except errors.CoppiceError:
        pass  # the error that led here says more


def fnmatch_escaped(path: str) -> str:
    """A path as a pattern of find."""
    return re.sub(r"([\\*?\[])", r"\\\1", path)


class Headers:
    """Reads no more of a file than the headers of an archive may have."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._left = MAX_HEADERS

    def read(self, size: int = -1) -> bytes:
        self._left -= size
        if not 0 <= size <= MAX_HEADER or self._left < 0:
            raise tarfile.ReadError("the headers of the archive are too large")
        return self._file.read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


def validate(archive: IO[bytes]) -> None:
    """Refuses what must not be unpacked. A guest may have made the archive.

    Links may lead out of the directory, as those of a virtual environment of Python do: it is unpacked in a machine, which no
    link leaves. No member is below a link.
    """
    archive.seek(0)
    with tarfile.open(fileobj=cast(IO[bytes], Headers(archive)), mode="r:") as tar:  # not compressed: nothing grows
        for number, _ in enumerate(tar):
            if number >= MAX_MEMBERS:
                raise tarfile.ReadError(f"the archive has more than {MAX_MEMBERS} members")
        validate_tarfile(tar)

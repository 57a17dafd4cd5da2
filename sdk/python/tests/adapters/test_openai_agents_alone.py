"""Archives of sessions and the ends of commands. A directory of this machine stands in for a workspace."""

from __future__ import annotations

import asyncio
import gzip
import io
import os
import subprocess
import tarfile
import uuid
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest
from agents.sandbox.errors import WorkspaceArchiveReadError, WorkspaceArchiveWriteError
from agents.sandbox.manifest import Manifest
from agents.sandbox.snapshot import NoopSnapshot
from agents.sandbox.util.tar_utils import UnsafeTarMemberError
from coppice import Result, errors
from coppice.adapters import openai_agents
from coppice.adapters.openai_agents import (
    CoppiceSandboxClient,
    CoppiceSandboxClientOptions,
    CoppiceSandboxSession,
    CoppiceSandboxSessionState,
    validate,
)

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Files:
    def __init__(self) -> None:
        self.removed: list[str] = []
        self.uid = 0

    async def mkdir(self, path: str, parents: bool) -> None:
        os.makedirs(path, exist_ok=True)

    async def stat(self, path: str) -> Any:
        return SimpleNamespace(uid=self.uid)

    async def stream(self, path: str) -> AsyncIterator[bytes]:
        yield Path(path).read_bytes()

    async def remove(self, path: str) -> None:
        await anyio.sleep(0)
        os.remove(path)
        self.removed.append(path)

    async def write_tar(self, directory: str, archive: Iterable[bytes]) -> None:
        subprocess.run(["tar", "-C", directory, "-xpf", "-"], input=b"".join(archive), check=True)


class Local:
    """Runs commands here, whoever should run them."""

    def __init__(self) -> None:
        self.files = Files()
        self.ran: list[tuple[list[str], str | None]] = []
        self.killed = 0
        self.says: bytes | None = None
        self.waits = self.slow = False

    async def start(self, words: list[str], *, cwd: str, env: Any, user: str | None, timeout: float | None) -> Local:
        self.ran.append((words, user))
        if self.slow:
            await anyio.sleep(0.1)
        return self

    async def result(self, limit: int) -> Result:
        if self.waits:
            await anyio.sleep_forever()
        if self.says is not None:
            return Result("x", 0, self.says, b"")
        done = subprocess.run(self.ran[-1][0], capture_output=True)
        return Result("x", done.returncode, done.stdout, done.stderr)

    async def delete(self) -> None:
        await anyio.sleep(0)
        self.killed += 1


def session_at(root: Path, workspace: Local, **options: Any) -> CoppiceSandboxSession:
    id = uuid.uuid4()
    state = CoppiceSandboxSessionState(
        session_id=id, manifest=Manifest(root=str(root)), snapshot=NoopSnapshot(id=str(id)), workspace_id="ws_x",
        options=CoppiceSandboxClientOptions(**options),
    )
    return CoppiceSandboxSession(cast(Any, workspace), state)


def tree_of(root: Path) -> dict[str, str]:
    """Every path below a directory, with what is there."""
    out = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            out[name] = "-> " + os.readlink(path)
        elif path.is_file():
            out[name] = path.read_text()
        else:
            out[name] = "dir" if path.is_dir() else "special"
    return out


async def test_a_virtual_environment_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links out of the directory, hard links, a pipe, and names that patterns could mistake."""
    root = tmp_path / "root"
    (root / "venv/bin").mkdir(parents=True)
    (root / "venv/lib/site").mkdir(parents=True)
    (root / "venv/bin/python").symlink_to("/usr/bin/python3")
    (root / "venv/bin/python3").symlink_to("python")
    (root / "venv/lib64").symlink_to("lib")
    (root / "venv/home").symlink_to(str(root / "venv"))
    (root / "venv/up").symlink_to("../../..")
    (root / "venv/lib/site/one.py").write_text("1")
    os.link(root / "venv/lib/site/one.py", root / "venv/lib/site/two.py")
    os.mkfifo(root / "venv/pipe")
    (root / "-rf").write_text("option")
    (root / "new\nline").write_text("n")
    (root / ("long" * 60)).write_text("long")
    for name in ("skip*", "skipped"):
        (root / name).mkdir()
        (root / name / "f").write_text(name)
    wanted = tree_of(root)
    for gone in ("venv/pipe", "skip*", "skip*/f"):
        del wanted[gone]

    workspace = Local()
    session = session_at(root, workspace)
    monkeypatch.setattr(session, "_persist_workspace_skip_relpaths", lambda: {Path("skip*")})
    archive = await session.persist_workspace()
    assert workspace.ran[-1][1] == "root"
    assert len(workspace.files.removed) == 2 and not any(os.path.exists(p) for p in workspace.files.removed)
    other = tmp_path / "other"
    await session_at(other, workspace).hydrate_workspace(archive)
    assert tree_of(other) == wanted
    assert os.stat(other / "venv/lib/site/one.py").st_nlink == 1


async def test_an_archive_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 200_000)
    workspace = Local()
    with pytest.raises(WorkspaceArchiveReadError):
        await session_at(tmp_path, workspace, max_archive=100_000).persist_workspace()
    assert len(workspace.files.removed) == 2
    archive = await session_at(tmp_path, workspace).persist_workspace()
    with pytest.raises(WorkspaceArchiveWriteError):
        await session_at(tmp_path / "other", workspace, max_archive=100_000).hydrate_workspace(archive)


async def test_a_failure_is_told_before_that_of_its_cleanup(tmp_path: Path) -> None:
    workspace = Local()
    session = session_at(tmp_path / "none", workspace)
    with pytest.raises(WorkspaceArchiveReadError) as problem:
        workspace.files.remove = gone  # type: ignore[method-assign]
        await session.persist_workspace()
    assert "none" in str(problem.value.context["stderr"])


async def gone(path: str) -> None:
    raise errors.FileNotFound(path, code="FILE_NOT_FOUND", status=404)


def tar_of(*members: tarfile.TarInfo, format: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format) as tar:
        for m in members:
            tar.addfile(m, io.BytesIO(b"x" * m.size))
    return out.getvalue()


def member(name: str, type: bytes = tarfile.REGTYPE, link: str = "", **pax: str) -> tarfile.TarInfo:
    m = tarfile.TarInfo(name)
    m.type, m.linkname, m.pax_headers = type, link, pax
    return m


@pytest.mark.parametrize(
    "hostile",
    [
        gzip.compress(tar_of(member("a"))),
        tar_of(member("a"), member("b"), member("c")),
        tar_of(member("a", comment="x" * (2 << 20))),
        tar_of(member("a" * (2 << 20)), format=tarfile.GNU_FORMAT),
        tar_of(*(member(name, comment="x" * 600_000) for name in "ab")),
        tar_of(member("a", tarfile.LNKTYPE, "/etc/shadow")),
        tar_of(member("a", tarfile.FIFOTYPE)),
        tar_of(member("a", tarfile.SYMTYPE, "/etc"), member("a/b")),
        tar_of(member("../a")),
        tar_of(member("/a")),
        b"no archive",
    ],
    ids=["gzip", "members", "pax", "long name", "headers", "hard link", "pipe", "below a link", "above", "absolute", "none"],
)
async def test_hostile_archives_are_refused(hostile: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_agents, "MAX_MEMBERS", 2)
    monkeypatch.setattr(openai_agents, "MAX_HEADERS", 1 << 20)
    with pytest.raises((UnsafeTarMemberError, tarfile.TarError)):
        validate(io.BytesIO(hostile))
    with pytest.raises(WorkspaceArchiveWriteError):
        await session_at(tmp_path, Local()).hydrate_workspace(io.BytesIO(hostile))
    assert list(tmp_path.iterdir()) == []


def test_large_files_are_no_headers() -> None:
    big = member("big")
    big.size = 20 << 20
    validate(io.BytesIO(tar_of(big, member("a", tarfile.SYMTYPE, "/usr/bin/python3"))))


@pytest.mark.parametrize("slow", [False, True], ids=["while it runs", "while it starts"])
@pytest.mark.parametrize("by", ["anyio", "asyncio"])
async def test_a_cancelled_command_is_killed(tmp_path: Path, by: str, slow: bool) -> None:
    workspace = Local()
    workspace.waits, workspace.slow = True, slow
    command = session_at(tmp_path, workspace).exec("sleep 1000")
    if by == "anyio":
        with anyio.move_on_after(0.05):
            await command
    else:
        with pytest.raises((asyncio.TimeoutError, TimeoutError)):
            await asyncio.wait_for(command, 0.05)
    assert workspace.killed == 1


@pytest.mark.parametrize("by", ["anyio", "asyncio"])
async def test_a_workspace_that_comes_too_late_is_ended(by: str) -> None:
    ended: list[int] = []

    class Workspace:
        async def terminate(self) -> None:
            await anyio.sleep(0)
            ended.append(1)

    class Client:
        async def create(self, image: str | None, **_: Any) -> Workspace:
            await anyio.sleep(0.1)
            return Workspace()

    made = CoppiceSandboxClient(cast(Any, Client())).create()
    if by == "anyio":
        with anyio.move_on_after(0.05):
            await made
    else:
        with pytest.raises((asyncio.TimeoutError, TimeoutError)):
            await asyncio.wait_for(made, 0.05)
    assert ended == [1]


@pytest.mark.parametrize(("says", "given"), [(b"1000:1001\n", True), (b"0:0\n", False), (b"1:1 x\n", False), (b"", False)])
async def test_the_directory_is_given_to_the_user_of_the_image(tmp_path: Path, says: bytes, given: bool) -> None:
    workspace = Local()
    workspace.says = says
    await session_at(tmp_path, workspace)._prepare_backend_workspace()
    chown = [(words, user) for words, user in workspace.ran if words[0] == "chown"]
    assert chown == ([(["chown", "1000:1001", str(tmp_path)], "root")] if given else [])
    workspace.files.uid, workspace.ran = 1000, []
    await session_at(tmp_path, workspace)._prepare_backend_workspace()
    assert workspace.ran == []  # it is somebody's already


async def test_the_client_that_it_made_is_closed() -> None:
    closed: list[int] = []

    class Client:
        async def aclose(self) -> None:
            closed.append(1)

    given = CoppiceSandboxClient(cast(Any, Client()))
    await given.aclose()
    assert closed == []
    with pytest.MonkeyPatch.context() as m:
        m.setattr(openai_agents, "AsyncCoppice", Client)
        async with CoppiceSandboxClient():
            pass
    assert closed == [1]

"""Sessions of the OpenAI Agents SDK, on real machines."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
from agents.sandbox.entries import File
from agents.sandbox.errors import ExecTimeoutError, InvalidManifestPathError, WorkspaceReadNotFoundError
from agents.sandbox.manifest import Manifest
from agents.sandbox.session.sandbox_session import SandboxSession
from agents.sandbox.snapshot import LocalSnapshotSpec
from conftest import VMs
from coppice import AsyncCoppice
from coppice.adapters.openai_agents import LABEL, CoppiceSandboxClient, CoppiceSandboxClientOptions, inner_of, workspace_of

pytestmark = [pytest.mark.vms, pytest.mark.anyio]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def client(vms: VMs, anyio_backend: str) -> AsyncIterator[CoppiceSandboxClient]:
    async with AsyncCoppice(vms.url, vms.token) as c:
        yield CoppiceSandboxClient(c)
        assert [ws.id async for ws in c.workspaces(labels=[LABEL])] == []


@pytest.fixture(scope="module")
async def session(client: CoppiceSandboxClient) -> AsyncIterator[SandboxSession]:
    manifest = Manifest(entries={"notes/readme": File(content=b"from the manifest\n")})
    made = await client.create(manifest=manifest)
    async with made:
        yield made
    await client.delete(made)


async def test_commands(session: SandboxSession) -> None:
    done = await session.exec("echo out; echo err >&2; pwd; exit 7")
    assert (done.stdout, done.stderr, done.exit_code) == (b"out\n/workspace\n", b"err\n", 7)
    assert (await session.exec("printf", "%s", "a b", shell=False)).stdout == b"a b"
    assert (await session.exec("no-such-program", shell=False)).exit_code == 127
    assert (await session.exec("id", "-un", user="nobody")).stdout == b"nobody\n"
    assert len((await session.exec("head -c 3000000 /dev/zero")).stdout) == 3_000_000
    with pytest.raises(ExecTimeoutError):
        await session.exec("sleep 60", timeout=1)
    assert await session.running()


async def test_files(session: SandboxSession) -> None:
    assert (await session.read(Path("notes/readme"))).read() == b"from the manifest\n"
    data = bytes(range(256)) * 5000
    await session.write(Path("deep/er/f"), io.BytesIO(data))
    assert (await session.read(Path("deep/er/f"))).read() == data
    assert await session.read_bounded(Path("deep/er/f"), max_bytes=10) == data[:10]
    assert [Path(e.path).name for e in await session.ls("deep/er")] == ["f"]
    with pytest.raises(WorkspaceReadNotFoundError):
        await session.read(Path("none"))
    await session.exec("ln -s /etc escape")
    with pytest.raises(InvalidManifestPathError):
        await session.read(Path("escape/passwd"))  # the guest's links do not lead out of the working directory
    await session.exec("rm escape")


async def test_a_fork_is_a_session(client: CoppiceSandboxClient, session: SandboxSession) -> None:
    await session.write(Path("state"), io.BytesIO(b"parent"))
    forks = await workspace_of(session).fork(1)
    branch = await client.attach(forks[0])
    async with branch:
        assert (await branch.read(Path("state"))).read() == b"parent"
        await branch.write(Path("state"), io.BytesIO(b"child"))
    await client.delete(branch)
    assert (await session.read(Path("state"))).read() == b"parent"
    assert not await branch.running()


async def test_resume(client: CoppiceSandboxClient, tmp_path: Path) -> None:
    """A state leads back to its workspace, and after the end of that, its files come from the snapshot."""
    made = await client.create(snapshot=LocalSnapshotSpec(base_path=tmp_path), options=CoppiceSandboxClientOptions(ttl=3600))
    await made.start()
    await made.write(Path("kept"), io.BytesIO(b"kept"))
    tree = "mkdir -p v/bin && ln -s /usr/bin/python3 v/bin/python && echo 1 > v/one && ln v/one v/two && mkfifo v/pipe"
    assert (await made.exec(tree)).ok()
    await made.stop()  # writes the snapshot
    again = await client.resume(client.deserialize_session_state(client.serialize_session_state(made.state)))
    async with again:
        assert workspace_of(again).id == workspace_of(made).id
        assert (await again.read(Path("kept"))).read() == b"kept"
    state = client.deserialize_session_state(client.serialize_session_state(again.state))
    await client.delete(again)
    other = await client.resume(state)
    async with other:
        assert workspace_of(other).id != workspace_of(made).id
        assert (await other.read(Path("kept"))).read() == b"kept"
        there = await other.exec("readlink v/bin/python; cat v/two; test -e v/pipe || echo no pipe")
        assert there.stdout == b"/usr/bin/python3\n1\nno pipe\n"
    await client.delete(other)


async def test_a_checkpoint_as_the_beginning(client: CoppiceSandboxClient, session: SandboxSession) -> None:
    await session.exec("touch /prepared")
    node = await workspace_of(session).checkpoint()
    made = await client.create(options=CoppiceSandboxClientOptions(checkpoint=node.id))
    async with made:
        assert (await made.exec("test -e /prepared")).ok()
    await client.delete(made)


async def test_an_image_with_a_user(client: CoppiceSandboxClient) -> None:
    """The directory is the user's, and a snapshot has root's files. The guest reads the image's USER from a file."""
    async with await client.client.create() as ws:
        await ws.files.write("/etc/coppice/user", "www-data\n")
        node = await ws.checkpoint()
    made = await client.create(manifest=Manifest(root="/srv/work"), options=CoppiceSandboxClientOptions(checkpoint=node.id))
    async with made:
        done = await made.exec("id -un; echo mine > file && cat file")
        assert done.stdout == b"www-data\nmine\n", done.stderr
        await workspace_of(made).files.write("/srv/work/secret", "root's", mode=0o600)
        assert not (await made.exec("cat secret")).ok()
        with tarfile.open(fileobj=cast(Any, await inner_of(made).persist_workspace())) as tar:
            owners = {m.name: m.uname for m in tar}
        assert owners["./file"] == "www-data" and owners["./secret"] == "root"
    await client.delete(made)


def test_the_example(vms: VMs, examples: Path) -> None:
    program = examples / "frameworks" / "with_openai_agents.py"
    env = {"COPPICE_SERVER": vms.url, "COPPICE_TOKEN": vms.token}
    done = subprocess.run([sys.executable, program], env=env, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "fork 0: 42 Done.\nfork 1: 42 Done.\nthe first workspace has an answer: False\n", done.stdout

"""Harbor's own agents, and branching ones, on real machines."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from conftest import VMs
from coppice import AsyncCoppice, Coppice, errors
from coppice.adapters.harbor import LABEL, CoppiceEnvironment, image_name, listed
from harbor.environments.base import SandboxBuildFailedError
from harbor.models.task.config import EnvironmentConfig, NetworkMode, NetworkPolicy
from harbor.models.trial.paths import TrialPaths

pytestmark = [pytest.mark.vms, pytest.mark.anyio]

PROVIDER = "coppice.adapters.harbor:CoppiceEnvironment"


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", autouse=True)
def server(vms: VMs) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as m:
        m.setenv("COPPICE_SERVER", vms.url)
        m.setenv("COPPICE_TOKEN", vms.token)
        m.setenv("HARBOR_TELEMETRY", "0")
        yield
    with Coppice(vms.url, vms.token) as c:
        assert list(c.workspaces(labels=[LABEL])) == []


def environment(
    directory: Path, dockerfile: str, config: EnvironmentConfig | None = None, policy: NetworkPolicy | None = None
) -> CoppiceEnvironment:
    definition = directory / "environment"
    definition.mkdir(exist_ok=True)
    (definition / "Dockerfile").write_text(dockerfile)
    return CoppiceEnvironment(
        environment_dir=definition, environment_name="test", session_id="test__1__env", trial_paths=TrialPaths(directory / "trial"),
        task_env_config=config or EnvironmentConfig(), logger=logging.getLogger("test"),
        network_policy=policy or NetworkPolicy(network_mode=NetworkMode.NO_NETWORK),
    )


@pytest.fixture(scope="module")
async def env(vms: VMs, server: None, anyio_backend: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[CoppiceEnvironment]:
    config = EnvironmentConfig(env={"FROM_TASK": "yes"})
    one = environment(tmp_path_factory.mktemp("env"), "FROM base\nENV IN_IMAGE=yes\nWORKDIR /srv/work\n", config)
    await one.start(force_build=False)
    yield one
    await one.stop(delete=True)


async def test_commands(env: CoppiceEnvironment) -> None:
    done = await env.exec('echo "$FROM_TASK $IN_IMAGE $MINE $PWD"; [[ a == a ]] && echo no >&2; exit 7', env={"MINE": "yes"})
    assert (done.stdout, done.stderr, done.return_code) == ("yes yes yes /srv/work\n", "no\n", 7)
    assert (await env.exec("pwd; id -un", cwd="/tmp", user="nobody")).stdout == "/tmp\nnobody\n"
    assert (await env.exec("id -u", user=65534)).stdout == "65534\n"
    with env.with_default_user("nobody"):
        assert (await env.exec("id -un")).stdout == "nobody\n"
    long = await env.exec("seq 300000")
    assert long.stdout is not None and len(long.stdout) > 1 << 20 and long.stdout.startswith("1\n")
    much = await env.exec(f": {'x' * (200 << 10)}; id -un", user="nobody")  # more than one argument may have
    assert much.stdout == "nobody\n", much.stderr
    refused = await env.exec("true", user="nobody-of-this-name")
    assert refused.return_code == 126 and refused.stderr
    with pytest.raises(RuntimeError, match="after 2 seconds"):
        await env.exec("sleep 600", timeout_sec=2)


async def test_a_cancelled_command_is_killed(env: CoppiceEnvironment) -> None:
    """So an agent that Harbor stops after its time leaves nothing running for the verifier."""
    task = asyncio.create_task(env.exec("touch /tmp/begun; exec sleep 4242"))
    end = time.monotonic() + 60
    while not await env.is_file("/tmp/begun"):
        assert time.monotonic() < end
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await env.exec("pgrep -f 'slee[p] 4242'")).return_code == 1


async def test_output_as_it_comes(env: CoppiceEnvironment) -> None:
    seen: list[tuple[str, str]] = []

    async def tell(text: str, stream: str) -> None:
        seen.append((stream, text))

    with env.scoped_output_callback(tell):
        await env.exec("echo one; echo two >&2")
    assert sorted(seen) == [("stderr", "two\n"), ("stdout", "one\n")]


async def test_files(env: CoppiceEnvironment, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "a").write_bytes(bytes(range(256)))
    (source / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (source / "run.sh").chmod(0o755)
    await env.upload_dir(source, "/new/place")
    assert (await env.exec("/new/place/run.sh")).stdout == "ran\n"
    await env.upload_file(source / "run.sh", "/other/place/run.sh")
    assert await env.is_file("/other/place/run.sh") and await env.is_dir("/other/place") and not await env.is_dir("/none")
    await env.download_dir("/new/place", tmp_path / "target")
    assert (tmp_path / "target" / "deep" / "a").read_bytes() == bytes(range(256))
    await env.download_file("/new/place/run.sh", tmp_path / "there" / "run")
    assert (tmp_path / "there" / "run").read_text() == "#!/bin/sh\necho ran\n"
    await env.download_dir_with_exclusions(source_dir="/new/place", target_dir=tmp_path / "part", exclude=["deep"])
    assert [p.name for p in (tmp_path / "part").rglob("*")] == ["run.sh"]
    with pytest.raises(errors.FileNotFound):
        await env.download_file("/none", tmp_path / "none")


async def test_branches(env: CoppiceEnvironment) -> None:
    await env.exec("echo 0 >/state; setsid sleep 31337 >/dev/null 2>&1 &")
    node = await env.checkpoint()
    async with env.branch(2) as branches:
        for n, branch in enumerate(branches):
            await branch.exec(f"echo {n} >>/state")
        assert [(await b.exec("cat /state")).stdout for b in branches] == ["0\n0\n", "0\n1\n"]
        assert (await branches[1].exec("pgrep -f 'slee[p] 31337'")).return_code == 0  # programs are in it, too
        before = env.workspace.id
        await env.adopt(branches[1])
    assert (await env.exec("cat /state")).stdout == "0\n1\n" and env.workspace.id == before
    await env.restore(node)
    assert (await env.exec("cat /state")).stdout == "0\n"
    async with AsyncCoppice() as c:
        assert [ws.id async for ws in c.workspaces(labels=[LABEL])] == [before]


async def test_network(env: CoppiceEnvironment) -> None:
    async def reachable() -> list[str]:
        return list((await env.workspace.refresh()).info.network.allow or [])

    assert await reachable() == []
    await env.set_network_policy(NetworkPolicy(network_mode=NetworkMode.ALLOWLIST, allowed_hosts=["example.com", "*.example.org"]))
    assert sorted(await reachable()) == ["*.example.org", "example.com"]
    await env.set_network_policy(NetworkPolicy(network_mode=NetworkMode.PUBLIC))
    assert "bundle:python" in await reachable()
    await env.set_network_policy(NetworkPolicy(network_mode=NetworkMode.NO_NETWORK))
    assert await reachable() == []


async def test_a_build_that_fails(vms: VMs, tmp_path: Path) -> None:
    with pytest.raises(SandboxBuildFailedError, match="line 2"):
        await environment(tmp_path, "FROM base\nVOLUME /x\n").start(force_build=False)
    with pytest.raises(SandboxBuildFailedError):
        await environment(tmp_path, "FROM base\nRUN exit 3\n").start(force_build=False)


async def test_without_delete_it_is_suspended(vms: VMs, tmp_path: Path) -> None:
    one = environment(tmp_path, "FROM base\nENV IN_IMAGE=yes\nWORKDIR /srv/work\n")
    await one.start(force_build=False)
    await one.exec("echo kept >/kept")
    kept = one.workspace.id
    await one.stop(delete=False)
    await one.stop(delete=True)  # a second one does nothing
    async with AsyncCoppice() as c:
        ws = await c.workspace(kept)
        assert ws.info.state == "suspended"
        await ws.resume()
        assert await ws.files.read_text("/kept") == "kept\n"
        await ws.terminate()


def test_names() -> None:
    assert re.fullmatch("harbor-some-task-x-[0-9a-f]{16}", image_name("org/Some_Task..X", "a", "b"))
    assert image_name("t", "a", "b") != image_name("t", "a", "c")
    assert len(image_name("t" * 200, "a")) <= 63 and image_name("...", "a").startswith("harbor-")
    assert listed("a.example, bundle:python") == ("a.example", "bundle:python") == listed(["a.example", "bundle:python"])


def test_a_task_of_several_containers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "environment").mkdir()
    (tmp_path / "environment" / "docker-compose.yaml").write_text("services: {}\n")
    with pytest.raises(ValueError, match="one machine"):
        CoppiceEnvironment(
            environment_dir=tmp_path / "environment", environment_name="test", session_id="s",
            trial_paths=TrialPaths(tmp_path / "trial"), task_env_config=EnvironmentConfig(),
        )


def test_the_oracle_solves_all_tasks(vms: VMs, examples: Path, tmp_path: Path) -> None:
    """By the command line, as people run it. An agent that does nothing solves none of them."""
    tasks = examples / "frameworks" / "harbor_tasks"
    for agent, reward in (("oracle", 1.0), ("nop", 0.0)):
        done = subprocess.run(
            [
                Path(sys.executable).parent / "harbor", "run", "-p", tasks, "-a", agent, "-e", PROVIDER, "-o", tmp_path,
                "--job-name", agent, "-q", "-y",
            ],
            cwd=tmp_path, text=True, capture_output=True, timeout=500, env={**os.environ, "HOME": str(tmp_path)},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        found = {}
        for path in (tmp_path / agent).glob("*/result.json"):
            trial = json.loads(path.read_text())
            assert trial["exception_info"] is None, trial["exception_info"]
            found[path.parent.name.split("__")[0]] = trial["verifier_result"]["rewards"]["reward"]
        assert found == dict.fromkeys((p.name for p in tasks.iterdir()), reward) and len(found) == 3, found


def test_a_branching_agent_does_better(vms: VMs, examples: Path, tmp_path: Path) -> None:
    program = examples / "frameworks" / "with_harbor.py"
    done = subprocess.run([sys.executable, program], cwd=tmp_path, text=True, capture_output=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("single: 0.1\nbranching: 1.0\n"), done.stdout

"""Inspect's own checks of a sandbox, on real machines, as root and as another user; and an evaluation."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import VMs
from coppice import AsyncCoppice, Coppice
from coppice.adapters.inspect_ai import LABEL, CoppiceConfig, CoppiceSandboxEnvironment, config_of
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.util import ExecResult, SandboxEnvironment, SandboxEnvironmentSpec, sandbox
from inspect_ai.util._sandbox.environment import resolve_sandbox_environment
from inspect_ai.util._sandbox.registry import registry_find_sandboxenv
from inspect_ai.util._sandbox.self_check import *  # noqa: F403

pytestmark = [pytest.mark.vms, pytest.mark.anyio]

USER = "useradd --create-home agent"
CONFIGS = {"root": CoppiceConfig(), "user": CoppiceConfig(setup=USER, user="agent", cwd="/home/agent/work")}

# What a sandbox as root cannot fail at: root may read and write everything.
ROOT_MAY = {
    "test_read_file_not_allowed", "test_write_text_file_without_permissions", "test_write_binary_file_without_permissions",
}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def server(vms: VMs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COPPICE_SERVER", vms.url)
    monkeypatch.setenv("COPPICE_TOKEN", vms.token)


@pytest.fixture(scope="module", params=CONFIGS)
async def one(request: pytest.FixtureRequest, vms: VMs, anyio_backend: str) -> AsyncIterator[CoppiceSandboxEnvironment]:
    with pytest.MonkeyPatch.context() as m:
        m.setenv("COPPICE_SERVER", vms.url)
        m.setenv("COPPICE_TOKEN", vms.token)
        config = CONFIGS[request.param]
        await CoppiceSandboxEnvironment.task_init("self-check", config)
        made = await CoppiceSandboxEnvironment.sample_init("self-check", config, {})
        yield made["default"].as_type(CoppiceSandboxEnvironment)
        await CoppiceSandboxEnvironment.sample_cleanup("self-check", config, made, False)
        await CoppiceSandboxEnvironment.task_cleanup("self-check", config, True)
    async with AsyncCoppice(vms.url, vms.token) as c:
        assert [ws.id async for ws in c.workspaces(labels=[LABEL])] == []
        assert [n.id async for n in c.checkpoints(labels=[LABEL])] == []


@pytest.fixture
def sandbox_env(request: pytest.FixtureRequest, one: CoppiceSandboxEnvironment) -> SandboxEnvironment:
    if one.config.user is None and request.node.originalname in ROOT_MAY:
        request.applymarker(pytest.mark.xfail(strict=True, reason="root may"))
    if request.node.originalname == "test_exec_as_user":
        return Patient(one.client, one.workspace, one.config)
    return one


class Patient(CoppiceSandboxEnvironment):
    """Gives commands ten times as long: adduser, a program in Perl, takes more than its ten seconds in an emulated machine."""

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
        return await super().exec(cmd, input, cwd, env, user, timeout and 10 * timeout, timeout_retry, concurrency)


async def test_long_output(sandbox_env: SandboxEnvironment) -> None:
    """More than the last MiB, which the answer to an exec has."""
    result = await sandbox_env.exec(["sh", "-c", "seq 300000; seq 10 >&2"])
    assert result.stdout == "".join(f"{n}\n" for n in range(1, 300_001)) and len(result.stderr) == 21
    result = await sandbox_env.exec(["sh", "-c", "head -c 12000000 /dev/zero | tr '\\0' x; echo end"])
    assert len(result.stdout) == 10 << 20 and result.stdout.endswith("xend\n")  # the trailing portion


async def test_programs_that_are_missing(sandbox_env: SandboxEnvironment) -> None:
    result = await sandbox_env.exec(["no-such-program"])
    assert result.returncode == 127 and "no-such-program" in result.stderr
    result = await sandbox_env.exec(["true", "x" * (130 << 10)])  # more than one argument may have
    assert result.returncode == 126 and "131072" in result.stderr
    result = await sandbox_env.exec(["head", "-c", "1"], input="x" * (3 << 20))  # it reads little of its input
    assert result.success and result.stdout == "x"


def test_registered() -> None:
    assert registry_find_sandboxenv("coppice") is CoppiceSandboxEnvironment
    spec = resolve_sandbox_environment(("coppice", "ckpt_x"))
    assert spec is not None and config_of(spec.config) == CoppiceConfig(checkpoint="ckpt_x")
    again = SandboxEnvironmentSpec.model_validate(SandboxEnvironmentSpec("coppice", CONFIGS["user"]).model_dump())
    assert again.config == CONFIGS["user"]


async def test_an_image_with_a_user(vms: VMs) -> None:
    """Root sets up, and the directory is the user's. The guest reads the image's USER from a file, at each start of a program."""
    async with AsyncCoppice(vms.url, vms.token) as c, await c.create() as ws:
        await ws.files.write("/etc/coppice/user", "www-data\n")
        node = await ws.checkpoint()
    config = CoppiceConfig(checkpoint=node.id, setup="id -un > /who", cwd="/srv/work")
    await CoppiceSandboxEnvironment.task_init("user", config)
    made = await CoppiceSandboxEnvironment.sample_init("user", config, {})
    try:
        assert await made["default"].read_file("/who") == "root\n"
        done = await made["default"].exec(["sh", "-c", "id -un; pwd; echo mine > file && cat file"])
        assert done.stdout == "www-data\n/srv/work\nmine\n", done.stderr
        long = await made["default"].exec(["printf", "%.0s"] + ["x"] * (150 << 10))  # too long for a request
        assert long.success, long.stderr
    finally:
        await CoppiceSandboxEnvironment.sample_cleanup("user", config, made, False)
        await CoppiceSandboxEnvironment.task_cleanup("user", config, True)
    async with AsyncCoppice(vms.url, vms.token) as c:
        await (await c.checkpoint(node.id)).delete()


@solver
def visitor() -> Solver:
    """Leaves a mark, and fails if an earlier sample or epoch has left one."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        assert await sandbox().read_file("/prepared") == "once\n"
        assert not (await sandbox().exec(["test", "-e", "/mark"])).success
        await sandbox().write_file("/mark", "seen")
        state.output.completion = (await sandbox().exec(["cat", "/etc/machine-id"])).stdout
        return state

    return solve


def evaluated(task: Task, log_dir: Path, epochs: int) -> EvalLog:
    """Evaluates in a thread of its own: the loop of the fixtures runs in this one."""
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(eval, task, model="mockllm/model", epochs=epochs, log_dir=str(log_dir), display="none")
        return run.result()[0]


def left(vms: VMs) -> set[str]:
    """The workspaces and checkpoints of evaluations. A sandbox of the fixtures may be among them."""
    with Coppice(vms.url, vms.token) as c:
        return {ws.id for ws in c.workspaces(labels=[LABEL])} | {n.id for n in c.checkpoints(labels=[LABEL])}


def test_every_epoch_is_a_fork(vms: VMs, tmp_path: Path) -> None:
    before = left(vms)
    config = CoppiceConfig(setup="echo once >> /prepared")
    task = Task(dataset=[Sample("a"), Sample("b")], solver=visitor(), sandbox=SandboxEnvironmentSpec("coppice", config))
    log = evaluated(task, tmp_path, epochs=2)
    assert log.status == "success", log.error
    assert log.samples is not None and len({s.output.completion for s in log.samples}) == 4
    assert left(vms) == before


def test_a_setup_that_fails(vms: VMs, tmp_path: Path) -> None:
    before = left(vms)
    config = CoppiceConfig(setup="echo no >&2; exit 3")
    task = Task(dataset=[Sample("a")], solver=visitor(), sandbox=SandboxEnvironmentSpec("coppice", config))
    with pytest.raises(RuntimeError, match="status 3: no"):
        evaluated(task, tmp_path, epochs=1)
    assert left(vms) == before


def test_the_example(vms: VMs, examples: Path, tmp_path: Path) -> None:
    program = examples / "frameworks" / "with_inspect_ai.py"
    done = subprocess.run([sys.executable, program], cwd=tmp_path, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("4 of 4 samples passed\n"), done.stdout

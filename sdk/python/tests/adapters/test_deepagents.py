"""The tools of a deep agent, on a real machine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from conftest import VMs
from coppice import Coppice, errors
from coppice.adapters.deepagents import CoppiceBackend

pytestmark = pytest.mark.vms


@pytest.fixture(scope="module")
def backend(vms: VMs) -> Iterator[CoppiceBackend]:
    with Coppice(vms.url, vms.token) as c, c.create() as ws:
        yield CoppiceBackend(ws)


def test_commands(backend: CoppiceBackend) -> None:
    done = backend.execute("echo one; echo two >&2; echo three; exit 7")
    assert (done.output, done.exit_code, done.truncated) == ("one\ntwo\nthree\n", 7, False)
    assert backend.execute("[[ a == a ]] && echo \"it's bash\"").output == "it's bash\n"
    late = backend.execute("echo begun; sleep 600", timeout=5)
    assert late.exit_code == 124 and late.output.startswith("begun\n") and "after 5 seconds" in late.output
    assert backend.execute("echo", timeout=0).exit_code == 0
    long = backend.execute("seq 300000")
    assert long.truncated and long.output.endswith("300000\n") and len(long.output) == 1 << 20
    assert backend.id.startswith("ws_")
    refused = backend.execute(": " + "x" * (130 << 10))  # more than one argument may have
    assert refused.exit_code == 126 and "131072" in refused.output
    assert CoppiceBackend(backend.workspace, user="nobody-of-this-name").execute("id").exit_code == 126


class Refusing:
    def __init__(self, problem: errors.CoppiceError) -> None:
        self.problem = problem

    def run(self, *_: Any, **__: Any) -> Any:
        raise self.problem


def test_refusals_are_for_the_agent_and_failures_are_not() -> None:
    refusal = errors.CommandNotStarted("sh: the arguments are too long", code="COMMAND_NOT_STARTED", status=409)
    done = CoppiceBackend(cast(Any, Refusing(refusal))).execute("id")
    assert done.exit_code == 126 and "too long" in done.output
    for failure in (errors.ConnectionFailedError("gone"), errors.Internal("x", code="INTERNAL", status=500)):
        with pytest.raises(type(failure)):
            CoppiceBackend(cast(Any, Refusing(failure))).execute("id")


def test_files(backend: CoppiceBackend) -> None:
    binary = bytes(range(256)) * 5000
    answers = backend.upload_files([("/data/a", binary), ("relative", b""), ("/etc", b""), ("/etc/passwd/x", b"")])
    assert [a.error for a in answers[:3]] == [None, "invalid_path", "is_directory"] and answers[3].error
    found = backend.download_files(["/data/a", "/none", "/etc", "relative"])
    assert [f.error for f in found] == [None, "file_not_found", "is_directory", "invalid_path"]
    assert found[0].content == binary and found[1].content is None


def test_another_user(backend: CoppiceBackend) -> None:
    other = CoppiceBackend(backend.workspace, user="nobody")
    assert other.execute("id -un").output == "nobody\n"
    assert [f.error for f in other.download_files(["/etc/shadow"])] == ["permission_denied"]
    assert [f.error for f in other.upload_files([("/etc/x", b"")])] == ["permission_denied"]


def test_derived_tools(backend: CoppiceBackend) -> None:
    """What deepagents makes of commands that run in the guest: they need its python3."""
    assert backend.write("/srv/work/a.py", "x = 1\ny = 2\n").error is None
    read = backend.read("/srv/work/a.py")
    assert read.error is None and read.file_data is not None and "y = 2" in read.file_data["content"]
    assert backend.edit("/srv/work/a.py", "y = 2", "y = 3").error is None
    assert backend.edit("/srv/work/a.py", "not there", "y").error
    assert backend.edit("/srv/work/a.py", "x = 1", "z" * 100_000).error is None  # too long for a command
    listed = backend.ls("/srv/work")
    assert listed.entries is not None and [e["path"].rstrip("/") for e in listed.entries] == ["/srv/work/a.py"]
    assert [m["path"] for m in backend.grep("y = 3", "/srv/work").matches or []] == ["/srv/work/a.py"]
    assert [m["path"] for m in backend.glob("*.py", "/srv/work").matches or []] == ["/srv/work/a.py"]


def test_forks(backend: CoppiceBackend) -> None:
    backend.upload_files([("/state", b"0")])
    node = backend.checkpoint()
    forks = backend.fork(2)
    for n, fork in enumerate(forks):
        fork.execute(f"echo -n {n} >> /state")
    assert [f.download_files(["/state"])[0].content for f in forks] == [b"00", b"01"]
    for fork in forks:
        fork.workspace.terminate()
    backend.execute("rm /state")
    backend.restore(node)
    assert backend.download_files(["/state"])[0].content == b"0"


def test_the_example(vms: VMs, examples: Path) -> None:
    done = subprocess.run(
        [sys.executable, examples / "frameworks" / "with_deepagents.py"], text=True, capture_output=True, timeout=300,
        env={"COPPICE_SERVER": vms.url, "COPPICE_TOKEN": vms.token, "LANGSMITH_TRACING": "false"},
    )
    assert done.returncode == 0, done.stderr
    assert "tool: right\n" in done.stdout and "ai: It is repaired.\n" in done.stdout, done.stdout
    assert done.stdout.endswith("changed: /workspace/double.py\nrolled back: True\n"), done.stdout

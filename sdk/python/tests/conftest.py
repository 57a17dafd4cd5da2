from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest
from coppice import Config, Coppice
from double import Double


@pytest.fixture
def double() -> Iterator[Double]:
    d = Double()
    yield d
    d.close()


@pytest.fixture
def client(double: Double) -> Iterator[Coppice]:
    with Coppice(config=Config(server=double.url, token="key_secret", max_pause=0.01)) as c:
        yield c


@dataclass
class Live:
    """A controller with a real database and a runner without virtual machines; internal/test/sdkserver."""

    url: str
    token: str
    image: str
    commands: IO[str]
    answers: IO[str]

    def restart(self) -> None:
        self.commands.write("restart\n")
        self.commands.flush()
        assert json.loads(self.answers.readline())["url"] == self.url


@pytest.fixture(scope="session")
def live() -> Iterator[Live]:
    program = os.environ.get("COPPICE_SDKSERVER")
    if not program:
        pytest.skip("COPPICE_SDKSERVER is not set: run sdk/python/test, which builds that program")
    with subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None and server.stdout is not None
        first = server.stdout.readline()
        assert first, "the server ended before it was ready"
        yield Live(**json.loads(first), commands=server.stdin, answers=server.stdout)
        server.stdin.close()
        assert server.wait(timeout=300) == 0


@pytest.fixture
def coppice(live: Live) -> Iterator[Coppice]:
    with Coppice(live.url, live.token) as c:
        yield c


@dataclass
class VMs:
    """A server with virtual machines: a `coppice dev` that sdk/python/test starts once for all tests."""

    url: str
    token: str


@pytest.fixture(scope="session")
def vms() -> VMs:
    url, token = os.environ.get("VMS_SERVER"), os.environ.get("VMS_TOKEN")
    if not url or not token:
        pytest.skip("VMS_SERVER and VMS_TOKEN are not set: run sdk/python/test, which starts a server")
    return VMs(url, token)


@pytest.fixture
def examples() -> Path:
    """The directory of the examples."""
    return Path(os.environ.get("COPPICE_EXAMPLES", Path(__file__).parents[3] / "examples/python"))

"""What the sandboxes of Inspect ask of a server, and what a cancelled sample leaves. No server takes part."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import pytest
from coppice import Result, errors
from coppice.adapters import inspect_ai
from coppice.adapters.inspect_ai import CoppiceConfig, CoppiceSandboxEnvironment

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def turns() -> None:
    """Waits as a request does: a cancelled scope that is not shielded ends here."""
    for _ in range(3):
        await anyio.sleep(0)


class World:
    """Stands in for the client and for what it makes. `before` runs before each call, and may cancel."""

    def __init__(self, id_says: str = "0:0\n", before: Callable[[str], None] = lambda call: None) -> None:
        self.calls: list[str] = []
        self.ran: list[tuple[Any, str | None]] = []
        self.left: set[str] = set()
        self.clients = 0
        self.stuck: set[str] = set()
        self.id_says = id_says
        self.before = before
        self.start_error: Exception | None = None

    def client(self) -> Client:
        self.clients += 1
        return Client(self)

    async def call(self, name: str) -> None:
        self.calls.append(name)
        self.before(name)
        await turns()

    def new(self, kind: str) -> str:
        name = f"{kind}{sum(c == kind for c in self.calls)}"
        self.left.add(name)
        return name

    async def remove(self, name: str) -> None:
        await self.call("remove " + name)
        if name in self.stuck:
            raise errors.WorkspaceNotReady("it does not end", code="WORKSPACE_NOT_READY", status=409)
        self.left.remove(name)


class Client:
    def __init__(self, world: World) -> None:
        self.world = world

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await turns()
        self.world.clients -= 1

    async def create(self, image: str | None, **_: Any) -> Machine:
        await self.world.call("create")
        return Machine(self.world, self.world.new("create"))

    async def checkpoint(self, id: str) -> Thing:
        return Thing(self.world, id)

    async def workspaces(self, labels: list[str]) -> AsyncIterator[Machine]:
        for name in sorted(n for n in self.world.left if n.startswith("create")):
            yield Machine(self.world, name)

    async def checkpoints(self, labels: list[str]) -> AsyncIterator[Thing]:
        for name in sorted(n for n in self.world.left if n.startswith("checkpoint")):
            yield Thing(self.world, name)


class Thing:
    """A checkpoint, or a session."""

    def __init__(self, world: World, id: str) -> None:
        self.world, self.id, self.name = world, id, id

    async def delete(self) -> None:
        await self.world.remove(self.id)

    async def fork(self, count: int, **_: Any) -> list[Machine]:
        return [await Client(self.world).create(None)]

    async def result(self, limit: int) -> Result:
        await self.world.call("result")
        return Result("x", 0, b"", b"")


class Machine:
    def __init__(self, world: World, id: str) -> None:
        self.world, self.id, self.name, self.files = world, id, id, self

    async def mkdir(self, path: str, parents: bool) -> None:
        await self.world.call("mkdir")

    async def write(self, path: str, data: bytes, *, mode: int, user: str | None) -> None:
        self.world.ran.append((f"write {mode:o}", user))

    async def run(self, command: Any, *, user: str | None = None, **_: Any) -> Result:
        await self.world.call("run")
        self.world.ran.append((command, user))
        return Result("x", 0, self.world.id_says.encode() if "id -u" in str(command) else b"", b"")

    async def start(self, command: list[str], **_: Any) -> Thing:
        if self.world.start_error is not None:
            raise self.world.start_error
        await self.world.call("session")
        return Thing(self.world, self.world.new("session"))

    async def checkpoint(self, labels: dict[str, str]) -> Thing:
        await self.world.call("checkpoint")
        return Thing(self.world, self.world.new("checkpoint"))

    async def terminate(self) -> None:
        await self.world.remove(self.id)


def at(when: str, scope: anyio.CancelScope) -> Callable[[str], None]:
    """Cancels at a call."""

    def check(call: str) -> None:
        if call == when:
            scope.cancel()

    return check


@pytest.fixture
def in_world(monkeypatch: pytest.MonkeyPatch) -> Callable[[World], World]:
    def enter(world: World) -> World:
        monkeypatch.setattr(inspect_ai, "AsyncCoppice", world.client)
        monkeypatch.setattr(CoppiceSandboxEnvironment, "prepared", {})
        return world

    return enter


async def test_root_sets_up_for_the_user_of_the_image(in_world: Callable[[World], World]) -> None:
    world = in_world(World(id_says="1000:1001\n"))
    config = CoppiceConfig(setup="make install")
    await CoppiceSandboxEnvironment.task_init("t", config)
    assert world.ran == [("make install", "root")]
    await CoppiceSandboxEnvironment.sample_init("t", config, {})
    assert world.ran[-2][1] is None  # asked as the image's user
    assert world.ran[-1] == (["chown", "1000:1001", "/workspace"], "root")


@pytest.mark.parametrize("id_says", ["0:0\n", "", "root\n", "1:1 --reference=/etc/shadow\n"])
async def test_the_directory_stays_that_of_root(in_world: Callable[[World], World], id_says: str) -> None:
    world = in_world(World(id_says=id_says))
    await CoppiceSandboxEnvironment.sample_init("t", None, {})
    assert [c for c, _ in world.ran if "chown" in c] == []


async def test_one_setup_for_a_configuration(in_world: Callable[[World], World]) -> None:
    world = in_world(World())
    config = CoppiceConfig(setup="true")
    for _ in range(3):  # for each directory and each environment
        await CoppiceSandboxEnvironment.task_init("t", config)
    assert world.left == {"checkpoint1"} and world.clients == 0
    for _ in range(3):
        await CoppiceSandboxEnvironment.task_cleanup("t", config, True)
    assert world.left == set() and world.clients == 0


@pytest.mark.parametrize("when", ["create", "run", "checkpoint", "remove create1"])  # the last is after the checkpoint
async def test_a_cancelled_setup_leaves_no_workspace(in_world: Callable[[World], World], when: str) -> None:
    with anyio.CancelScope() as scope:
        world = in_world(World(before=at(when, scope)))
        await CoppiceSandboxEnvironment.task_init("t", CoppiceConfig(setup="true"))
        await anyio.sleep(0)
    assert scope.cancelled_caught and when in world.calls
    assert world.left == ({"checkpoint1"} if when == "remove create1" else set())
    assert world.left == set(CoppiceSandboxEnvironment.prepared.values()) and world.clients == 0


@pytest.mark.parametrize("when", ["create", "mkdir", "run"])
async def test_a_cancelled_sample_leaves_no_workspace(in_world: Callable[[World], World], when: str) -> None:
    with anyio.CancelScope() as scope:
        world = in_world(World(before=at(when, scope)))
        await CoppiceSandboxEnvironment.sample_init("t", None, {})
    assert scope.cancelled_caught and world.left == set() and world.clients == 0


async def test_a_cancelled_cleanup_ends_the_workspace(in_world: Callable[[World], World]) -> None:
    world = in_world(World())
    made = await CoppiceSandboxEnvironment.sample_init("t", None, {})
    with anyio.CancelScope() as scope:
        scope.cancel()
        await CoppiceSandboxEnvironment.sample_cleanup("t", None, made, True)
    assert world.left == set() and world.clients == 0


@pytest.mark.parametrize("when", ["session", "result"])
async def test_a_cancelled_command_is_killed(in_world: Callable[[World], World], when: str) -> None:
    world = in_world(World())
    one = (await CoppiceSandboxEnvironment.sample_init("t", None, {}))["default"]
    with anyio.CancelScope() as scope:
        world.before = at(when, scope)
        await one.exec(["sleep", "1000"])
    assert scope.cancelled_caught and world.left == {"create1"}


async def test_the_end_of_all(in_world: Callable[[World], World], capsys: pytest.CaptureFixture[str]) -> None:
    """One that does not end keeps none of the others."""
    world = in_world(World())
    await CoppiceSandboxEnvironment.task_init("t", CoppiceConfig(setup="true"))
    for _ in range(3):
        await CoppiceSandboxEnvironment.sample_init("t", None, {})
    first = min(n for n in world.left if n.startswith("create"))
    world.stuck = {first}
    with pytest.raises(RuntimeError, match="1 of 4 "):
        await CoppiceSandboxEnvironment.cli_cleanup(None)
    assert world.left == {first} and first in capsys.readouterr().err
    world.stuck = set()
    await CoppiceSandboxEnvironment.cli_cleanup(first)
    assert world.left == set()


async def test_a_long_command_is_a_file_of_who_runs_it(in_world: Callable[[World], World]) -> None:
    world = in_world(World(id_says="1000:1001\n"))
    one = (await CoppiceSandboxEnvironment.sample_init("t", None, {}))["default"]
    await one.exec(["x"] * (200 << 10))
    await one.exec(["x"] * (200 << 10), user="other")
    assert world.ran[-2:] == [("write 600", "1000:1001"), ("write 600", "other")]


async def test_what_the_guest_does_not_run(in_world: Callable[[World], World]) -> None:
    world = in_world(World())
    one = (await CoppiceSandboxEnvironment.sample_init("t", None, {}))["default"]
    world.start_error = errors.CommandNotStarted("x: the arguments and the environment are too long", code="COMMAND_NOT_STARTED")
    result = await one.exec(["x", "y" * (130 << 10)])
    assert result.returncode == 126 and "too long" in result.stderr
    world.start_error = errors.CommandNotStarted("x: not permitted to run", code="COMMAND_NOT_STARTED")
    with pytest.raises(PermissionError):
        await one.exec(["x"])

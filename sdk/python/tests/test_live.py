"""The client against a live controller: a real database, and a runner without virtual machines."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Live
from coppice import AsyncCoppice, Coppice, Workspace, errors

pytestmark = pytest.mark.live


@pytest.fixture
def ws(coppice: Coppice, live: Live) -> Iterator[Workspace]:
    with coppice.create(live.image) as ws:
        yield ws


def score(result: object) -> int:
    return len(str(result))


def test_the_first_page(coppice: Coppice) -> None:
    ws = coppice.create("base")
    ws.run("echo installed")
    node = ws.checkpoint("before")
    best = max(node.fork(8), key=lambda child: score(child.run(["echo", "x" * int(child.name[-1], 36)])))
    assert best.name in {w.name for w in coppice.workspaces(parent_checkpoint_id=node.id)}
    assert len(list(coppice.workspaces(parent_checkpoint_id=node.id))) == 8
    with pytest.raises(errors.NameTaken):
        ws.checkpoint("before")


def test_programs(ws: Workspace) -> None:
    assert ws.run("echo hello").stdout == "hello\n"
    assert ws.run(["err", "bad"]).stderr == "bad\n"
    assert ws.run("exit 7").exit_code == 7
    assert ws.run("cat", stdin="in ü").stdout == "in ü"
    assert ws.run("cat", stdin=b"\xff\0").stdout_bytes == b"\xff\0"
    assert "A=1\n" in ws.run("env", env={"A": "1"}).stdout
    with pytest.raises(errors.CommandFailed):
        ws.run("false", check=True)
    with pytest.raises(errors.CommandNotFound):
        ws.run(["nosuch"])
    late = ws.run("sleep 3600", timeout=0.2)
    assert late.timed_out and not late.ok


def test_a_key_runs_a_program_once(ws: Workspace) -> None:
    first = ws.run("echo once", idempotency_key=f"once-{ws.id}")
    again = ws.run("echo once", idempotency_key=f"once-{ws.id}")
    assert first.session_id == again.session_id
    with pytest.raises(errors.IdempotencyMismatch):
        ws.run("echo other", idempotency_key=f"once-{ws.id}")


def test_streams(ws: Workspace) -> None:
    out: list[str] = []
    err: list[str] = []
    result = ws.run("echo streamed", on_stdout=out.append)
    assert "".join(out) == result.stdout == "streamed\n" and result.ok
    ws.run("err streamed", on_stderr=err.append)
    assert "".join(err) == "streamed\n"
    big = ws.run("fill 3000000", on_stdout=lambda _: None)
    assert len(big.stdout_bytes) == 1 << 20 and big.stdout_truncated
    session = ws.start("fill 3000000")
    assert sum(len(p.data) for p in session.stream()) == 3_000_000
    assert session.exit_code == 0


def test_standard_input_and_terminal(ws: Workspace) -> None:
    session = ws.start("cat", stdin_open=True, pty=(100, 30))
    session.write("one ")
    with session.attach() as terminal:
        terminal.resize(120, 40)
        terminal.write("two")
        terminal.close_stdin()
        seen = b""
        while (message := terminal.receive()) is not None:
            if hasattr(message, "data"):
                seen += message.data
            elif message.type == "exit":
                break
    assert seen == b"one two" and session.wait() == 0
    assert session.output()[0] == b"one two"
    running = ws.start("sleep 3600")
    with pytest.raises(errors.WaitTimeout):
        running.wait(timeout=0.1)
    assert running.id in {s.id for s in ws.sessions()}
    running.signal("SIGTERM")
    assert running.wait() == 143
    running.delete()
    with pytest.raises(errors.SessionNotFound):
        running.refresh()


def test_a_deadline(ws: Workspace) -> None:
    session = ws.start("sleep 3600")
    session.set_deadline(None)
    session.set_deadline(0.1)
    assert session.wait() == 137 and session.info.timed_out


def test_work_with_files(ws: Workspace) -> None:
    files = ws.files
    made = files.mkdir("/root/a/b", parents=True)
    assert made.created and made.file.type == "dir" and not files.mkdir("/root/a/b", parents=True).created
    with pytest.raises(errors.FileConflict):
        files.mkdir("/root/a/b")
    files.write("/root/a/f", "text")
    assert files.rename("/root/a/f", "/root/a/b/g").path == "/root/a/b/g" and files.read_text("/root/a/b/g") == "text"
    files.write("/root/a/f", "other")
    with pytest.raises(errors.FileConflict):
        files.rename("/root/a/f", "/root/a/b/g", no_replace=True)
    files.set_attributes("/root/a/f", set={"user.a": "1", "user.b": "2"})
    assert files.set_attributes("/root/a/f", remove=["user.a"]).xattrs == {"user.b": "2"}


def test_watches(ws: Workspace) -> None:
    ws.files.mkdir("/root/w")
    watch = ws.watches.create("/root/w", recursive=True)
    assert watch.path == "/root/w" and watch.recursive and [w.id for w in ws.watches.list()] == [watch.id]
    ws.files.mkdir("/root/w/a")
    ws.files.rename("/root/w/a", "/root/w/b")
    kept = [(e.seq, e.type, e.path) for e in ws.watches.events(watch.id)]
    assert kept == [(1, "create", "/root/w/a"), (2, "rename", "/root/w/a"), (3, "create", "/root/w/b")]
    came = []
    for event in ws.watches.events(watch.id, after=2, follow=True):
        came.append((event.seq, event.path))
        if event.seq == 3:
            ws.files.mkdir("/root/w/c")
        else:
            ws.watches.delete(watch.id)  # the stream ends with the watch
    assert came == [(3, "/root/w/b"), (4, "/root/w/c")]
    with pytest.raises(errors.WatchNotFound):
        list(ws.watches.events(watch.id))


def test_files(ws: Workspace, tmp_path: Path) -> None:
    files = ws.files
    files.write("/root/a", "text")
    assert files.read_text("/root/a") == "text" and files.stat("/root/a").size == 4
    data = os.urandom(3_000_000)
    files.write("/root/b", iter([data[:1_000_000], data[1_000_000:]]))
    assert files.read("/root/b") == data == b"".join(files.stream("/root/b"))
    assert [f.name for f in files.list("/root")] == ["a", "b"]
    (tmp_path / "in/deep").mkdir(parents=True)
    (tmp_path / "in/deep/f").write_bytes(data)
    files.upload(tmp_path / "in", "/tree")
    assert files.download("/tree", tmp_path / "out").bytes == len(data)
    assert (tmp_path / "out/deep/f").read_bytes() == data
    files.remove("/tree", recursive=True)
    assert not files.exists("/tree")
    with pytest.raises(errors.FileNotFound):
        files.read("/nosuch")


def test_the_tree(ws: Workspace, coppice: Coppice) -> None:
    root = ws.checkpoint(labels={"kind": "root"})
    ws.files.write("/root/new", "x")
    child = ws.checkpoint(annotations={"score": 0.5})
    assert [f.path for f in root.diff(child).files] == ["/root/new"]
    assert child.parent_id == root.id and [a.id for a in child.lineage()][:2] == [child.id, root.id]
    assert [c.id for c in root.children()] == [child.id]
    assert [n.checkpoint.id for n in root.tree()] == [root.id, child.id]
    drawn = coppice.tree(root.id)
    assert str(drawn).splitlines() == [root.id, f"└─ {child.id}  [{ws.name} ready]"] and len(coppice.tree(root.id, depth=0)) == 1
    ws.restore(root)
    assert ws.info.epoch == 2 and not ws.files.exists("/root/new")
    (stepped,) = child.step(["echo stepped"]).actions
    assert stepped.stdout == "stepped\n" and stepped.checkpoint_id is not None
    after = coppice.checkpoint(stepped.checkpoint_id)
    assert after.parent_id == child.id
    child.annotate(lambda now: {"score": now["score"] + 1})
    assert coppice.checkpoint(child.id).annotations == {"score": 1.5}
    child.refresh()
    with pytest.raises(errors.VersionConflict):
        child.update(pinned=True, version=1)
    with child.fork(2) as forks:
        assert forks[0].id != forks[1].id and forks[0].checkpoint_id == child.id
    assert forks[0].state == "terminated"
    assert child.usage().workspaces >= 3 and list(child.effects()) == []
    after.delete()
    with pytest.raises(errors.CheckpointNotFound):
        after.fork()


def test_suspend_and_resume(ws: Workspace) -> None:
    assert ws.suspend().state == "suspended"
    with pytest.raises(errors.WorkspaceNotReady):
        ws.run("true")
    assert ws.resume().state == "ready" and ws.run("true").ok
    assert ws.usage().workspaces == 1 and len(list(ws.reseal_reports())) >= 1
    assert b"payload" in ws.attestation()


def test_network(ws: Workspace) -> None:
    assert ws.network.allow(["example.com"]).allow == ["example.com"]
    grant = ws.network.grant("example", secret="a-secret-value", hosts=["example.com"], header="authorization")
    assert "a-secret-value" not in repr(ws.network.grants()) and grant.placeholder
    port = ws.network.open_port(8080)
    assert [p.id for p in ws.network.ports()] == [port.id]
    ws.network.close_port(port.id)
    ws.network.revoke("example")
    assert ws.network.grants() == [] and list(ws.network.flows()) == []


def test_names(coppice: Coppice) -> None:
    with coppice.create(name="by-name", labels={"a": "b"}, ttl=3600) as ws:
        assert coppice.workspace("by-name").id == ws.id
        assert [w.id for w in coppice.workspaces(labels=["a=b"])] == [ws.id]
        assert ws.update(labels={"a": None, "c": "d"}).info.labels == {"c": "d"}
    with pytest.raises(errors.WorkspaceNotFound):
        coppice.workspace("by-name")


def test_events(coppice: Coppice, live: Live) -> None:
    past = list(coppice.events(after="0", follow=False))
    last = past[-1].id if past else "0"
    ws = coppice.create()
    seen = []
    for event in coppice.events(after=last, workspace_id=ws.id, types=["workspace"]):
        seen.append(event.type)
        if event.type == "workspace.ready":
            live.restart()  # it goes on after the controller comes back
            ws.terminate()
        if event.type == "workspace.terminated":
            break
    assert "workspace.ready" in seen and len(seen) == len(set(seen))


def test_operations(ws: Workspace, coppice: Coppice) -> None:
    node = ws.checkpoint()
    found = list(coppice.operations(checkpoint_id=node.id, kinds=["create_checkpoint"]))
    assert [o.state for o in found] == ["succeeded"] and found[0].kind == "create_checkpoint"
    assert list(coppice.operations(workspace_id=ws.id, states=["running"])) == []
    with node.fork() as forks:
        ended = coppice.cancel_operation(forks.operation_id)  # it has ended, and stays as it is
        assert ended.state == "succeeded" and forks[0].refresh().state == "ready"
    with pytest.raises(errors.OperationNotFound):
        coppice.cancel_operation("op_" + "0" * 26)


def test_wrong_keys(live: Live) -> None:
    with Coppice(live.url, "coppice_wrong") as c, pytest.raises(errors.Unauthenticated):
        c.create()


def test_a_key_of_little_scope(coppice: Coppice, live: Live) -> None:
    key = coppice.admin.create_key(coppice.whoami().project_id, "reader", scopes=["workspace:read"])
    assert key.secret not in repr(key)
    with Coppice(live.url, key.secret) as c:
        list(c.workspaces())
        with pytest.raises(errors.PermissionDenied):
            c.create()
    coppice.admin.revoke_key(key.key.id)


def test_a_build_and_its_log(coppice: Coppice, live: Live, tmp_path: Path) -> None:
    """A directory is sent, and the log is read by parts while the build goes on. What is built can be forked."""
    from coppice import models

    (tmp_path / "dir").mkdir()
    (tmp_path / "dir/one").write_text("1")
    coppice.put_upload("of-python", tmp_path)
    steps = [
        models.BuildStep(copy=models.BuildCopy(upload="of-python", path="dir", dest="/data")),
        models.BuildStep(run="echo said by the build"),
    ]
    begun = coppice.start_build("of-python", from_=live.image, steps=steps, allow=["a.example"], labels={"by": "test"})
    log, offset = b"", -1
    while offset < len(log) or coppice.operation(begun.id).state not in ("succeeded", "failed"):
        offset = len(log)
        log += coppice.operation_log(begun.id, offset)
    ended = coppice.wait_operation(begun.id)
    assert ended.state == "succeeded", ended.problem
    assert log.count(b"said by the build\n") >= 1 and coppice.operation_log(begun.id, len(log)) == b""
    image = coppice.built_image("of-python")
    assert image.labels == {"by": "test"} and image.from_ == live.image
    with coppice.checkpoint(image.checkpoint_id).fork() as forks:
        assert forks[0].files.read_text("/data/one") == "1"
    again = coppice.build_image("of-python", from_=live.image, steps=steps, allow=["a.example"])
    assert again.build.cached_steps > 0
    with pytest.raises(TypeError, match="unknown option 'dokerfile'"):
        coppice.build_image("x", dokerfile="FROM base")  # type: ignore[call-arg]
    coppice.delete_image("of-python")
    coppice.delete_upload("of-python")


def test_a_quota(coppice: Coppice, live: Live) -> None:
    from coppice import models

    project = coppice.admin.create_project("small", quotas=models.QuotasPatch(workspaces=1))
    key = coppice.admin.create_key(project.id, "k", scopes=["workspace:create", "workspace:read", "workspace:delete"])
    with Coppice(live.url, key.secret) as c, c.create():
        with pytest.raises(errors.QuotaExceeded):
            c.create()
    assert project.id in {p.id for p in coppice.admin.projects()}
    assert next(iter(coppice.admin.audit(action="createWorkspace"))).outcome in ("accepted", "succeeded")


def test_a_controller_that_restarts_within_a_call(coppice: Coppice, live: Live) -> None:
    """The program runs once, and its result arrives, although the server that was asked has ended."""
    with coppice.create() as ws:
        done = []
        call = threading.Thread(target=lambda: done.append(ws.run("sleep 3")))
        call.start()
        live.restart()
        call.join()
        assert done[0].ok and len(list(ws.sessions())) == 1


def test_sixty_four_children_of_one_process(live: Live) -> None:
    async def main() -> None:
        async with AsyncCoppice(live.url, live.token) as c, await c.create(live.image) as ws:
            node = await ws.checkpoint()
            before = threading.active_count()
            async with await node.fork(64) as forks:
                results = await asyncio.gather(*(child.run(["echo", child.name]) for child in forks))
                assert [r.stdout.strip() for r in results] == [child.name for child in forks]
                assert threading.active_count() == before

    asyncio.run(main())


def test_a_cancelled_program_goes_on(live: Live) -> None:
    async def main() -> None:
        async with AsyncCoppice(live.url, live.token) as c, await c.create(live.image) as ws:
            call = asyncio.create_task(ws.run("sleep 3600"))
            while not [s async for s in ws.sessions()]:
                await asyncio.sleep(0.05)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            sessions = [s async for s in ws.sessions()]
            assert [s.info.state for s in sessions] == ["running"]
            await sessions[0].delete()

    asyncio.run(main())

"""Drives Coppice through the unmodified e2b package. Each check is one row of docs/COMPATIBILITY.md.

It prints one JSON object a line: {"method", "verdict", "note"}. COMPAT_REAL=1 says that the sandboxes are machines; otherwise
they are those of a test, whose programs are a few built-in words.
"""

import inspect
import json
import os
import sys
import tempfile
import time
import traceback

from e2b import (
    BuildException, CommandExitException, NotFoundException, Sandbox, SandboxQuery, SandboxState, Template, TimeoutException, wait_for_file,
)

# What only some versions of the package have is left out with the others.
ABSENT = "absent: the package does not have it"

REAL = os.environ.get("COMPAT_REAL") == "1"
TIMEOUT = 600 if REAL else 60
failed = []


def check(method, note=""):
    """Runs the function below it and reports its outcome."""

    def run(f):
        try:
            verdict, text = "works", f() or note
            if text.startswith(("refused", "absent")):
                verdict, text = text.split(": ", 1)
        except Exception as err:  # the rest is to be seen, too
            verdict, text = "fails", f"{type(err).__name__}: {err}"
            traceback.print_exc()
            failed.append(method)
        print(json.dumps({"method": method, "verdict": verdict, "note": text}), flush=True)

    return run


def refused(f, kind=Exception):
    """Wants f to fail with an error that names its cause."""
    try:
        f()
    except kind as err:
        assert str(err), "an error without a word"
        return str(err)
    raise AssertionError("it was not refused")


sbx = Sandbox.create(template="base", timeout=TIMEOUT, metadata={"purpose": "compat", "a b": "c&d=ü"}, envs={"FROM_CREATE": "yes"}, request_timeout=TIMEOUT)


@check("Sandbox.create")
def _():
    assert sbx.sandbox_id.isalnum(), sbx.sandbox_id


@check("Sandbox.get_info")
def _():
    info = sbx.get_info()
    assert info.sandbox_id == sbx.sandbox_id and info.metadata == {"purpose": "compat", "a b": "c&d=ü"}, info
    assert info.state == SandboxState.RUNNING, info


@check("Sandbox.is_running")
def _():
    assert sbx.is_running()


@check("Sandbox.list")
def _():
    found = Sandbox.list(query=SandboxQuery(metadata={"a b": "c&d=ü"})).next_items()
    assert [s.sandbox_id for s in found] == [sbx.sandbox_id], found
    assert Sandbox.list(query=SandboxQuery(metadata={"a b": "other"})).next_items() == []


@check("Sandbox.set_timeout")
def _():
    before = sbx.get_info().end_at
    sbx.set_timeout(TIMEOUT + 600)
    assert (sbx.get_info().end_at - before).total_seconds() > 300


@check("Sandbox.connect (running)")
def _():
    again = Sandbox.connect(sbx.sandbox_id, timeout=TIMEOUT)
    assert again.commands.run("echo connected").stdout == "connected\n"


@check("commands.run")
def _():
    out = sbx.commands.run("echo hello world")
    assert (out.stdout, out.stderr, out.exit_code) == ("hello world\n", "", 0), out


@check("commands.run (exit status)")
def _():
    try:
        sbx.commands.run("exit 3")
    except CommandExitException as err:
        assert err.exit_code == 3, err
        return
    raise AssertionError("no CommandExitException")


@check("commands.run (stderr callback)")
def _():
    seen = []
    sbx.commands.run("echo oops >&2" if REAL else "err oops", on_stderr=seen.append)
    assert "".join(seen) == "oops\n", seen


@check("commands.run (envs)")
def _():
    out = sbx.commands.run("env", envs={"OF_CALL": "1"}).stdout
    assert "OF_CALL=1\n" in out and (not REAL or "FROM_CREATE=yes\n" in out), out


@check("commands.run (timeout)")
def _():
    refused(lambda: sbx.commands.run("sleep 600", timeout=3), TimeoutException)


@check("commands.run (background), kill, wait")
def _():
    handle = sbx.commands.run("sleep 600", background=True, timeout=0)
    assert handle.pid in [p.pid for p in sbx.commands.list()]
    assert handle.kill()
    refused(handle.wait, CommandExitException)


@check("commands.connect")
def _():
    handle = sbx.commands.run("cat", background=True, stdin=True, timeout=0)
    again = sbx.commands.connect(handle.pid, timeout=TIMEOUT)
    again.send_stdin("typed\n") if hasattr(again, "send_stdin") else sbx.commands.send_stdin(handle.pid, "typed\n")
    if hasattr(sbx.commands, "close_stdin"):
        sbx.commands.close_stdin(handle.pid)
        assert again.wait().stdout == "typed\n"
    else:  # the oldest packages leave a process its input
        seen = []
        refused(lambda: again.wait(on_stdout=lambda data: (seen.append(data), handle.kill())), CommandExitException)
        assert "".join(seen) == "typed\n", seen


@check("commands.kill (unknown pid)")
def _():
    assert sbx.commands.kill(999999) is False


@check("pty.create, send_stdin, resize, kill")
def _():
    if not REAL:
        return "with machines only"
    from e2b import PtySize

    terminal = sbx.pty.create(PtySize(rows=24, cols=80), timeout=0)
    sbx.pty.resize(terminal.pid, PtySize(rows=30, cols=100))
    sbx.pty.send_stdin(terminal.pid, b"stty size; exit\n")
    seen = []
    terminal.wait(on_pty=lambda data: seen.append(bytes(data)))
    assert b"30 100" in b"".join(seen), seen


@check("files.write, files.read")
def _():
    info = sbx.files.write("/tmp/dir with space/ü.txt", "content\n")
    assert info.path == "/tmp/dir with space/ü.txt", info
    assert sbx.files.read("/tmp/dir with space/ü.txt") == "content\n"
    blob = bytes(range(256)) * 4096
    sbx.files.write("/tmp/blob", blob)
    assert bytes(sbx.files.read("/tmp/blob", format="bytes")) == blob


@check("files.write (many, empty, relative)")
def _():
    sbx.files.write_files([{"path": "one.txt", "data": "1"}, {"path": "/tmp/two.txt", "data": ""}])
    assert sbx.files.read("one.txt") == "1" and sbx.files.read("/tmp/two.txt") == ""
    assert sbx.commands.run("cat one.txt" if REAL else "cat /root/one.txt").stdout == "1"


@check("files.read (absent)")
def _():
    refused(lambda: sbx.files.read("/tmp/none"), NotFoundException)


@check("files.list, exists, get_info")
def _():
    assert [e.name for e in sbx.files.list("/tmp/dir with space")] == ["ü.txt"]
    assert sbx.files.exists("/tmp/blob") and not sbx.files.exists("/tmp/none")
    info = sbx.files.get_info("/tmp/blob")
    assert (info.size, info.owner, info.permissions) == (1 << 20, "root", "-rw-r--r--"), info


@check("files.make_dir, rename, remove")
def _():
    assert sbx.files.make_dir("/tmp/made") is True
    assert sbx.files.make_dir("/tmp/made") is False
    sbx.files.rename("/tmp/two.txt", "/tmp/made/three.txt")
    assert sbx.files.exists("/tmp/made/three.txt") and not sbx.files.exists("/tmp/two.txt")
    sbx.files.remove("/tmp/made/three.txt")
    assert not sbx.files.exists("/tmp/made/three.txt")


@check("Sandbox.pause, Sandbox.connect (paused)")
def _():
    assert (sbx.pause if hasattr(sbx, "pause") else sbx.beta_pause)() is not False
    assert Sandbox.list(query=SandboxQuery(state=[SandboxState.PAUSED])).next_items()[0].sandbox_id == sbx.sandbox_id
    assert not sbx.is_running()
    sbx.connect(timeout=TIMEOUT)
    assert bytes(sbx.files.read("/tmp/blob", format="bytes"))[:3] == b"\0\1\2"
    assert sbx.commands.run("echo resumed").stdout == "resumed\n"


@check("Sandbox.create_snapshot, Sandbox.create (from a snapshot), delete_snapshot")
def _():
    if not hasattr(sbx, "create_snapshot"):
        return ABSENT
    snap = sbx.create_snapshot()
    sbx.files.write("/tmp/later", "later")
    child = Sandbox.create(template=snap.snapshot_id, timeout=TIMEOUT, request_timeout=TIMEOUT)
    assert child.sandbox_id != sbx.sandbox_id
    assert child.files.read("one.txt") == "1" and not child.files.exists("/tmp/later")
    assert child.kill()
    assert snap.snapshot_id in [s.snapshot_id for s in Sandbox.list_snapshots(sandbox_id=sbx.sandbox_id).next_items()]
    assert Sandbox.delete_snapshot(snap.snapshot_id)
    assert Sandbox.delete_snapshot(snap.snapshot_id) is False


@check("Sandbox.fork")
def _():
    if not hasattr(sbx, "fork"):
        return ABSENT
    children = [c.sandbox if hasattr(c, "sandbox") else c for c in sbx.fork(count=2, timeout=TIMEOUT, request_timeout=TIMEOUT)]
    assert len({c.sandbox_id for c in children} | {sbx.sandbox_id}) == 3
    if REAL:
        words = {c.commands.run("cat /proc/sys/kernel/random/uuid; head -c 16 /dev/urandom | od -An -tx1").stdout for c in children}
        assert len(words) == 2, words
    for child in children:
        assert child.files.read("one.txt") == "1"
        child.kill()


def until(f, seconds=60):
    """Waits until f returns something true."""
    end = time.monotonic() + seconds
    while not (got := f()):
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.1)
    return got


@check("files.watch_dir, get_new_events, stop")
def _():
    sbx.files.make_dir("/tmp/seen")
    handle = sbx.files.watch_dir("/tmp/seen", recursive=True)
    assert handle.get_new_events() == []
    sbx.files.write("/tmp/seen/new", "1")
    seen = []

    def written():
        seen.extend((e.name, e.type.value) for e in handle.get_new_events())
        return ("new", "write") in seen

    until(written)
    assert seen[0] == ("new", "create"), seen
    if REAL:
        assert seen == [("new", "create"), ("new", "chmod"), ("new", "write")], seen
    handle.stop()
    refused(handle.get_new_events)


@check("files.watch_dir (absent)")
def _():
    refused(lambda: sbx.files.watch_dir("/tmp/none"), NotFoundException)


@check("files.write (metadata)")
def _():
    if "metadata" not in inspect.signature(sbx.files.write).parameters:
        return ABSENT
    sbx.files.write("/root/described", "1", metadata={"who": "me"})
    assert sbx.files.get_info("/root/described").metadata == {"who": "me"}
    sbx.files.write("/root/described", "2")
    assert not sbx.files.get_info("/root/described").metadata


@check("Sandbox.get_metrics")
def _():
    if not REAL:
        return "with machines only"
    found = sbx.get_metrics()
    assert len(found) == 1 and 0 < found[0].mem_used < found[0].mem_total and 0 < found[0].disk_used < found[0].disk_total, found
    assert found[0].cpu_count > 0 and 0 <= found[0].cpu_used_pct <= 100, found


@check("Sandbox.update_network")
def _():
    if not hasattr(sbx, "update_network"):
        return ABSENT
    sbx.update_network({"allow_out": ["example.com"], "deny_out": ["0.0.0.0/0"]})
    sbx.update_network({"allow_internet_access": False})


@check("Sandbox.create (pause at the end of its time)")
def _():
    if "lifecycle" in inspect.signature(Sandbox.create).parameters:
        short = Sandbox.create(template="base", timeout=TIMEOUT, lifecycle={"on_timeout": "pause"}, request_timeout=TIMEOUT)
    elif hasattr(Sandbox, "beta_create"):
        short = Sandbox.beta_create(template="base", timeout=TIMEOUT, auto_pause=True, request_timeout=TIMEOUT)
    else:
        return ABSENT
    short.files.write("/tmp/kept", "kept")
    short.set_timeout(1)
    until(lambda: short.get_info().state == SandboxState.PAUSED, TIMEOUT)
    short.connect(timeout=TIMEOUT)
    assert short.files.read("/tmp/kept") == "kept"
    assert short.kill()


def template(directory):
    """Begins a template, with files of a directory."""
    t = Template(file_context_path=directory).from_template("base").copy("src", "/srv/app").set_envs({"FROM_TEMPLATE": "yes"}).set_workdir("/srv/app")
    return t.run_cmd("echo built > /srv/app/built" if REAL else "echo built", user="root")


def build(t, name):
    """Builds a template, and returns the log."""
    lines = []
    more = {} if "api_key" in inspect.signature(Template.build).parameters else {"request_timeout": TIMEOUT}
    Template.build(t, name, cpu_count=1, memory_mb=512, on_build_logs=lambda entry: lines.append(entry.message), **more)
    return "\n".join(lines)


@check("Template.build, Sandbox.create (from a template)")
def _():
    with tempfile.TemporaryDirectory() as directory:
        os.makedirs(f"{directory}/src/below")
        with open(f"{directory}/src/below/a.txt", "w") as f:
            f.write(sbx.sandbox_id)  # no earlier run has sent this file
        t = template(directory)
        if REAL:  # its program runs in each sandbox from the start
            t = t.set_start_cmd("echo $$ > /tmp/started; exec sleep 100000", wait_for_file("/tmp/started"))
        said = build(t, "e2b_Built")
        assert "Uploaded 'src'" in said and "COPY src /srv/app" in said, said
        said = build(template(directory), "e2b_Built2")
        assert "already cached" in said and "CACHED" in said, said
    if hasattr(Template, "exists"):
        assert Template.exists("e2b_Built") and not Template.exists("e2b_None")
    child = Sandbox.create(template="e2b_Built", timeout=TIMEOUT, request_timeout=TIMEOUT)
    assert child.files.read("/srv/app/below/a.txt") == sbx.sandbox_id
    if REAL:
        assert child.files.read("/srv/app/built") == "built\n"
        assert child.commands.run("kill -0 $(cat /tmp/started) && echo $FROM_TEMPLATE; pwd").stdout == "yes\n/srv/app\n"
    child.kill()


@check("Template.build (a command fails)")
def _():
    said = refused(lambda: build(Template().from_template("base").run_cmd("exit 3"), "e2b-broken"), BuildException)
    assert "BUILD_FAILED" in said, said
    assert "was not found" in refused(lambda: Sandbox.create(template="e2b-broken", timeout=TIMEOUT))


@check("Sandbox.kill")
def _():
    assert sbx.kill() is True
    assert sbx.kill() is False
    assert not sbx.is_running()


sys.exit(1 if failed else 0)

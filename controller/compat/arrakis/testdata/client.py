"""Drives Coppice through the unmodified py-arrakis package. Each check is one row of docs/COMPATIBILITY.md.

It prints one JSON object a line: {"method", "verdict", "note"}. ARRAKIS_URL is the server. COMPAT_REAL=1 says that the VMs are
machines; otherwise they are those of a test, whose programs are a few built-in words.
"""

import inspect
import json
import os
import socket
import sys
import traceback
import uuid

import requests
from py_arrakis import Sandbox, SandboxManager

URL = os.environ["ARRAKIS_URL"]
REAL = os.environ.get("COMPAT_REAL") == "1"
RUN = uuid.uuid4().hex[:8]  # snapshots stay, and their ids are used once
failed = []
manager = SandboxManager(URL + "/")


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


def refused(f, status):
    """Wants f to fail with this status and an error that names its cause. It returns the message."""
    try:
        f()
    except requests.HTTPError as err:
        assert err.response.status_code == status, err
        return err.response.json()["error"]["message"]
    raise AssertionError("it was not refused")


def names():
    return sorted(s.name for s in manager.list_all())


def put(sandbox, text):
    sandbox.upload_files([{"path": "testfile", "content": text}])


def get(sandbox):
    return sandbox.run_cmd("cat /tmp/server_files/testfile")["output"]


manager.destroy_all()


@check("SandboxManager.list_all, destroy_all")
def _():
    assert manager.list_all() == []
    manager.start_sandbox("one"), manager.start_sandbox("Two.2")
    assert names() == ["Two.2", "one"], names()
    manager.destroy_all()
    assert names() == []


@check("SandboxManager.start_sandbox, Sandbox.info")
def _():
    info = manager.start_sandbox("vm").info()
    assert info["name"] == "vm" and info["status"] == "RUNNING" and "/" in info["ip"], info
    message = refused(lambda: manager.start_sandbox("vm"), 409)
    assert "exists already" in message, message


vm = Sandbox(manager._api, "vm")


@check("Sandbox.info: port_forwards", "the address of a server that listens in the VM")
def _():
    gui = [p for p in vm.info()["port_forwards"] if p["description"] == "gui"]
    assert len(gui) == 1 and isinstance(gui[0]["host_port"], str) and gui[0]["guest_port"] == "5901", gui
    if not REAL:
        return None
    serve = "import socket; s = socket.create_server(('127.0.0.1', 5901)); open('/tmp/listens', 'w').close(); s.accept()[0].sendall(b'RFB 003.008')"
    vm.run_cmd(f'python3 -c "{serve}" >/dev/null 2>&1 &')
    assert vm.run_cmd("timeout 120 sh -c 'until [ -e /tmp/listens ]; do sleep 0.1; done'")["error"] == ""
    with socket.create_connection(("127.0.0.1", int(gui[0]["host_port"])), timeout=120) as c:
        assert c.recv(11) == b"RFB 003.008"


@check("Sandbox.run_cmd")
def _():
    out = vm.run_cmd("echo hello world")
    assert out == {"output": "hello world\n", "error": ""}, out
    if REAL:
        assert vm.run_cmd("(cd /; pwd)")["output"] == "/\n"
        out = vm.run_cmd("echo out; echo err >&2; echo out")
        assert out == {"output": "out\nerr\nout\n", "error": ""}, out
        assert vm.run_cmd("pwd")["output"] == "/tmp/server_files\n"


@check("Sandbox.run_cmd (exit status)")
def _():
    out = vm.run_cmd("exit 3")
    assert out == {"output": "", "error": "exit status 3"}, out


@check("Sandbox.run_cmd (blocking=False)")
def _():
    if "blocking" not in inspect.signature(vm.run_cmd).parameters:
        return "absent: the package does not have it"
    assert vm.run_cmd("sleep 600", blocking=False)["error"] == ""


@check("Sandbox.upload_files, download_files")
def _():
    vm.upload_files([{"path": "a b", "content": "relative ü\n"}, {"path": "/root/x", "content": "absolute"}])
    got = vm.download_files(["a b", "/root/x", "absent"])
    assert [f["content"] for f in got] == ["relative ü\n", "absolute", ""] and got[2]["error"] and not got[0]["error"], got


@check("Sandbox.download_files (not text)", "copy such a file with coppice ws cp")
def _():
    if not REAL:
        return "absent: needs a machine"
    assert vm.run_cmd(r"printf '\377\376' > binary")["error"] == ""
    error = vm.download_files(["binary"])[0]["error"]
    assert "not text" in error, error
    return "refused: the file's `error` says that it is not text"


@check("Sandbox.snapshot")
def _():
    put(vm, "first\n")
    assert vm.snapshot("First Snapshot " + RUN) == "First Snapshot " + RUN
    assert vm.snapshot().startswith("snapshot-vm-")
    message = refused(lambda: vm.snapshot("First Snapshot " + RUN), 409)
    assert message, message


@check("SandboxManager.restore (the original runs)", "Arrakis cannot")
def _():
    put(vm, "second\n")
    other = manager.restore("other", "First Snapshot " + RUN)
    assert (get(other), get(vm)) == ("first\n", "second\n")
    if REAL:
        ids = [s.run_cmd("cat /etc/machine-id; head -c 16 /dev/urandom | od -An -tx1")["output"] for s in (vm, other)]
        assert ids[0] != ids[1], ids


@check("Sandbox.snapshot (of a restored VM)", "Arrakis cannot")
def _():
    other = Sandbox(manager._api, "other")
    put(other, "third\n")
    other.snapshot("third-" + RUN)
    for name in ("a", "b"):
        assert get(manager.restore(name, "third-" + RUN)) == "third\n"
    for name in ("a", "b", "other"):
        Sandbox(manager._api, name).destroy()


@check("SandboxManager.restore (own name, running)", "in place; Arrakis loses the VM")
def _():
    assert get(manager.restore("vm", "First Snapshot " + RUN)) == "first\n"


@check("SandboxManager.restore (own name, destroyed)")
def _():
    vm.destroy()
    assert get(manager.restore("vm", "First Snapshot " + RUN)) == "first\n"


@check("SandboxManager.restore (a snapshot of another VM, running)", "the VM stays as it is")
def _():
    manager.start_sandbox("innocent")
    message = refused(lambda: manager.restore("innocent", "First Snapshot " + RUN), 409)
    assert "exists already" in message and Sandbox(manager._api, "innocent").info()["status"] == "RUNNING", message
    Sandbox(manager._api, "innocent").destroy()
    return "refused: " + message.split(";")[0].replace(RUN, "…")


@check("Sandbox.update_state, start_sandbox (stopped)", "a stopped VM keeps its memory, too")
def _():
    vm.update_state("stopped")
    assert vm.info()["status"] == "STOPPED"
    assert refused(lambda: vm.run_cmd("true"), 409)
    manager.start_sandbox("vm")
    assert (vm.info()["status"], get(vm)) == ("RUNNING", "first\n")
    vm.update_state("paused")
    assert vm.info()["status"] == "PAUSED"
    # The package cannot resume.
    requests.patch(URL + "/vms/vm", json={"status": "resume"}).raise_for_status()
    assert vm.info()["status"] == "RUNNING"


@check("with start_sandbox(…) as sandbox")
def _():
    with manager.start_sandbox("auto-cleanup") as sandbox:
        assert sandbox.run_cmd("echo hello")["output"] == "hello\n"
    assert refused(sandbox.info, 404)


@check("Sandbox.destroy")
def _():
    vm.destroy()
    assert names() == [] and refused(vm.destroy, 404)


sys.exit(f"failed: {', '.join(failed)}" if failed else 0)

"""Generated files are current, both clients have the same names, and every operation of the contract is reached."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import coppice
from coppice import _operations
from coppice.errors import BY_CODE, APIError

SDK = Path(__file__).resolve().parents[1]

# Operations that no method calls, and why.
UNREACHED = {
    "terminateWorkspace": "deleteWorkspace is the same",
    "attach": "a WebSocket, whose address attachSession gives",
    "createFilesPass": "files go through the server",
    "statFile": "getFile with stat has a problem in its answer, and HEAD has none",
}


def test_generated_files_are_current() -> None:
    subprocess.run([sys.executable, SDK / "tools/generate.py", "--check"], check=True)


def test_the_wheel_has_the_license() -> None:
    of_tree = (SDK.parents[1] / "LICENSE").read_bytes()
    assert (SDK / "LICENSE").read_bytes() == of_tree
    found = [f for f in metadata.files("coppice") or [] if f.name == "LICENSE"]
    assert [f.read_binary() for f in found] == [of_tree]


def test_every_operation_is_reached() -> None:
    every = {name for name, value in vars(_operations).items() if isinstance(value, _operations.Operation)}
    source = "".join(p.read_text() for p in (SDK / "src/coppice/_async").glob("*.py"))
    reached = set(re.findall(r"\bop\.([a-zA-Z]+)\b", source))
    assert every - reached == set(UNREACHED)
    assert len(every) > 60


def test_both_clients_have_the_same_names() -> None:
    pairs = [(n, n.removeprefix("Async")) for n in dir(coppice) if n.startswith("Async")]
    assert len(pairs) >= 8
    for one, other in pairs:
        a, b = (
            {n for n in dir(getattr(coppice, c)) if not n.startswith("__")} for c in (one, other)
        )
        assert {n.replace("aclose", "close") for n in a} == b
        for name in a & b:
            f, g = getattr(getattr(coppice, one), name), getattr(getattr(coppice, other), name)
            if inspect.isfunction(f):
                assert list(inspect.signature(f).parameters) == list(inspect.signature(g).parameters)
                assert not inspect.iscoroutinefunction(g)


def test_every_code_is_an_exception_with_a_hint() -> None:
    assert len(BY_CODE) > 80
    for code, kind in BY_CODE.items():
        assert issubclass(kind, APIError) and kind is not APIError and kind.code == code and kind.hint


def test_the_import_is_quick() -> None:
    """httpx, websockets and asyncio are imported when they are needed: they would be most of the time."""
    code = "from coppice import Coppice; import sys; print([m for m in ('httpx', 'websockets', 'asyncio') if m in sys.modules])"
    got = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert got.stdout.strip() == "[]"


def test_every_name_is_there() -> None:
    for name in coppice.__all__:
        assert getattr(coppice, name) is not None
    assert not hasattr(coppice, "nosuch")


def test_the_code_of_the_readme() -> None:
    """Each block is Python, and each method that it calls on a workspace or a checkpoint is there."""
    text = (SDK / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) >= 7
    kinds = {
        "ws": coppice.Workspace, "node": coppice.Checkpoint, "client": coppice.Coppice, "session": coppice.Session,
        "terminal": coppice.Attached,
    }
    for block in blocks:
        compile(block, "README.md", "exec")
        for name, attribute, below in re.findall(r"\b(ws|node|client|session|terminal)\.(\w+)(?:\.(\w+)\()?", block):
            parts = {"files": coppice.Files, "network": coppice.Network, "watches": coppice.Watches}
            if attribute in parts:
                assert hasattr(parts[attribute], below)
            else:
                assert hasattr(kinds[name], attribute), (name, attribute)
    assert blocks[0].strip() in "\n".join(line[4:] for line in (coppice.__doc__ or "").splitlines())

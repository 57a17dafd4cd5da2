"""What a runner without machines cannot show."""

from __future__ import annotations

import pytest
from conftest import VMs
from coppice import Coppice, errors

pytestmark = pytest.mark.vms


def test_files_of_a_checkpoint(vms: VMs) -> None:
    with Coppice(vms.url, vms.token) as c:
        with c.create() as ws:
            ws.files.write("/data/a", "as it was")
            node = ws.checkpoint()
            ws.files.write("/data/a", "changed")
        assert node.files.read_text("/data/a") == "as it was" == b"".join(node.files.stream("/data/a")).decode()
        assert [f.name for f in node.files.list("/data")] == ["a"] and node.files.stat("/data").type == "dir"
        with pytest.raises(errors.FileNotFound):
            node.files.read("/data/b")
        with pytest.raises(ValueError):
            node.files.read("data/a")


def test_files_of_a_user(vms: VMs) -> None:
    with Coppice(vms.url, vms.token) as c, c.create() as ws:
        files = ws.files
        ws.run("install -d -o nobody /data", check=True)
        files.write("/data/a", "by nobody", user="nobody")
        assert ws.run("stat -c %U /data/a").stdout == "nobody\n" and files.read_text("/data/a", user="nobody") == "by nobody"
        ws.run("chmod 400 /data/a && ln /data/a /data/same", check=True)
        with pytest.raises(errors.FileDenied):
            files.write("/data/a", "again", user="nobody", in_place=True)
        files.write("/data/a", "in place", in_place=True)
        assert files.read_text("/data/same") == "in place" and ws.run("stat -c %U:%a /data/a").stdout == "nobody:400\n"
        for call in (
            lambda: files.read("/etc/shadow", user="nobody"), lambda: files.write("/etc/x", "", user="nobody"),
            lambda: files.list("/root", user="nobody"), lambda: files.remove("/etc/passwd", user="nobody"),
        ):
            with pytest.raises(errors.FileDenied):
                call()


def test_a_reader_gets_all_output(vms: VMs) -> None:
    """A program waits for its reader, however much it writes."""
    with Coppice(vms.url, vms.token) as c, c.create() as ws:
        session = ws.start("head -c 20000000 /dev/zero")
        assert sum(len(piece.data) for piece in session.stream()) == 20_000_000 and session.exit_code == 0

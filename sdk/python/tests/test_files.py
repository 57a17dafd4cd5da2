"""Archives of a hostile guest, and directories back and forth."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from coppice import Coppice, errors
from coppice._tar import Copied, Extractor, pack, parse_pax
from double import Answer, Double
from samples import WS, file_info, workspace


def archive(*entries: tarfile.TarInfo | tuple[tarfile.TarInfo, bytes], end: bool = True) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for entry in entries:
            info, data = entry if isinstance(entry, tuple) else (entry, b"")
            if data:
                info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        size = tar.offset
    return out.getvalue() if end else out.getvalue()[:size]


def info(name: str, kind: bytes = tarfile.REGTYPE, target: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    out = tarfile.TarInfo(name)
    out.type, out.linkname, out.mode = kind, target, mode
    return out


def extract(data: bytes, to: Path, step: int = 1000, **bounds: int) -> Copied:
    to.mkdir(exist_ok=True)
    with Extractor(to, b"d", **bounds) as x:
        for at in range(0, len(data), step):
            x.feed(data[at : at + step])
        return x.finish()


@pytest.mark.parametrize("step", [1, 7, 512, 1 << 20])
def test_an_honest_archive(tmp_path: Path, step: int) -> None:
    long = "n" * 150 + "/" + "m" * 120
    data = archive(
        info("d", tarfile.DIRTYPE, mode=0o755), info("d/sub", tarfile.DIRTYPE, mode=0o500),
        (info("d/sub/a", mode=0o400), b"A" * 3000), info("d/empty"), (info("d/" + long), b"L"),
        info("d/link", tarfile.SYMTYPE, "sub/a"), info("d/hard", tarfile.LNKTYPE, "d/sub/a"), (info("d/ü\n"), b"u"),
    )
    got = extract(data, tmp_path / "to", step)
    to = tmp_path / "to"
    assert (got.bytes, got.entries, got.left_out) == (3002, 8, 0)
    assert (to / "sub/a").read_text() == "A" * 3000 and (to / long).read_text() == "L" and (to / "ü\n").read_text() == "u"
    assert os.readlink(to / "link") == "sub/a" and (to / "hard").stat().st_ino == (to / "sub/a").stat().st_ino
    assert (to / "sub").stat().st_mode & 0o777 == 0o500 and (to / "sub/a").stat().st_mode & 0o777 == 0o400


ESCAPES: list[tuple[str, list[tarfile.TarInfo | tuple[tarfile.TarInfo, bytes]]]] = [
    ("parent", [(info("d/../../outside"), b"x")]),
    ("parent of the top", [(info("../outside"), b"x")]),
    ("through a link", [info("d/l", tarfile.SYMTYPE, ".."), (info("d/l/outside"), b"x")]),
    ("through an absolute link", [info("d/l", tarfile.SYMTYPE, "/tmp"), (info("d/l/coppice-outside"), b"x")]),
    ("through two links", [info("d/a", tarfile.SYMTYPE, "b"), info("d/b", tarfile.SYMTYPE, "a/.."), (info("d/b/outside"), b"x")]),
    ("onto a link", [info("d/l", tarfile.SYMTYPE, "../outside"), (info("d/l"), b"x")]),
    ("a hard link to a link", [info("d/l", tarfile.SYMTYPE, "x"), info("d/h", tarfile.LNKTYPE, "d/l")]),
    ("a hard link outside", [info("d/h", tarfile.LNKTYPE, "../../etc/passwd"), (info("d/h"), b"x")]),
    ("a device", [info("d/null", tarfile.CHRTYPE)]),
    ("a pipe", [info("d/pipe", tarfile.FIFOTYPE)]),
]


@pytest.mark.parametrize(("what", "entries"), ESCAPES, ids=[e[0] for e in ESCAPES])
def test_nothing_is_written_outside(
    tmp_path: Path, what: str, entries: list[tarfile.TarInfo | tuple[tarfile.TarInfo, bytes]]
) -> None:
    (tmp_path / "victim").write_text("untouched")
    try:
        extract(archive(*entries), tmp_path / "to")
    except errors.UnsafeArchive:
        pass
    assert sorted(p.name for p in tmp_path.iterdir()) == ["to", "victim"]
    assert (tmp_path / "victim").read_text() == "untouched"
    assert not Path("/tmp/coppice-outside").exists()
    for path in (tmp_path / "to").rglob("*"):
        assert path.is_symlink() or path.is_file() or path.is_dir()
        assert path.resolve().is_relative_to(tmp_path / "to") or not path.exists()


def test_a_link_of_an_earlier_copy_is_replaced(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "f").write_text("untouched")
    to = tmp_path / "to"
    to.mkdir()
    (to / "planted").symlink_to(victim)
    (to / "file").symlink_to(victim / "f")
    extract(archive((info("d/planted/f"), b"x"), (info("d/file"), b"x")), to)
    assert (victim / "f").read_text() == "untouched"
    assert (to / "planted/f").read_text() == "x" and (to / "file").read_text() == "x"


def test_no_set_user_id(tmp_path: Path) -> None:
    extract(archive((info("d/f", mode=0o6755), b"x")), tmp_path / "to")
    assert (tmp_path / "to/f").stat().st_mode & 0o7777 == 0o755


def pax(**records: str) -> tarfile.TarInfo:
    out = info("d/f")
    out.pax_headers = records
    return out


def header(kind: bytes, size: int) -> bytes:
    out = info("d/f", kind)
    out.size = size
    return out.tobuf(tarfile.GNU_FORMAT)


def extended(records: bytes) -> bytes:
    """An extended header alone, with any records."""
    return header(b"x", len(records)) + records + bytes(-len(records) % 512)


HOSTILE: list[tuple[str, Callable[[], bytes]]] = [
    ("no end", lambda: archive((info("d/f"), b"x"), end=False)),
    ("within a file", lambda: archive((info("d/f"), b"x" * 5000))[:3000]),
    ("nothing", lambda: b""),
    ("noise", lambda: bytes(range(256)) * 8),
    ("checksum", lambda: b"y" + archive((info("d/f"), b"x"))[1:]),
    ("large extended header", lambda: header(b"x", 1 << 40)),
    ("large name", lambda: header(b"L", 1 << 30)),
    ("large directory", lambda: header(b"5", 1 << 40)),
    ("size", lambda: archive(pax(size="-5"))),
    ("huge size", lambda: archive(pax(size="9" * 30))),
    ("sparse", lambda: archive(pax(**{"GNU.sparse.map": "0,1"}))),
    ("too many bytes", lambda: archive((info("d/f"), b"x" * 10_001))),
    ("too many entries", lambda: archive(*[info(f"d/{i}") for i in range(101)])),
    ("too many headers", lambda: header(b"L", 0) * 500),
    ("two extended headers", lambda: extended(b"8 a=bcd\n") * 2 + archive(info("d/f"))),
    ("extended headers in sum", lambda: (header(b"K", 600_000) + bytes(600_064)) * 2 + archive(info("d/f"))),
    ("a record of no length", lambda: extended(b"0 a=b\n")),
    ("a record past the end", lambda: extended(b"99 a=b\n")),
    ("a record without a value", lambda: extended(b"6 abc\n")),
    ("too many extended headers", lambda: (extended(b"8 a=bcd\n") + header(b"0", 0)) * 51 + bytes(1024)),
    ("much behind the end", lambda: archive(info("d/f")) + bytes(1 << 20)),
    ("too deep", lambda: archive(info("d/" + "a/" * 300 + "b"))),
    ("instead of the directory", lambda: archive((info("d"), b"x"))),
    ("file over a directory", lambda: archive((info("d/a/b"), b"x"), (info("d/a"), b"x"))),
    ("behind the end", lambda: archive()[:512] + archive((info("d/f"), b"x"))),
]


@pytest.mark.parametrize(("what", "make"), HOSTILE, ids=[h[0] for h in HOSTILE])
def test_a_hostile_archive_is_refused(tmp_path: Path, what: str, make: Callable[[], bytes]) -> None:
    with pytest.raises(errors.UnsafeArchive):
        extract(make(), tmp_path / "to", max_bytes=10_000, max_entries=100)


def test_an_extended_header_keeps_what_is_used() -> None:
    records = b"".join(b"11 %06x=\n" % i for i in range(80_000)) + b"10 path=a\n" + b"18 GNU.sparse.a=b\n" + b"11 patha=b\n"
    assert parse_pax(records) == {b"path": b"a", b"sparse": b""}


def test_pack_and_extract(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep/er").mkdir(parents=True)
    (source / "deep/er/f").write_bytes(os.urandom(700_000))
    (source / "x").write_text("x")
    (source / "x").chmod(0o751)
    (source / "link").symlink_to("deep")
    extract(b"".join(pack(source)), tmp_path / "to")
    assert (tmp_path / "to/deep/er/f").read_bytes() == (source / "deep/er/f").read_bytes()
    assert (tmp_path / "to/x").stat().st_mode & 0o777 == 0o751 and os.readlink(tmp_path / "to/link") == "deep"
    with tarfile.open(fileobj=io.BytesIO(b"".join(pack(source)))) as tar:  # others can read it, too
        assert sorted(tar.getnames()) == ["deep", "deep/er", "deep/er/f", "link", "x"]


def test_download(double: Double, client: Coppice, tmp_path: Path) -> None:
    whole = archive((info("d/a"), b"A"))
    double.script = [
        Answer(200, workspace()), Answer(200, file_info()), Answer(200, chunks=[whole[:100], whole[100:]]),
        Answer(200, file_info()), Answer(200, chunks=[archive((info("d/a"), b"B"), end=False)]),
        Answer(200, file_info(type="file", name="f")), Answer(200, b"content"),
        Answer(200, file_info(type="file", name="f")), Answer(200, b"too much content"),
    ]
    files = client.workspace(WS).files
    assert files.download("/d", tmp_path / "to").bytes == 1
    with pytest.raises(errors.UnsafeArchive, match="ended early"):
        files.download("/d", tmp_path / "to")
    files.download("/f", tmp_path / "f")
    assert (tmp_path / "f").read_text() == "content"
    with pytest.raises(errors.ProtocolError):
        files.download("/f", tmp_path / "f", max_bytes=10)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["f", "to"] and (tmp_path / "f").read_text() == "content"


def test_upload_streams(double: Double, client: Coppice, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(b"0" * 1_000_000)
    double.script = [Answer(200, workspace()), Answer(200, file_info())]
    files = client.workspace(WS).files
    files.upload(tmp_path, "/d")
    sent = double.requests[1]
    assert sent.headers["transfer-encoding"] == "chunked" and sent.query["untar"] == ["true"]
    with tarfile.open(fileobj=io.BytesIO(sent.body)) as tar:
        assert tar.getnames() == ["big"]
    files.write("/x", "ü", mode=0o600)
    assert double.requests[2].body == "ü".encode() and double.requests[2].query["mode"] == ["0600"]
    with pytest.raises(ValueError, match="absolute"):
        files.read("relative")


def test_mkdir(double: Double, client: Coppice) -> None:
    made = {"file": file_info(), "created": True}
    double.script = [Answer(200, workspace()), Answer(200, made)]
    files = client.workspace(WS).files
    got = files.mkdir("/d")
    assert got.created and got.file.path == "/d"
    files.mkdir("~/d", parents=True, mode=0o700, user="dev:staff")
    assert [(r.method, r.path) for r in double.requests[1:]] == [("POST", f"/v1/workspaces/{WS}/files/mkdir")] * 2
    assert [r.json() for r in double.requests[1:]] == [
        {"path": "/d"}, {"path": "~/d", "parents": True, "mode": "0700", "user": "dev:staff"},
    ]


def test_rename(double: Double, client: Coppice) -> None:
    double.script = [Answer(200, workspace()), Answer(200, file_info(path="/b"))]
    files = client.workspace(WS).files
    assert files.rename("/a", "/b").path == "/b"
    files.rename("~/a", "/b", mkdirs=True, no_replace=True, user="dev")
    assert [(r.method, r.path) for r in double.requests[1:]] == [("POST", f"/v1/workspaces/{WS}/files/rename")] * 2
    assert [r.json() for r in double.requests[1:]] == [
        {"from": "/a", "to": "/b"}, {"from": "~/a", "to": "/b", "mkdirs": True, "no_replace": True, "user": "dev"},
    ]


def test_set_attributes(double: Double, client: Coppice) -> None:
    double.script = [Answer(200, workspace()), Answer(200, file_info(xattrs={"user.a": "1"}))]
    files = client.workspace(WS).files
    assert files.set_attributes("/d", set={"user.a": "1"}, remove=("user.b",), user="dev").xattrs == {"user.a": "1"}
    sent = double.requests[1]
    assert (sent.method, sent.path) == ("POST", f"/v1/workspaces/{WS}/files/xattrs")
    assert sent.json() == {"path": "/d", "set": {"user.a": "1"}, "remove": ["user.b"], "user": "dev"}


def test_a_change_that_was_lost_is_not_repeated(double: Double, client: Coppice) -> None:
    """The server may have done it: a second rename would fail, or move another file."""
    double.script = [Answer(200, workspace()), Answer(cut=0)]
    with pytest.raises(errors.ConnectionFailedError):
        client.workspace(WS).files.rename("/a", "/b")
    assert len(double.requests) == 2


def test_paths_of_changes(double: Double, client: Coppice) -> None:
    """A path depends on no working directory, and `~` is somebody's."""
    double.script = [Answer(200, workspace())]
    ws = client.workspace(WS)
    calls: list[Callable[[str, str | None], object]] = [
        lambda p, u: ws.files.mkdir(p, user=u), lambda p, u: ws.files.rename(p, "/b", user=u),
        lambda p, u: ws.files.rename("/a", p, user=u), lambda p, u: ws.files.set_attributes(p, user=u),
        lambda p, u: ws.watches.create(p, user=u),
    ]
    for call in calls:
        for path, user in (("relative", "dev"), ("", None), ("~/d", None), ("~other/d", "dev")):
            with pytest.raises(ValueError, match="absolute"):
                call(path, user)
    assert len(double.requests) == 1

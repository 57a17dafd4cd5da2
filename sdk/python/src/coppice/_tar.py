"""Archives between this machine and a guest.

The guest controls every byte of what it sends. So the reader here takes the few kinds of entries that files need, keeps
to bounds, and writes below one directory only: it opens each directory by its parent's descriptor and follows no link.
"""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ._errors import UnsafeArchive

BLOCK = 512
MAX_HEADER = 1 << 20
"""The most bytes of the extended headers of one entry, in sum."""
KEPT = (b"path", b"linkpath", b"size", b"mtime")
"""The records of an extended header that are used."""
MAX_TRAILING = 1 << 20
"""The most bytes behind the end of an archive; tar pads to a record of 10 KiB."""
MAX_DEPTH = 256

DEFAULT_BYTES = 10 << 30
DEFAULT_ENTRIES = 1_000_000


@dataclass
class Copied:
    """The result of a download."""

    bytes: int = 0
    entries: int = 0
    left_out: int = 0
    """Links that lead outside, hard links to what is not in the archive, devices and pipes."""


@dataclass
class Entry:
    name: bytes
    kind: bytes
    size: int
    mode: int
    mtime: float
    target: bytes


def number(field: bytes) -> int:
    """A number of a header: octal, or binary if its first bit is set."""
    if field[:1] and field[0] & 0x80:
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
    digits = field.split(b"\0", 1)[0].strip()
    try:
        value = int(digits or b"0", 8)
    except ValueError:
        raise UnsafeArchive("the archive has a header that is not one") from None
    if value < 0:
        raise UnsafeArchive("the archive has a header with a negative number")
    return value


def parse_header(block: bytes) -> Entry:
    total = sum(block[:148]) + sum(block[156:]) + 8 * 32
    if number(block[148:156]) != total:
        raise UnsafeArchive("the archive has a header with a wrong checksum")
    name = block[:100].split(b"\0", 1)[0]
    if block[257:263] == b"ustar\0":
        prefix = block[345:500].split(b"\0", 1)[0]
        name = prefix + b"/" + name if prefix else name
    return Entry(
        name=name,
        kind=block[156:157],
        size=number(block[124:136]),
        mode=number(block[100:108]) & 0o777,
        mtime=float(number(block[136:148])),
        target=block[157:257].split(b"\0", 1)[0],
    )


def parse_pax(data: bytes) -> dict[bytes, bytes]:
    """The records of an extended header, `length key=value`, that are used. `sparse` stands for those of a sparse file."""
    out: dict[bytes, bytes] = {}
    at = 0
    while at < len(data):
        space = data.find(b" ", at, at + 8)
        length = data[at:space] if space > at else b""
        if not length.isdigit():
            raise UnsafeArchive("the archive has an extended header that is not one")
        end = at + int(length)
        equals = data.find(b"=", space, end)
        if end > len(data) or equals < 0 or data[end - 1 : end] != b"\n":
            raise UnsafeArchive("the archive has an extended header that is not one")
        if data.startswith(b"GNU.sparse", space + 1, equals):
            out[b"sparse"] = b""
        else:
            key = data[space + 1 : min(equals, space + 10)]  # longer than the longest key that is used
            if key in KEPT:
                out[key] = data[equals + 1 : end - 1]
        at = end
    return out


class Extractor:
    """Unpacks an archive that is fed to it, below one directory.

    `top` is the first element of the archive's names, which is dropped. Use it with `with`, and call `finish` at the end.
    """

    def __init__(
        self,
        directory: Path,
        top: bytes,
        *,
        max_bytes: int = DEFAULT_BYTES,
        max_entries: int = DEFAULT_ENTRIES,
    ) -> None:
        self.got = Copied()
        self._top = top
        self._max_bytes = max_bytes
        self._max_entries = max_entries
        self._root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._buffer = bytearray()
        self._skip = 0
        self._file = -1
        self._left = 0
        self._special: Entry | None = None  # an extended header whose data is being collected
        self._pax: dict[bytes, bytes] = {}
        self._extended = 0  # bytes of the extended headers of the next entry
        self._has_pax = False  # the next entry has its header of kind "x"
        self._zeros = 0
        self._trailing = 0  # bytes behind the end
        self._headers = 0  # with extended ones, which are no entries
        self._padding = 0
        self._times = (0.0, 0)
        self._directories: dict[bytes, int] = {}

    def __enter__(self) -> Extractor:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if self._root >= 0:
            os.close(self._root)
            self._root = -1

    def feed(self, data: bytes) -> None:
        """Takes the next bytes of the archive."""
        if self._zeros < 2:
            self._buffer += data
            while self._step():
                pass
            data = bytes(self._buffer) if self._zeros >= 2 else b""
        self._trailing += len(data)
        if self._trailing > MAX_TRAILING:
            raise UnsafeArchive(f"the archive has more than {MAX_TRAILING} bytes behind its end")

    def finish(self) -> Copied:
        """Checks that the archive is complete, and sets the modes of directories."""
        if self._zeros < 2:
            raise UnsafeArchive(
                "the archive ended early: the guest could not read everything, or the connection broke off"
            )
        for name in sorted(self._directories, reverse=True):  # the deepest first: a closed one cannot be entered
            self._chmod(name, self._directories[name])
        return self.got

    # -- the archive

    def _step(self) -> bool:
        if self._skip:
            n = min(self._skip, len(self._buffer))
            del self._buffer[:n]
            self._skip -= n
            return not self._skip
        if self._left:
            return self._write()
        if self._special is not None:
            return self._collect()
        if len(self._buffer) < BLOCK or self._zeros >= 2:
            return False
        block = bytes(self._buffer[:BLOCK])
        del self._buffer[:BLOCK]
        if not any(block):
            self._zeros += 1
            return self._zeros < 2
        if self._zeros:
            raise UnsafeArchive("the archive has an entry behind its end")
        self._header(parse_header(block))
        return True

    def _collect(self) -> bool:
        entry = self._special
        assert entry is not None
        if len(self._buffer) < entry.size:
            return False
        data = bytes(self._buffer[: entry.size])
        del self._buffer[: entry.size]
        self._skip = -entry.size % BLOCK
        self._special = None
        if entry.kind == b"x":
            self._pax.update(parse_pax(data))
        elif entry.kind == b"L":
            self._pax[b"path"] = data.rstrip(b"\0")
        elif entry.kind == b"K":
            self._pax[b"linkpath"] = data.rstrip(b"\0")
        return True

    def _header(self, entry: Entry) -> None:
        self._headers += 1
        if self._headers > self._max_entries:
            raise UnsafeArchive(
                f"the archive has more than {self._max_entries} entries and extended headers: raise max_entries to copy them"
            )
        if entry.kind in (b"x", b"g", b"L", b"K"):
            self._extended += entry.size
            if self._extended > MAX_HEADER:
                raise UnsafeArchive(f"the archive has an entry with extended headers of {self._extended} bytes")
            if entry.kind == b"x" and self._has_pax:
                raise UnsafeArchive("the archive has an entry with two extended headers")
            self._has_pax = self._has_pax or entry.kind == b"x"
            self._special = entry
            if entry.size == 0:
                self._special = None
            return
        self.got.entries += 1
        pax, self._pax = self._pax, {}
        self._extended, self._has_pax = 0, False
        if b"sparse" in pax:
            raise UnsafeArchive("the archive has a sparse file, which is not supported")
        entry.name = pax.get(b"path", entry.name)
        entry.target = pax.get(b"linkpath", entry.target)
        if b"size" in pax:
            if not pax[b"size"].isdigit() or len(pax[b"size"]) > 18:
                raise UnsafeArchive("the archive has a file whose size is not a number")
            entry.size = int(pax[b"size"])
        try:
            entry.mtime = float(pax.get(b"mtime", entry.mtime))
        except ValueError:
            pass  # the header's own is good enough
        self._entry(entry)

    def _entry(self, entry: Entry) -> None:
        regular = entry.kind in (b"0", b"\0", b"7")
        padded = entry.size + -entry.size % BLOCK
        if entry.size and not regular:
            if padded > MAX_HEADER:
                raise UnsafeArchive("the archive has an entry with data that it should not have")
            self._skip = padded
        parts = self._below(entry.name)
        if regular:
            if self.got.bytes + entry.size > self._max_bytes:
                raise UnsafeArchive(f"the data exceeds {self._max_bytes} bytes: raise max_bytes to copy it")
            self.got.bytes += entry.size
            if not parts:
                raise UnsafeArchive("the archive has a file in place of its directory")
            self._open(parts, entry)
        elif entry.kind == b"5":
            os.close(self._directory(parts))
            self._directories[b"/".join(parts)] = entry.mode
        elif entry.kind == b"2" and parts and not leads_outside(parts, entry.target):
            parent = self._directory(parts[:-1])
            try:
                clear(parent, parts[-1])
                os.symlink(entry.target, parts[-1], dir_fd=parent)
            finally:
                os.close(parent)
        elif entry.kind == b"1" and parts:
            self._hard_link(parts, self._below(entry.target))
        else:
            self.got.left_out += 1

    def _below(self, name: bytes) -> list[bytes]:
        """The elements of a name below the directory; none for the directory itself."""
        parts = [p for p in name.split(b"/") if p not in (b"", b".")]
        if b".." in parts or b"\0" in name or len(parts) > MAX_DEPTH:
            raise UnsafeArchive(f"the archive has a name that leads outside, or is too deep: {name[:200]!r}")
        if self._top and parts[:1] == [self._top]:
            return parts[1:]
        return parts

    # -- the directory

    def _directory(self, parts: list[bytes]) -> int:
        """Opens a directory, and makes what is missing. A link or a file in its place is replaced, never followed."""
        at = os.dup(self._root)
        try:
            for part in parts:
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                try:
                    below = os.open(part, flags, dir_fd=at)
                except OSError:
                    if not is_directory(at, part):
                        clear(at, part)
                        os.mkdir(part, 0o755, dir_fd=at)
                    below = os.open(part, flags, dir_fd=at)
                os.close(at)
                at = below
        except BaseException:
            os.close(at)
            raise
        return at

    def _open(self, parts: list[bytes], entry: Entry) -> None:
        parent = self._directory(parts[:-1])
        try:
            clear(parent, parts[-1])
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self._file = os.open(parts[-1], flags, entry.mode | stat.S_IWUSR, dir_fd=parent)
        finally:
            os.close(parent)
        self._left = entry.size
        self._padding = -entry.size % BLOCK
        self._times = (entry.mtime, entry.mode)
        if not self._left:
            self._close()

    def _write(self) -> bool:
        n = min(self._left, len(self._buffer))
        if not n:
            return False
        view = memoryview(self._buffer)[:n]
        try:
            done = 0
            while done < n:
                done += os.write(self._file, view[done:])
        finally:
            view.release()
        del self._buffer[:n]
        self._left -= n
        if self._left:
            return False
        self._skip = self._padding
        self._close()
        return True

    def _close(self) -> None:
        mtime, mode = self._times
        if 0 <= mtime < 1 << 40:
            os.utime(self._file, (mtime, mtime))
        if not mode & stat.S_IWUSR:
            os.fchmod(self._file, mode)
        os.close(self._file)
        self._file = -1

    def _hard_link(self, parts: list[bytes], source: list[bytes]) -> None:
        """Gives a regular file of this archive another name."""
        if not source or source == parts:
            self.got.left_out += 1
            return
        of = self._directory(source[:-1])
        try:
            try:
                info = os.stat(source[-1], dir_fd=of, follow_symlinks=False)
            except FileNotFoundError:
                info = None
            # A file with more names than it got here may be one that an earlier copy planted.
            if info is None or not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
                self.got.left_out += 1
                return
            parent = self._directory(parts[:-1])
            try:
                clear(parent, parts[-1])
                os.link(source[-1], parts[-1], src_dir_fd=of, dst_dir_fd=parent, follow_symlinks=False)
            finally:
                os.close(parent)
        finally:
            os.close(of)

    def _chmod(self, name: bytes, mode: int) -> None:
        parts = [p for p in name.split(b"/") if p]
        at = os.dup(self._root)
        try:
            for part in parts:
                below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
                os.close(at)
                at = below
            if parts:
                os.fchmod(at, mode)
        except OSError:
            pass  # a later entry took its place
        finally:
            os.close(at)


def is_directory(parent: int, name: bytes) -> bool:
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def clear(parent: int, name: bytes) -> None:
    """Removes what has a name, unless it is a directory."""
    try:
        os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        pass
    except (IsADirectoryError, PermissionError) as err:
        if is_directory(parent, name):
            raise UnsafeArchive(f"{name[:200]!r} is a directory here, and not in the archive") from err
        raise


def leads_outside(parts: list[bytes], target: bytes) -> bool:
    """Whether a symbolic link may lead out of the tree.

    Its own directory is real, so the ".." at its beginning are reliable. A later ".." may follow another link.
    """
    if not target or target.startswith(b"/") or b"\\" in target or b"\0" in target:
        return True
    up = 0
    down = False
    for element in target.split(b"/"):
        if element in (b"", b"."):
            continue
        if element != b"..":
            down = True
        elif down:
            return True
        else:
            up += 1
    return up > len(parts) - 1


def pack(directory: Path) -> Iterator[bytes]:
    """The content of a directory as an archive, in pieces, with names relative to it. Owners become root."""
    for path in walk(directory):
        name = str(path.relative_to(directory))
        info = tarfile.TarInfo(name)
        at = path.lstat()
        info.mode, info.mtime = stat.S_IMODE(at.st_mode) & 0o777, int(at.st_mtime)
        if stat.S_ISDIR(at.st_mode):
            info.type = tarfile.DIRTYPE
            yield info.tobuf(tarfile.PAX_FORMAT)
        elif stat.S_ISLNK(at.st_mode):
            info.type, info.linkname = tarfile.SYMTYPE, os.readlink(path)
            yield info.tobuf(tarfile.PAX_FORMAT)
        elif stat.S_ISREG(at.st_mode):
            yield from pack_file(path, info)
        else:
            raise ValueError(f"{path} is neither a file, a directory nor a symbolic link")
    yield bytes(2 * BLOCK)


def pack_file(path: Path, info: tarfile.TarInfo) -> Iterator[bytes]:
    with path.open("rb") as f:
        info.size = left = os.fstat(f.fileno()).st_size
        yield info.tobuf(tarfile.PAX_FORMAT)
        while left:
            piece = f.read(min(left, 1 << 18))
            if not piece:
                raise ValueError(f"{path} shrank while it was read")
            left -= len(piece)
            yield piece
    yield bytes(-info.size % BLOCK)


def walk(directory: Path) -> Iterator[Path]:
    for entry in sorted(os.scandir(directory), key=lambda e: e.name):
        path = Path(entry.path)
        yield path
        if entry.is_dir(follow_symlinks=False):
            yield from walk(path)

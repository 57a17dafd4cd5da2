"""The files of a workspace."""

from __future__ import annotations

import os
import posixpath
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, List, Protocol, Union, runtime_checkable

from .. import _operations as op
from .. import _policy as policy
from .. import models
from .._errors import ProtocolError
from .._policy import Call
from .._tar import DEFAULT_BYTES, DEFAULT_ENTRIES, Copied, Extractor, pack
from . import runtime
from .transport import AsyncTransport, read_bounded



@runtime_checkable
class Readable(Protocol):
    """A file that is open for reading bytes."""

    def read(self, size: int, /) -> bytes: ...


Archive = Union[bytes, Readable, Iterable[bytes]]
Content = Union[str, Archive]


class AsyncFiles:
    """Reads and writes the files of one workspace. Paths are absolute, in the guest.

    `user` is who does the work: a name or a number, and perhaps `:group`; root otherwise. With a user, a path may begin
    with `~`, and what the user may not do raises FileDenied.
    """

    def __init__(self, transport: AsyncTransport, workspace_id: str) -> None:
        self._t = transport
        self._id = workspace_id

    async def read(self, path: str, *, limit: int = 256 << 20, user: str | None = None) -> bytes:
        """The bytes of a file; a file of more than `limit` bytes is an error."""
        async with self._t.stream(self._call(op.getFile, path, user=user)) as answer:
            return await read_bounded(answer, limit, f"read {path}")

    async def read_text(
        self, path: str, *, encoding: str = "utf-8", limit: int = 256 << 20, user: str | None = None
    ) -> str:
        return (await self.read(path, limit=limit, user=user)).decode(encoding)

    async def stream(self, path: str, *, user: str | None = None) -> AsyncIterator[bytes]:
        """The bytes of a file, as they arrive."""
        async with self._t.stream(self._call(op.getFile, path, user=user)) as answer:
            async for piece in answer.aiter_raw():
                yield piece

    async def write(
        self,
        path: str,
        data: Content,
        *,
        mode: int | None = None,
        uid: int | None = None,
        gid: int | None = None,
        mkdirs: bool = True,
        in_place: bool = False,
        user: str | None = None,
    ) -> models.FileInfo:
        """Writes a file. A reader sees the old file or the complete new one. A text is written as UTF-8.

        With `in_place`, it is written into the file itself, which keeps its owner and mode; a reader may see a part.
        """
        call = self._call(op.putFile, path, user=user, in_place=in_place)
        call.query.update(mode=None if mode is None else f"{mode:04o}", uid=uid, gid=gid, mkdirs=mkdirs)
        return await self._put(call, body_of(data))

    async def stat(self, path: str, *, user: str | None = None) -> models.FileInfo:
        """Describes a path. Symbolic links are followed."""
        return await self._t.call(self._call(op.getFile, path, stat=True, user=user), models.FileInfo)

    async def exists(self, path: str) -> bool:
        from .._codes import FileNotFound

        try:
            await self.stat(path)
        except FileNotFound:
            return False
        return True

    async def list(self, path: str, *, user: str | None = None) -> List[models.FileInfo]:
        """The entries of a directory, at most 10,000."""
        return (await self._t.call(self._call(op.getFile, path, list=True, user=user), models.FileList)).entries

    async def remove(self, path: str, *, recursive: bool = False, user: str | None = None) -> None:
        """Removes a file or, with `recursive`, a directory and everything in it."""
        await self._t.run(self._call(op.deleteFile, path, recursive=recursive, user=user))

    async def mkdir(
        self, path: str, *, parents: bool = False, mode: int | None = None, user: str | None = None
    ) -> models.MadeDirectory:
        """Makes a directory. With `parents`, also those above it, and it is no error if it exists."""
        body = models.MakeDirectoryRequest(
            path=absolute(path, user), parents=parents or None, mode=None if mode is None else f"{mode:04o}", user=user
        )
        return await self._t.call(self._work(op.makeDirectory, body), models.MadeDirectory)

    async def rename(
        self, source: str, target: str, *, mkdirs: bool = False, no_replace: bool = False, user: str | None = None
    ) -> models.FileInfo:
        """Moves a file or a directory. A file that is at `target` is replaced, unless `no_replace` is given.

        With `mkdirs`, the directories above `target` are made. Both paths must be on one file system.
        """
        body = models.RenameFileRequest(
            from_=absolute(source, user), to=absolute(target, user), mkdirs=mkdirs or None, no_replace=no_replace or None,
            user=user,
        )
        return await self._t.call(self._work(op.renameFile, body), models.FileInfo)

    async def set_attributes(
        self,
        path: str,
        *,
        set: Mapping[str, str] | None = None,
        remove: Sequence[str] | None = None,
        user: str | None = None,
    ) -> models.FileInfo:
        """Sets and removes extended attributes of a file or a directory; `xattrs` of the answer has all that it has."""
        body = models.SetFileAttributesRequest(
            path=absolute(path, user), set=dict(set) if set else None, remove=list(remove) if remove else None, user=user
        )
        return await self._t.call(self._work(op.setFileAttributes, body), models.FileInfo)

    async def upload(self, local: str | os.PathLike[str], remote: str) -> None:
        """Copies a file to the path `remote`, or the content of a directory into the directory `remote`.

        Owners become root; modes, times and symbolic links are kept.
        """
        source = Path(local)
        if source.is_dir():
            await self.write_tar(remote, pack(source))
            return
        with source.open("rb") as f:
            await self.write(remote, f, mode=os.fstat(f.fileno()).st_mode & 0o777)

    async def download(
        self,
        remote: str,
        local: str | os.PathLike[str],
        *,
        max_bytes: int = DEFAULT_BYTES,
        max_entries: int = DEFAULT_ENTRIES,
    ) -> Copied:
        """Copies a file to the path `local`, or the content of a directory into the directory `local`.

        The guest controls what is in the archive, so nothing is written outside of `local`: below it, a link in the way
        is replaced and never followed; links that lead outside, devices and pipes are left out; bytes and entries are
        bounded.
        """
        target = Path(local)
        if (await self.stat(remote)).type != "dir":
            return await self._download_file(remote, target, max_bytes)
        target.mkdir(parents=True, exist_ok=True)
        top = posixpath.basename(posixpath.normpath(remote)).encode()
        with Extractor(target, top, max_bytes=max_bytes, max_entries=max_entries) as extractor:
            async for piece in self.read_tar(remote):
                extractor.feed(piece)
            return extractor.finish()

    async def _download_file(self, remote: str, target: Path, max_bytes: int) -> Copied:
        if target.is_dir():
            target = target / posixpath.basename(remote)
        temporary = target.with_name(f".coppice-{policy.new_key()}")
        copied = Copied(entries=1)
        try:
            with temporary.open("xb") as f:
                async for piece in self.stream(remote):
                    copied.bytes += len(piece)
                    if copied.bytes > max_bytes:
                        raise ProtocolError(f"{remote} has more than {max_bytes} bytes: raise max_bytes to copy it")
                    f.write(piece)
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return copied

    async def read_tar(self, path: str) -> AsyncIterator[bytes]:
        """A file or a tree as an archive. Its names begin with the last element of `path`.

        The guest controls what is in it. If it could not read everything, the archive has no end mark.
        """
        async with self._t.stream(self._call(op.getFile, path, tar=True)) as answer:
            async for piece in answer.aiter_raw():
                yield piece

    async def write_tar(self, directory: str, archive: Content) -> None:
        """Unpacks an archive below a directory."""
        call = self._call(op.putFile, directory, untar=True)
        call.content_type = "application/x-tar"
        await self._put(call, body_of(archive))

    async def _put(self, call: Call, body: bytes | Iterable[bytes]) -> models.FileInfo:
        call.content = body if isinstance(body, bytes) else runtime.body(body)
        return await self._t.call(call, models.FileInfo)

    def _call(self, operation: op.Operation, path: str, **flags: Any) -> Call:
        query = {"path": absolute(path, flags.get("user")), **{k: v for k, v in flags.items() if v}}
        return Call(operation, {"workspace_id": self._id}, query)

    def _work(self, operation: op.Operation, body: Any) -> Call:
        return Call(operation, {"workspace_id": self._id}, body=body)


def absolute(path: str, user: str | None = None) -> str:
    """Refuses a path that depends on a working directory. `~` is the home of the user who does the work."""
    if path.startswith("/") or user is not None and (path == "~" or path.startswith("~/")):
        return path
    raise ValueError(f"{path!r} is not an absolute path")


def body_of(data: Content) -> bytes | Iterable[bytes]:
    if isinstance(data, str):
        return data.encode()
    if isinstance(data, (bytes, bytearray, memoryview)):
        return bytes(data)
    if isinstance(data, Readable):
        return pieces(data)
    return data


def pieces(f: Readable) -> Iterable[bytes]:
    while piece := f.read(1 << 18):
        yield piece

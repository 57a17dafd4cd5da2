"""What changes in the directories of a workspace."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, List

from .. import _operations as op
from .. import _policy as policy
from .. import models
from .._errors import ConnectionFailedError, ProtocolError
from .._policy import Call
from .files import absolute
from .transport import AsyncTransport

MAX_LINE = 128 << 10
"""The longest line of an event: a path, which is there twice, and a few words."""


class AsyncWatches:
    """The watches of one workspace. They are in the workspace, and go on while nobody reads their events."""

    def __init__(self, transport: AsyncTransport, workspace_id: str) -> None:
        self._t = transport
        self._id = workspace_id

    async def create(self, path: str, *, recursive: bool = False, user: str | None = None) -> models.Watch:
        """Watches a directory; with `recursive`, also those below it. `user` must be able to read them; root otherwise."""
        body = models.CreateWatchRequest(path=absolute(path, user), recursive=recursive or None, user=user)
        return await self._t.call(self._call(op.createWatch, body=body), models.Watch)

    async def list(self) -> List[models.Watch]:
        """The watches, oldest first."""
        return (await self._t.call(self._call(op.listWatches), models.WatchList)).items

    async def delete(self, watch_id: str) -> None:
        """Ends a watch and the streams of its events."""
        await self._t.run(self._call(op.deleteWatch, watch_id=watch_id))

    async def events(self, watch_id: str, *, after: int = 0, follow: bool = False) -> AsyncIterator[models.WatchEvent]:
        """The events with numbers greater than `after`; with `follow`, also those to come, until the watch ends.

        It does not connect again by itself: after ConnectionFailedError, give the `seq` of the last event as `after`. A
        server that stops may end the stream, too: `list` says whether the watch has ended. An event of the type
        `overflow` stands for lost ones. The guest controls the names.
        """
        call = self._call(op.getWatchEvents, watch_id=watch_id)
        call.query = {"after": after or None, "follow": follow or None}
        if follow:
            call.read_timeout = None  # nothing comes while nothing changes
        pending = b""
        async with self._t.stream(call) as answer:
            async for piece in answer.aiter_raw():
                *lines, pending = (pending + piece).split(b"\n")
                for line in lines:
                    if line:
                        yield policy.decode(bounded(line), models.WatchEvent, "events of a watch")
                bounded(pending)
        if pending:
            raise ConnectionFailedError(f"watch {watch_id}: its events broke off within one")

    def _call(self, operation: op.Operation, *, body: Any = None, **path: str) -> Call:
        return Call(operation, {"workspace_id": self._id, **path}, body=body)


def bounded(line: bytes) -> bytes:
    if len(line) > MAX_LINE:
        raise ProtocolError(f"events of a watch: one event has more than {MAX_LINE} bytes")
    return line

"""The stream of events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from .. import _operations as op
from .. import _policy as policy
from .. import models
from .._errors import APIError, ConnectionFailedError, ProtocolError
from .._policy import Call
from . import runtime
from .transport import AsyncTransport

SILENCE = 50.0  # the server sends something at least every 15 seconds
MAX_LINE = 1 << 20
PAUSE = 1.0
AWAY = 600
"""How often it connects again without having received anything, with a pause of about a second."""


class AsyncEvents:
    """Reads server-sent events over any number of connections."""

    def __init__(self, transport: AsyncTransport, query: dict[str, Any], after: str | None) -> None:
        self._t = transport
        self._query = query
        self._last = after
        self._follow = query.get("follow") is not False

    async def read(self) -> AsyncIterator[models.Event]:
        failures = 0
        while True:
            try:
                async for event in self._connection():
                    failures = 0
                    if event is not None:
                        yield event
                if not self._follow:
                    return
            except ConnectionFailedError:
                failures += 1
                if failures > AWAY:
                    raise
            except APIError as err:
                failures += 1
                if failures > AWAY or err.status < 500 and err.code != "RATE_LIMITED":
                    raise  # EVENTS_EXPIRED: it was away for longer than events are kept
            await runtime.sleep(PAUSE)

    async def _connection(self) -> AsyncIterator[models.Event | None]:
        """The events of one connection; None for a sign of life."""
        call = Call(op.streamEvents, query=self._query, read_timeout=SILENCE)
        if self._last is not None:
            call.headers["last-event-id"] = self._last
        pending = b""
        data = b""
        last = self._last
        async with self._t.stream(call) as answer:
            async for piece in answer.aiter_raw():
                pending += piece
                lines = pending.split(b"\n")
                pending = lines.pop()
                for line in lines:
                    line = line.removesuffix(b"\r")
                    if not line:
                        self._last = last  # only now: a connection that breaks within an event has not brought it
                        yield policy.decode(data, models.Event, "events") if data else None
                        data = b""
                        continue
                    name, _, value = line.partition(b":")
                    value = value.removeprefix(b" ")
                    if name == b"id":
                        last = value.decode("ascii", "replace")
                    elif name == b"data":
                        data += value
                if len(pending) + len(data) > MAX_LINE:
                    raise ProtocolError(f"events: one event has more than {MAX_LINE} bytes")

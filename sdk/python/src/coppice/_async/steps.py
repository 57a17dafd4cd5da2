"""The streamed results of a step."""

from __future__ import annotations

from collections.abc import AsyncIterator

from .. import _policy as policy
from .. import models
from .._errors import ConnectionFailedError, CoppiceError, ProtocolError
from .._policy import Call
from . import runtime
from .transport import AsyncTransport

MAX_LINE = 2 << 20
"""The longest result of an action, most of which comes from a guest."""
MAX_SILENCE = 60.0
"""The server sends a line at least every 15 seconds."""


class AsyncStepStream:
    """Reads the results of one step over any number of connections."""

    def __init__(self, transport: AsyncTransport, call: Call) -> None:
        self._t = transport
        self._call = call
        self._operation = ""
        self._had: set[int] = set()
        self._ended = False

    async def read(self) -> AsyncIterator[models.StepEvent]:
        call = self._call
        call.headers["accept"] = "application/x-ndjson"
        call.read_timeout = MAX_SILENCE
        policy.prepare(call)  # all requests have the same key
        tries = policy.Retries(self._t.config, call)
        away = policy.Away(self._t.config)
        while True:
            try:
                async for event in self._answer(away):
                    yield event
                if self._ended:
                    return
                raise ConnectionFailedError("the results of the step broke off")
            except CoppiceError as err:
                if self._ended:
                    raise
                pause = away.pause(err)
                if pause is None or tries.expired():
                    raise
            await runtime.sleep(pause)

    async def _answer(self, away: policy.Away) -> AsyncIterator[models.StepEvent]:
        """What is new in one answer."""
        pending = b""
        async with self._t.stream(self._call) as answer:
            async for piece in answer.aiter_raw():
                *lines, pending = (pending + piece).split(b"\n")
                for line in lines:
                    event = policy.decode(bounded(line), models.StepEvent, "results of a step")
                    away.back()
                    if event.state == "failed":
                        self._ended = True
                        raise policy.failure(event.problem, f"operation {event.operation_id}", event.operation_id)
                    if event.state:
                        self._ended = True
                        return
                    if self._new(event):
                        yield event
                bounded(pending)

    def _new(self, event: models.StepEvent) -> bool:
        """Whether it is no sign of life, and no earlier answer had it."""
        if event.action is None:
            new, self._operation = not self._operation, event.operation_id
            return new
        new = event.action.index not in self._had
        self._had.add(event.action.index)
        return new


def bounded(line: bytes) -> bytes:
    if len(line) > MAX_LINE:
        raise ProtocolError(f"results of a step: one has more than {MAX_LINE} bytes")
    return line

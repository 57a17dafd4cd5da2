"""What both clients decide alike: what is repeated, how long they pause, and what an answer means. No I/O."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from . import models
from ._codes import BY_CODE
from ._connection import Config
from ._errors import APIError, ConnectionFailedError, CoppiceError, ProtocolError, class_for_status
from ._operations import Operation

T = TypeVar("T")

MAX_ANSWER = 64 << 20
"""The most bytes that are read of an answer that must fit in memory."""
MAX_PROBLEM = 1 << 20
FIRST_PAUSE = 0.05
WAIT_SECONDS = 30
"""How long one request waits for an operation; then the client asks again."""
KEY_LIFE = 23 * 3600.0
"""The server keeps an idempotency key for a day. After that a repeat would do the work again."""
SLACK = 60.0
"""How long an answer may take beyond the call's own timeout."""

# Codes with which the server itself says that it did nothing, or cannot say what it did, for the moment. Errors of a
# machine or a guest (GUEST_UNREACHABLE, COMMAND_NOT_FOUND, …) are answers: they are never repeated.
TRANSIENT = frozenset({"DATABASE_UNAVAILABLE", "CONTROLLER_STOPPING"})
READ_TRANSIENT = TRANSIENT | {"RUNNER_UNREACHABLE", "TIMED_OUT"}


@dataclass
class Call:
    """One call of an operation of the contract."""

    op: Operation
    path: Mapping[str, str] = field(default_factory=dict)
    query: dict[str, Any] = field(default_factory=dict)
    body: Any = None
    content: Any = None
    """A body that is streamed. Such a call is repeated only if no connection could be made."""
    content_type: str = "application/octet-stream"
    headers: dict[str, str] = field(default_factory=dict)
    key: str = ""
    read_timeout: float | None = -1
    """Seconds; None waits for ever, -1 is the client's usual time."""

    lost: bool = False
    """A try of it was lost after it was sent: the server may have done it."""

    @property
    def repeatable(self) -> bool:
        return self.content is None and (self.op.method in ("GET", "HEAD", "DELETE", "PUT") or bool(self.key))

    def url(self, base: str) -> str:
        return base + self.op.path.format(**{k: escape(v) for k, v in self.path.items()})

    def parameters(self) -> list[tuple[str, str]]:
        out: list[tuple[str, str]] = []
        for name, value in self.query.items():
            values = value if isinstance(value, (list, tuple)) else [value]
            out += [(name, text(v)) for v in values if v is not None]
        return out


def escape(segment: str) -> str:
    """A segment of a path. A name of dots alone would be taken for a direction."""
    if not segment or set(segment) == {"."}:
        raise ValueError(f"{segment!r} is not an id")
    return quote(segment, safe="")


def text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def new_key() -> str:
    return "py-" + secrets.token_urlsafe(24)


def prepare(call: Call) -> None:
    """Gives a call that creates something its key, and refuses a key that cannot stand in a header."""
    if call.op.keyed and not call.key:
        call.key = new_key()
    if len(call.key) > 255 or any(c < " " or c > "~" for c in call.key):
        raise ValueError("an idempotency key must be 1 to 255 printable ASCII characters")


class Retries:
    """The tries of one call."""

    def __init__(self, config: Config, call: Call) -> None:
        self.config = config
        self.call = call
        self.left = config.retries
        self.pause = FIRST_PAUSE
        self.busy = 0.0  # when the server first said that it works on it
        self.first = time.time()  # the server's clock goes on while this machine sleeps; time.monotonic may not
        self.gone = 0.0  # when the connection was first lost

    def after_lost(self, sent: bool) -> float | None:
        """The pause before the next try after a lost connection; None: there is none."""
        if sent and not self.call.repeatable:
            return None
        if self.expired():
            return None
        self.gone = self.gone or time.monotonic()
        if self.left <= 0 and self.call.key and self.call.lost and time.monotonic() - self.gone < self.config.away:
            return min(1.0, self.config.max_pause)  # the work may go on while the server is started again
        return self._next(0)

    def after_answer(self, error: APIError) -> float | None:
        """The same after a refusal."""
        self.gone = 0.0
        if self.call.content is not None or self.expired():
            return None
        if error.code == "IDEMPOTENCY_IN_PROGRESS" and not error.operation_id and self.call.key:
            # The server has the first try and works on it; that may take as long as the call's timeout.
            allowed = self.call.read_timeout
            self.busy = self.busy or time.monotonic()
            if allowed is not None and allowed >= 0 and time.monotonic() - self.busy > allowed + SLACK:
                return None
            self.left += 1
            return self._next(error.retry_after or 0)
        if error.code == "RATE_LIMITED":  # refused before anything was done
            return self._next(error.retry_after or 0)
        if not self.call.repeatable or error.status not in (502, 503, 504):
            return None
        reads = self.call.op.method in ("GET", "HEAD")
        if error.code.startswith("HTTP_") or error.code in (READ_TRANSIENT if reads else TRANSIENT):
            return self._next(error.retry_after or 0)
        return None

    def expired(self) -> bool:
        """Whether the server may have forgotten the call's key, so that it would do a repetition anew."""
        return bool(self.call.key) and time.time() - self.first > KEY_LIFE

    def _next(self, wanted: float) -> float | None:
        if self.left <= 0 or wanted > self.config.max_retry_after:
            return None
        self.left -= 1
        pause = max(wanted, self.pause * (0.5 + random.random()))
        self.pause = min(2 * self.pause, self.config.max_pause)
        return pause


def transient(err: CoppiceError) -> bool:
    """Whether the server may be back soon."""
    if isinstance(err, APIError):
        return err.status != 0 and (err.code in READ_TRANSIENT or err.code in ("HTTP_502", "HTTP_503", "HTTP_504", "RATE_LIMITED"))
    return isinstance(err, ConnectionFailedError)


class Away:
    """Bears a server that is away, during a wait that only reads: errors count when it is away for too long."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.since: float | None = None

    def back(self) -> None:
        self.since = None

    def pause(self, err: CoppiceError) -> float | None:
        """The pause before the next try; None: there is none."""
        now = time.monotonic()
        self.since = now if self.since is None else self.since
        if not transient(err) or now - self.since > self.config.away:
            return None
        return min(1.0, self.config.max_pause)


def refusal(status: int, headers: Mapping[str, str], body: bytes, what: str) -> APIError:
    """An answer of 400 or more as an exception. If it is not a problem document, it comes from a proxy."""
    retry_after = seconds(headers.get("retry-after", ""))
    request_id = headers.get("x-request-id", "")
    try:
        p = msgspec.json.decode(body, type=models.Problem)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        code = f"HTTP_{status}"
        return class_for_status(status)(
            f"{what} answered {status}", code=code, status=status, request_id=request_id, retry_after=retry_after
        )
    return BY_CODE.get(p.code, class_for_status(status))(
        p.detail,
        code=p.code,
        status=status,
        request_id=p.request_id or request_id,
        operation_id=p.operation_id or "",
        fields=p.fields,
        current_version=p.current_version,
        retry_after=retry_after,
    )


def failure(f: models.Failure | None, what: str, operation_id: str = "") -> APIError:
    """The failure of an operation, or of a child of a fork."""
    f = f or models.Failure(code="INTERNAL", message=what + " failed")
    return BY_CODE.get(f.code, APIError)(
        f.message, code=f.code, operation_id=operation_id, recover_from=f.recover_from
    )


def seconds(value: str) -> float | None:
    """The value of Retry-After, which this API gives in seconds only."""
    return float(value) if value.isascii() and value.isdigit() and len(value) < 10 else None


def decode(data: bytes, kind: type[T], what: str) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
        raise ProtocolError(f"{what}: the answer does not have the form of the contract: {err}") from err


def convert(value: Any, kind: type[T], what: str) -> T:
    try:
        return msgspec.convert(value, type=kind)
    except (msgspec.ValidationError, RecursionError) as err:
        raise ProtocolError(f"{what}: the answer does not have the form of the contract: {err}") from err

"""What running a program gives."""

from __future__ import annotations

import base64
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Union

from . import models
from ._errors import CommandFailed, ProtocolError

Command = Union[str, Sequence[str]]
"""A line for `sh -c`, or a program with its arguments, which no shell sees."""


def words(command: Command) -> list[str]:
    return ["sh", "-c", command] if isinstance(command, str) else list(command)


def shown(command: Command) -> str:
    text = command if isinstance(command, str) else shlex.join(command)
    return text if len(text) <= 200 else text[:200] + "…"


@dataclass(frozen=True)
class Result:
    """How a program ended, and the end of its output."""

    command: str
    exit_code: int
    """128 + signal if a signal ended it."""
    stdout_bytes: bytes
    stderr_bytes: bytes
    timed_out: bool = False
    signal: str = ""
    stdout_truncated: bool = False
    """The beginning of `stdout` is missing."""
    stderr_truncated: bool = False
    session_id: str = ""
    duration: float = 0.0
    """Seconds between its start and its end, by the guest's clock."""

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not self.timed_out

    @property
    def stdout(self) -> str:
        return self.stdout_bytes.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        return self.stderr_bytes.decode("utf-8", "replace")

    def check(self) -> Result:
        """Returns itself; raises CommandFailed if the program failed."""
        if not self.ok:
            raise CommandFailed(self.command, self, self.exit_code, "timed out" if self.timed_out else self.stderr)
        return self

    def __str__(self) -> str:
        return self.stdout


@dataclass(frozen=True)
class Output:
    """A piece of what a program wrote."""

    stream: str
    """`stdout` or `stderr`."""
    data: bytes
    offset: int
    """The position of its first byte in the stream."""

    @property
    def text(self) -> str:
        return self.data.decode("utf-8", "replace")


@dataclass
class Tail:
    """Collects output, and keeps the last `limit` bytes of it."""

    limit: int = 1 << 20
    data: bytearray = field(default_factory=bytearray)
    truncated: bool = False

    def add(self, piece: bytes) -> None:
        self.data += piece
        if len(self.data) > 2 * self.limit:
            self.trim()

    def trim(self) -> bytes:
        if len(self.data) > self.limit:
            self.truncated = True
            del self.data[: -self.limit]
        return bytes(self.data)


def result_of(command: str, r: models.ExecResult) -> Result:
    def raw(text: str) -> bytes:
        if r.encoding != "base64":
            return text.encode("utf-8", "surrogatepass")
        try:
            return base64.b64decode(text, validate=True)
        except ValueError:
            raise ProtocolError("exec: the output is not the base64 that it is said to be") from None

    return Result(
        command=command,
        exit_code=r.exit_code,
        stdout_bytes=raw(r.stdout),
        stderr_bytes=raw(r.stderr),
        timed_out=r.timed_out,
        signal=r.signal or "",
        stdout_truncated=r.stdout_truncated,
        stderr_truncated=r.stderr_truncated,
        session_id=r.session.id,
        duration=duration(r.session),
    )


def duration(s: models.Session) -> float:
    return max(0.0, (s.ended_at - s.started_at).total_seconds()) if s.ended_at else 0.0


def milliseconds(timeout: float) -> int:
    """A time as the API has it. There, 0 is no timeout, so it never becomes 0."""
    if timeout <= 0:
        raise ValueError("timeout must be positive; None is no timeout")
    return max(1, int(timeout * 1000))


def exec_request(
    command: Command,
    *,
    stdin: str | bytes | None,
    env: dict[str, str] | None,
    cwd: str | None,
    user: str | None,
    timeout: float | None,
    wait: bool,
    stdin_open: bool | None = None,
    pty: tuple[int, int] | None = None,
) -> models.ExecRequest:
    """The request that runs a program. `pty` has columns and rows."""
    request = models.ExecRequest(
        command=words(command), env=env or None, cwd=cwd, user=user, wait=wait, stdin_open=stdin_open,
        timeout_ms=None if timeout is None else milliseconds(timeout),
    )
    if isinstance(stdin, str):
        request.stdin = stdin or None
    elif stdin:
        request.stdin_base64 = stdin
    if pty is not None:
        request.pty, (request.cols, request.rows) = True, pty
    return request


@dataclass
class Diff:
    """What differs between two checkpoints."""

    files: list[models.FileChange]
    files_complete: bool
    unreadable: int
    processes: models.ProcessChanges | None
    memory_changed_bytes: int | None
    identity_unknown: bool = False

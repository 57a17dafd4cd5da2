"""Programs that run in a workspace."""

from __future__ import annotations

import ssl
import struct
import time
from collections.abc import AsyncIterator, Callable
from typing import Any
from urllib.parse import urlencode, urlsplit

import msgspec

from .. import _operations as op
from .. import _policy as policy
from .. import models
from .._errors import ConfigurationError, ConnectionFailedError, CoppiceError, OutputLost, ProtocolError, WaitTimeout
from .._policy import Call
from .._results import Output, Result, Tail, duration, milliseconds, shown
from . import runtime
from .transport import AsyncTransport

HEAD = struct.Struct(">BQ")  # of a binary message: stream, offset
MAX_MESSAGE = 4 << 20
STREAMS = {1: "stdout", 2: "stderr"}
RECONNECTS = 5
"""How often a stream connects again without having received a byte."""


class AsyncAttached:
    """A live connection to a session. Its end does not affect the session."""

    def __init__(self, socket: runtime.AsyncSocket) -> None:
        self._socket = socket

    async def __aenter__(self) -> AsyncAttached:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def receive(self) -> Output | models.AttachMessage | None:
        """The next output or message; after the message `exit` there is nothing more."""
        message = await self._socket.receive()
        if message is None:
            return None
        if isinstance(message, str):
            return policy.decode(message.encode(), models.AttachMessage, "attach")
        if len(message) < HEAD.size:
            raise ProtocolError(f"attach: a message of {len(message)} bytes")
        stream, offset = HEAD.unpack_from(message)
        if stream not in STREAMS:
            raise ProtocolError(f"attach: output of a stream {stream}")
        return Output(STREAMS[stream], message[HEAD.size :], offset)

    async def write(self, data: str | bytes) -> None:
        """Sends data to standard input."""
        await self._socket.send(data.encode() if isinstance(data, str) else bytes(data))

    async def resize(self, cols: int, rows: int) -> None:
        await self._send(models.AttachMessage(type="resize", cols=cols, rows=rows))

    async def signal(self, name: str) -> None:
        """Sends a signal, such as SIGINT, to the foreground processes."""
        await self._send(models.AttachMessage(type="signal", signal=name))

    async def close_stdin(self) -> None:
        await self._send(models.AttachMessage(type="close_stdin"))

    async def _send(self, message: models.AttachMessage) -> None:
        await self._socket.send(msgspec.json.encode(message).decode())

    async def aclose(self) -> None:
        await self._socket.aclose()


class AsyncSession:
    """A program that was started in a workspace. It goes on when the client ends."""

    def __init__(self, transport: AsyncTransport, info: models.Session) -> None:
        self._t = transport
        self.info = info
        """What was known when it was last asked for."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self.info.state} {shown(self.info.command)!r}>"

    @property
    def id(self) -> str:
        return self.info.id

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self.info.exit_code

    async def refresh(self) -> AsyncSession:
        self.info = await self._t.call(self._call(op.getSession), models.Session)
        return self

    async def wait(self, timeout: float | None = None) -> int:
        """Waits for the end of the program and returns its exit code. None waits as long as it runs."""
        deadline = None if timeout is None else time.monotonic() + timeout
        away = policy.Away(self._t.config)
        while True:
            seconds = policy.WAIT_SECONDS
            if deadline is not None:
                seconds = max(0, min(seconds, int(deadline - time.monotonic() + 0.999)))
            call = self._call(op.getSession)
            call.query = {"wait": seconds}
            call.read_timeout = policy.WAIT_SECONDS + self._t.config.read_timeout
            try:
                self.info = await self._t.call(call, models.Session)
            except CoppiceError as err:
                pause = away.pause(err)
                if pause is None:
                    raise
                await runtime.sleep(pause)
                continue
            away.back()
            if self.info.state == "exited":
                return self.info.exit_code if self.info.exit_code is not None else -1
            if deadline is not None and time.monotonic() >= deadline:
                raise WaitTimeout(f"session {self.id} still runs after {timeout} seconds; it goes on")

    async def stream(self, *, stdout_offset: int = 0, stderr_offset: int = 0) -> AsyncIterator[Output]:
        """All output, as it arrives, until the program has ended; `info` then says how.

        After a lost connection it continues where it was. Bytes that the session no longer keeps raise OutputLost.
        """
        at = {"stdout": stdout_offset, "stderr": stderr_offset}
        failures = 0
        away = policy.Away(self._t.config)
        while True:
            try:
                attached = await self.attach(stdout_offset=at["stdout"], stderr_offset=at["stderr"])
            except CoppiceError as err:
                pause = away.pause(err)
                if pause is None:
                    raise
                await runtime.sleep(pause)
                continue
            away.back()
            try:
                while True:
                    message = await attached.receive()
                    if isinstance(message, Output):
                        piece = continued(message, at, self.id)
                        if piece is not None:
                            failures = 0
                            yield piece
                    elif message is None:
                        break
                    elif message.type == "exit":
                        await self.refresh()
                        return
                    elif message.type == "truncated":
                        raise OutputLost(
                            f"session {self.id}: bytes {message.from_ or 0} to {message.to} of {message.stream} are no longer kept"
                        )
            except ConnectionFailedError:
                pass
            finally:
                await attached.aclose()
            failures += 1
            if failures > RECONNECTS:
                raise ConnectionFailedError(f"session {self.id}: its output broke off {failures} times")

    async def result(
        self,
        on_stdout: Callable[[str], Any] | None = None,
        on_stderr: Callable[[str], Any] | None = None,
        *,
        limit: int = 1 << 20,
    ) -> Result:
        """Follows the output to its end. The result has the last `limit` bytes of each stream."""
        tails = {"stdout": Tail(limit), "stderr": Tail(limit)}
        texts = {"stdout": Text(on_stdout), "stderr": Text(on_stderr)}
        async for piece in self.stream():
            tails[piece.stream].add(piece.data)
            await self._tell(texts[piece.stream], piece.data)
        for name in texts:
            await self._tell(texts[name], b"", last=True)
        info = self.info
        return Result(
            command=shown(info.command),
            exit_code=info.exit_code if info.exit_code is not None else -1,
            stdout_bytes=tails["stdout"].trim(),
            stderr_bytes=tails["stderr"].trim(),
            timed_out=info.timed_out,
            signal=info.signal or "",
            stdout_truncated=tails["stdout"].truncated,
            stderr_truncated=tails["stderr"].truncated,
            session_id=info.id,
            duration=duration(info),
        )

    async def _tell(self, to: Text, data: bytes, last: bool = False) -> None:
        said = to.feed(data, last)
        if said is not None and hasattr(said, "__await__"):
            await said

    async def attach(self, *, stdout_offset: int = 0, stderr_offset: int = 0) -> AsyncAttached:
        """Connects to the program: straight to its runner if that can be reached, otherwise through the server."""
        offsets = {"stdout_offset": stdout_offset, "stderr_offset": stderr_offset}
        grant = await self._grant({})
        if urlsplit(grant.url).scheme:
            try:
                return await self._dial(grant, offsets)
            except ConnectionFailedError:
                grant = await self._grant({"via": "controller"})
        return await self._dial(grant, offsets)

    async def _grant(self, query: dict[str, Any]) -> models.Attachment:
        call = self._call(op.attachSession)
        call.query = query
        grant = await self._t.call(call, models.Attachment)
        if grant.transport != "websocket":
            raise ProtocolError(f"attach: the server offers transport {grant.transport!r}, which this client does not speak")
        return grant

    async def _dial(self, grant: models.Attachment, offsets: dict[str, int]) -> AsyncAttached:
        from websockets.exceptions import InvalidStatus, WebSocketException

        config = self._t.config
        query: dict[str, Any] = dict(offsets)
        headers: dict[str, str] = {}
        target = urlsplit(grant.url)
        unix, tls, server_name = config.socket, self._t.tls, None
        if target.scheme:
            unix, tls = "", direct_tls(grant.tls) if target.scheme == "https" else None
            server_name = grant.tls.server_name if grant.tls else None
            headers["authorization"] = f"Bearer {grant.token or ''}"
            base = grant.url
        else:
            if not target.path.startswith("/") or target.netloc:
                raise ProtocolError("attach: the server's answer has no address")
            query["token"] = grant.token or ""
            base = config.base + target.path
        url = "ws" + base.removeprefix("http") + ("&" if "?" in base else "?") + urlencode(query)
        options: dict[str, Any] = {"server_hostname": server_name} if server_name else {}
        try:
            socket = await runtime.AsyncSocket.connect(
                url, unix, tls, additional_headers=headers, max_size=MAX_MESSAGE, open_timeout=config.connect_timeout, **options
            )
        except InvalidStatus as err:  # the address has the token in it: it must not be in a message
            answer = err.response
            raise policy.refusal(
                answer.status_code, dict(answer.headers.raw_items()), bytes(answer.body or b"")[: policy.MAX_PROBLEM], "attach"
            ) from None
        except (OSError, WebSocketException, TimeoutError) as err:
            raise ConnectionFailedError(f"attach to session {self.id}: {type(err).__name__}") from None
        return AsyncAttached(socket)

    async def write(self, data: str | bytes, *, close: bool = False) -> None:
        """Writes to standard input; with `close`, closes it afterwards. It waits while the program does not read."""
        call = self._call(op.writeSessionStdin)
        call.query = {"close": close}
        call.content = data.encode() if isinstance(data, str) else bytes(data)
        call.read_timeout = None
        await self._t.run(call)

    async def close_stdin(self) -> None:
        await self.write(b"", close=True)

    async def output(self, stream: str = "stdout", *, offset: int = 0) -> tuple[bytes, int]:
        """What the session keeps of a stream from an offset, and the offset of its first byte."""
        call = self._call(op.getSessionOutput)
        call.query = {"stream": stream, "offset": offset}
        async with self._t.stream(call) as answer:
            from .transport import read_bounded

            data = await read_bounded(answer, 16 << 20, "output")
            first = answer.headers.get("coppice-offset", "")
        return data, int(first) if first.isdigit() else offset

    async def signal(self, name: str) -> None:
        """Sends a signal, such as SIGTERM, to the process group."""
        call = self._call(op.signalSession)
        call.body = models.SignalRequest(signal=name)
        await self._t.run(call)

    async def resize(self, cols: int, rows: int) -> None:
        call = self._call(op.resizeSession)
        call.body = models.ResizeRequest(cols=cols, rows=rows)
        await self._t.run(call)

    async def set_deadline(self, timeout: float | None) -> None:
        """Kills the processes so many seconds from now, instead of an earlier `timeout`. None lets them run on."""
        call = self._call(op.setSessionDeadline)
        call.body = models.DeadlineRequest(timeout_ms=0 if timeout is None else milliseconds(timeout))
        await self._t.run(call)

    async def delete(self) -> None:
        """Kills the processes and forgets the session."""
        await self._t.run(self._call(op.deleteSession))

    def _call(self, operation: op.Operation) -> Call:
        return Call(operation, {"session_id": self.id})


class Text:
    """Decodes the output of one stream for a callback. A character may arrive in two pieces."""

    def __init__(self, to: Callable[[str], Any] | None) -> None:
        import codecs

        self.to = to
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes, last: bool) -> Any:
        text = self.decoder.decode(data, last)
        return self.to(text) if self.to is not None and text else None


def continued(piece: Output, at: dict[str, int], session_id: str) -> Output | None:
    """The part of a piece that is new. It must continue what came before."""
    expected = at[piece.stream]
    if piece.offset > expected:
        raise OutputLost(f"session {session_id}: bytes {expected} to {piece.offset} of {piece.stream} are no longer kept")
    data = piece.data[expected - piece.offset :]
    if not data:
        return None
    at[piece.stream] = expected + len(data)
    return Output(piece.stream, data, expected)


def direct_tls(trust: models.DataTLS | None) -> ssl.SSLContext:
    """What to trust of a runner's data plane."""
    if trust is None:
        return ssl.create_default_context()
    try:
        return ssl.create_default_context(cadata=trust.authority)
    except ssl.SSLError as err:
        raise ConfigurationError("the server sent an authority's certificate that cannot be read") from err

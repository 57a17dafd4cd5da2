"""Streams of sessions over connections that break, and what a hostile server may send."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from coppice import AsyncCoppice, AsyncSession, Config, Coppice, errors
from double import Answer, Double, Request, problem
from samples import AT, SESS, session
from websockets.asyncio.server import ServerConnection, serve

EXIT = json.dumps({"type": "exit", "session": {"exit_code": 0, "timed_out": False}})


def piece(offset: int, data: bytes, stream: int = 1) -> bytes:
    return struct.pack(">BQ", stream, offset) + data


Script = list[list[bytes | str]]


@asynccontextmanager
async def attached(double: Double, script: Script) -> AsyncIterator[tuple[AsyncSession, list[str]]]:
    """A session whose WebSocket sends one list of messages for each connection, and then closes."""
    paths: list[str] = []

    async def handler(connection: ServerConnection) -> None:
        assert connection.request is not None
        paths.append(connection.request.path)
        for message in script[min(len(paths), len(script)) - 1]:
            await connection.send(message)

    async with serve(handler, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]

        def answer(r: Request) -> Answer:
            if r.method == "POST":
                url = f"http://127.0.0.1:{port}/v1/attach/{SESS}"
                return Answer(201, {"transport": "websocket", "url": url, "token": "t", "expires_at": AT})
            return Answer(200, session())

        double.script = [answer]
        async with AsyncCoppice(config=Config(server=double.url, max_pause=0.01)) as c:
            yield await c.session(SESS), paths


def read(double: Double, script: Script) -> tuple[bytes, list[str]]:
    async def main() -> tuple[bytes, list[str]]:
        async with attached(double, script) as (s, paths):
            return b"".join([p.data async for p in s.stream()]), paths

    return asyncio.run(main())


def test_it_continues_where_it_was(double: Double) -> None:
    got, paths = read(double, [[piece(0, b"abc")], [piece(3, b"def")], [piece(4, b"efgh"), EXIT]])
    assert got == b"abcdefgh"
    assert ["stdout_offset=%d" % n in p for n, p in zip((0, 3, 6), paths, strict=True)] == [True] * 3


def test_lost_bytes_are_an_error(double: Double) -> None:
    with pytest.raises(errors.OutputLost):
        read(double, [[piece(0, b"abc"), piece(10, b"x"), EXIT]])
    with pytest.raises(errors.OutputLost):
        read(double, [[json.dumps({"type": "truncated", "stream": "stdout", "from": 0, "to": 5}), EXIT]])


def test_it_gives_up(double: Double) -> None:
    with pytest.raises(errors.ConnectionFailedError):
        read(double, [[]])


@pytest.mark.parametrize("message", [b"", b"\x01short", piece(0, b"x", stream=9), "{", "[]", '{"type": 5}', "[" * 90_000])
def test_a_wrong_message(double: Double, message: bytes | str) -> None:
    with pytest.raises(errors.ProtocolError):
        read(double, [[message]])


def test_offsets_of_a_hostile_server(double: Double) -> None:
    with pytest.raises(errors.OutputLost):
        read(double, [[piece(2**64 - 1, b"x")]])


def test_the_session_is_gone(double: Double) -> None:
    async def main(run: Callable[[AsyncCoppice], Coroutine[Any, Any, None]]) -> None:
        async with AsyncCoppice(config=Config(server=double.url, max_pause=0.01)) as c:
            await run(c)

    async def run(c: AsyncCoppice) -> None:
        s = await c.session(SESS)
        with pytest.raises(errors.SessionNotFound):
            async for _ in s.stream():
                pass

    double.script = [Answer(200, session()), problem(404, "SESSION_NOT_FOUND")]
    asyncio.run(main(run))
    assert len(double.requests) == 2


def test_characters_in_two_pieces(double: Double) -> None:
    said: list[str] = []

    async def main() -> None:
        async with attached(double, [[piece(0, b"\xc3"), piece(1, b"\xbc"), piece(2, b"\xff"), EXIT]]) as (s, _):
            await s.result(said.append)

    asyncio.run(main())
    assert said == ["ü", "\ufffd"]


@pytest.mark.parametrize("url", ["@127.0.0.1:1/v1/attach/x", "//127.0.0.1:1/v1/attach/x", ".example/x", ""])
def test_the_token_goes_to_no_other_server(double: Double, url: str) -> None:
    async def main() -> None:
        async with AsyncCoppice(config=Config(server=double.url)) as c:
            s = await c.session(SESS)
            with pytest.raises(errors.ProtocolError):
                await s.attach()

    double.script = [
        Answer(200, session()),
        Answer(201, {"transport": "websocket", "url": url, "token": "t", "expires_at": AT}),
    ]
    asyncio.run(main())


@pytest.mark.parametrize("kind", ["async", "sync"])
def test_a_redirect_is_not_followed(double: Double, kind: str) -> None:
    """Neither to another path of the same server, nor elsewhere."""

    def answer(r: Request) -> Answer:
        if r.method == "POST":
            url = f"{double.url}/v1/attach/{SESS}"
            return Answer(201, {"transport": "websocket", "url": url, "token": "t", "expires_at": AT})
        if r.path.startswith("/v1/sessions/"):
            return Answer(200, session())
        return Answer(302, headers={"location": "/elsewhere"})

    async def main() -> None:
        async with AsyncCoppice(config=Config(server=double.url)) as c:
            await (await c.session(SESS)).attach()

    double.script = [answer]
    with pytest.raises(errors.APIError) as caught:
        if kind == "async":
            asyncio.run(main())
        else:
            with Coppice(config=Config(server=double.url)) as c:
                c.session(SESS).attach()
    assert caught.value.code == "HTTP_302"
    assert not [r for r in double.requests if r.path == "/elsewhere"]


def test_a_deadline(double: Double) -> None:
    double.script = [Answer(200, session()), Answer(204)]
    with Coppice(config=Config(server=double.url)) as c:
        s = c.session(SESS)
        s.set_deadline(1.5)
        s.set_deadline(0.0001)
        s.set_deadline(None)
        for wrong in (0, -1):
            with pytest.raises(ValueError, match="positive"):
                s.set_deadline(wrong)
    sent = double.requests[1:]
    assert [(r.method, r.path) for r in sent] == [("POST", f"/v1/sessions/{SESS}/deadline")] * 3
    assert [r.json() for r in sent] == [{"timeout_ms": 1500}, {"timeout_ms": 1}, {"timeout_ms": 0}]

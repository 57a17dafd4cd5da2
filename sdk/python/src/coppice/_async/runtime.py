"""What differs between the two clients beyond `await`: connections and time. Written by hand for each."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from .._connection import Config
from .._errors import ConnectionFailedError
from .._http import limits, socket_options, timeouts

if TYPE_CHECKING:
    import httpx
    from websockets.asyncio.client import ClientConnection


def http_client(config: Config, verify: ssl.SSLContext | bool) -> httpx.AsyncClient:
    import httpx  # here, because it is most of the time that the import of this package would take

    transport = httpx.AsyncHTTPTransport(
        verify=verify, uds=config.socket or None, limits=limits(), socket_options=None if config.socket else socket_options()
    )
    return httpx.AsyncClient(
        transport=transport, timeout=timeouts(config), follow_redirects=False, headers={"accept-encoding": "identity"}
    )


async def sleep(seconds: float) -> None:
    await asyncio.sleep(seconds)


class AsyncSocket:
    """A WebSocket."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection

    @classmethod
    async def connect(cls, url: str, unix: str, tls: ssl.SSLContext | None, **options: Any) -> AsyncSocket:
        from websockets.asyncio.client import ClientConnection, connect, unix_connect
        from websockets.exceptions import InvalidStatus

        class Direct(ClientConnection):
            """Follows no redirect: where a session is, the server says in its answer alone."""

            async def handshake(self, *args: Any, **kwargs: Any) -> None:
                try:
                    await super().handshake(*args, **kwargs)
                except InvalidStatus as err:
                    err.response.headers.pop("location", None)
                    raise

        options |= {"compression": None, "proxy": None, "create_connection": Direct}
        if unix:
            return cls(await unix_connect(unix, url, **options))
        return cls(await connect(url, ssl=tls, **options))

    async def receive(self) -> str | bytes | None:
        """The next message; None after an orderly end."""
        from websockets.exceptions import ConnectionClosedOK, WebSocketException

        try:
            return await self._connection.recv()
        except ConnectionClosedOK:
            return None
        except (WebSocketException, OSError) as err:
            raise ConnectionFailedError(f"the connection to the session broke off: {err}") from err

    async def send(self, message: str | bytes) -> None:
        from websockets.exceptions import WebSocketException

        try:
            await self._connection.send(message)
        except (WebSocketException, OSError) as err:
            raise ConnectionFailedError(f"the connection to the session broke off: {err}") from err

    async def aclose(self) -> None:
        await self._connection.close()


async def body(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    """A body that is read while it is sent. Reading may block, so it has a thread."""
    source = iter(pieces)
    while (piece := await asyncio.to_thread(next, source, None)) is not None:
        yield piece


async def every(calls: Sequence[Callable[[], Awaitable[Any]]]) -> list[Exception]:
    """Makes all calls, at once, and returns what failed."""
    results = await asyncio.gather(*(call() for call in calls), return_exceptions=True)
    return [r for r in results if isinstance(r, Exception)]

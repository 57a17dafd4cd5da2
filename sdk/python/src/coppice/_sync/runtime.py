"""What differs between the two clients beyond `await`: connections and time. Written by hand for each."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

from .._connection import Config
from .._errors import ConnectionFailedError
from .._http import limits, socket_options, timeouts

if TYPE_CHECKING:
    import httpx
    from websockets.sync.client import ClientConnection


def http_client(config: Config, verify: ssl.SSLContext | bool) -> httpx.Client:
    import httpx  # here, because it is most of the time that the import of this package would take

    transport = httpx.HTTPTransport(
        verify=verify, uds=config.socket or None, limits=limits(), socket_options=None if config.socket else socket_options()
    )
    return httpx.Client(
        transport=transport, timeout=timeouts(config), follow_redirects=False, headers={"accept-encoding": "identity"}
    )


def sleep(seconds: float) -> None:
    time.sleep(seconds)


class Socket:
    """A WebSocket."""

    def __init__(self, opened: AbstractContextManager[ClientConnection]) -> None:
        self._stack = ExitStack()
        self._connection = self._stack.enter_context(opened)

    @classmethod
    def connect(cls, url: str, unix: str, tls: ssl.SSLContext | None, **options: Any) -> Socket:
        from websockets.exceptions import InvalidStatus
        from websockets.sync.client import ClientConnection, connect, unix_connect

        class Direct(ClientConnection):
            """Follows no redirect: where a session is, the server says in its answer alone."""

            def handshake(self, *args: Any, **kwargs: Any) -> None:
                try:
                    super().handshake(*args, **kwargs)
                except InvalidStatus as err:
                    err.response.headers.pop("location", None)
                    raise

        options |= {"compression": None, "proxy": None, "create_connection": Direct}
        if unix:
            return cls(unix_connect(unix, url, **options))
        return cls(connect(url, ssl=tls, **options))

    def receive(self) -> str | bytes | None:
        """The next message; None after an orderly end."""
        from websockets.exceptions import ConnectionClosedOK, WebSocketException

        try:
            return self._connection.recv()
        except ConnectionClosedOK:
            return None
        except (WebSocketException, OSError) as err:
            raise ConnectionFailedError(f"the connection to the session broke off: {err}") from err

    def send(self, message: str | bytes) -> None:
        from websockets.exceptions import WebSocketException

        try:
            self._connection.send(message)
        except (WebSocketException, OSError) as err:
            raise ConnectionFailedError(f"the connection to the session broke off: {err}") from err

    def close(self) -> None:
        self._stack.close()


def body(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """A body that is read while it is sent."""
    yield from pieces


def every(calls: Sequence[Callable[[], Any]]) -> list[Exception]:
    """Makes all calls, one after the other, and returns what failed."""
    failed: list[Exception] = []
    for call in calls:
        try:
            call()
        except Exception as err:  # the others are to be made, too
            failed.append(err)
    return failed

"""Settings of connections that both clients share."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

from ._connection import Config

if TYPE_CHECKING:
    import httpx


def limits() -> httpx.Limits:
    import httpx

    return httpx.Limits(max_connections=512, max_keepalive_connections=64, keepalive_expiry=60)


def timeouts(config: Config, read: float | None = -1) -> httpx.Timeout:
    """The bounds of one request; -1 is the usual time."""
    import httpx

    usual = config.read_timeout
    return httpx.Timeout(connect=config.connect_timeout, read=usual if read == -1 else read, write=usual, pool=None)


def socket_options() -> list[Any]:
    """A server that vanished is noticed within two minutes, also by a call that waits for hours."""
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)]
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 6)):
        if hasattr(socket, name):
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    return options

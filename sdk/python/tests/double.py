"""An HTTP server in this process that answers as it is told, and remembers what it was asked."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


@dataclass
class Request:
    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Answer:
    """One answer. `cut` closes the connection: at once (0), or after so many bytes of the body. With `silent` the client closes it
    instead, and nothing follows these bytes."""

    status: int = 200
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None
    silent: bool = False
    chunks: list[bytes] | None = None


def problem(status: int, code: str, **fields: Any) -> Answer:
    headers = {"content-type": "application/problem+json"}
    if "retry_after" in fields:
        headers["retry-after"] = str(fields.pop("retry_after"))
    body = {"type": "x", "title": "x", "status": status, "detail": "because", "code": code, "request_id": "req", **fields}
    return Answer(status, body, headers)


class Double:
    """Answers the calls in the order of the script; the last answer is for all later ones."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.script: list[Answer | Callable[[Request], Answer]] = []
        self._lock = threading.Lock()
        double = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def handle_one(self) -> None:
                parts = urlsplit(self.path)
                headers = {k.lower(): v for k, v in self.headers.items()}
                body = double.read_body(self, headers)
                request = Request(self.command, parts.path, parse_qs(parts.query), headers, body)
                double.answer(self, double.next(request))

            do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = handle_one

        class Server(ThreadingHTTPServer):
            def handle_error(self, *_: Any) -> None:
                pass  # a client that hung up

        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def next(self, request: Request) -> Answer:
        with self._lock:
            self.requests.append(request)
            found = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        return found(request) if callable(found) else found

    @staticmethod
    def read_body(handler: BaseHTTPRequestHandler, headers: dict[str, str]) -> bytes:
        if headers.get("transfer-encoding") != "chunked":
            return handler.rfile.read(int(headers.get("content-length", 0)))
        out = b""
        while size := int(handler.rfile.readline(), 16):
            out += handler.rfile.read(size)
            handler.rfile.readline()
        handler.rfile.readline()
        return out

    @staticmethod
    def answer(handler: BaseHTTPRequestHandler, a: Answer) -> None:
        if a.cut == 0:
            handler.close_connection = True
            handler.connection.shutdown(socket.SHUT_RDWR)
            return
        body = a.body if isinstance(a.body, bytes) else b"" if a.body is None else json.dumps(a.body).encode()
        handler.send_response(a.status)
        for name, value in a.headers.items():
            handler.send_header(name, value)
        if a.chunks is not None:
            handler.send_header("transfer-encoding", "chunked")
            handler.end_headers()
            for chunk in a.chunks:
                handler.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
            handler.wfile.write(b"0\r\n\r\n")
            return
        if a.status != 204:
            handler.send_header("content-length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body if a.cut is None else body[: a.cut])
        if a.cut is not None:
            handler.wfile.flush()
            if a.silent:
                handler.rfile.read(1)
            handler.close_connection = True
            handler.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

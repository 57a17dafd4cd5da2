"""Calls: their tries, their answers, and the operations that they start."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from .. import _operations as op
from .. import _policy as policy
from .. import models
from .._connection import Config
from .._errors import APIError, ConnectionFailedError, CoppiceError, NotFoundError, ProtocolError, WaitTimeout
from .._http import timeouts
from .._policy import Call
from .._version import __version__
from . import runtime

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")


class AsyncTransport:
    """Talks to one server. It is safe for concurrent use."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.tls = config.tls()
        self._http: httpx.AsyncClient | None = None
        self._headers = {"user-agent": config.user_agent or f"coppice-python/{__version__}"}
        if config.token:
            self._headers["authorization"] = "Bearer " + config.token

    @property
    def http(self) -> httpx.AsyncClient:
        if self._http is None:
            self._http = runtime.http_client(self.config, self.tls if self.tls is not None else False)
        return self._http

    async def aclose(self) -> None:
        if self._http is not None:
            await self._http.aclose()
            self._http = None

    async def send(self, call: Call, retries: policy.Retries | None = None) -> httpx.Response:
        """Performs a call, with its repetitions, and returns an answer below 400 whose body the caller reads and closes."""
        import httpx

        what = f"{call.op.method} {call.op.path}"
        policy.prepare(call)
        retries = retries or policy.Retries(self.config, call)
        problem: CoppiceError
        while True:
            try:
                answer = await self._try(call)
            except (httpx.ConnectError, httpx.ConnectTimeout) as err:
                pause, problem = retries.after_lost(sent=False), lost(what, err)
            except httpx.HTTPError as err:
                call.lost = True
                pause, problem = retries.after_lost(sent=True), lost(what, err)
            else:
                if answer.status_code < 300:
                    return answer
                refused = await self._refusal(answer, what)
                pause, problem = retries.after_answer(refused), refused
            if pause is None:
                raise problem
            await runtime.sleep(pause)
            if retries.expired():  # the machine may have slept, too
                raise problem

    async def _try(self, call: Call) -> httpx.Response:
        import httpx

        headers = {**self._headers, **call.headers}
        if call.key:
            headers["idempotency-key"] = call.key
        content = call.content
        if call.body is not None:
            content = msgspec.json.encode(call.body)
            headers["content-type"] = "application/json"
        elif content is not None:
            headers["content-type"] = call.content_type
        request = self.http.build_request(
            call.op.method,
            call.url(self.config.base),
            params=httpx.QueryParams(tuple(call.parameters())),
            content=content,
            headers=headers,
            timeout=timeouts(self.config, call.read_timeout),
        )
        return await self.http.send(request, stream=True)

    async def _refusal(self, answer: httpx.Response, what: str) -> APIError:
        import httpx

        try:
            body = await read_bounded(answer, policy.MAX_PROBLEM, what)
        except (httpx.HTTPError, ProtocolError):
            body = b""  # the status says enough
        finally:
            await answer.aclose()
        return policy.refusal(answer.status_code, answer.headers, body, what)

    async def read(self, call: Call, limit: int = policy.MAX_ANSWER) -> tuple[int, bytes]:
        """Performs a call and reads its whole answer. A connection that breaks off within the answer is a lost one."""
        import httpx

        what = f"{call.op.method} {call.op.path}"
        policy.prepare(call)
        retries = policy.Retries(self.config, call)
        while True:
            answer = await self.send(call, retries)
            try:
                return answer.status_code, await read_bounded(answer, limit, what)
            except httpx.HTTPError as err:
                pause = retries.after_lost(sent=True)
                problem = lost(what, err)
                if pause is None:
                    raise problem from err
            finally:
                await answer.aclose()
            await runtime.sleep(pause)
            if retries.expired():
                raise problem

    async def call(self, call: Call, kind: type[T]) -> T:
        """Performs a call and decodes its answer."""
        _, body = await self.read(call)
        return policy.decode(body, kind, call.op.id)

    async def run(self, call: Call) -> None:
        """Performs a call whose answer has nothing in it."""
        try:
            await self.read(call)
        except NotFoundError:
            if call.op.method != "DELETE" or not call.lost:
                raise  # otherwise the try that was lost has deleted it

    @asynccontextmanager
    async def stream(self, call: Call) -> AsyncIterator[httpx.Response]:
        """Performs a call whose answer is read while it arrives."""
        import httpx

        answer = await self.send(call)
        try:
            yield answer
        except httpx.HTTPError as err:
            raise lost(f"{call.op.method} {call.op.path}", err) from err
        finally:
            await answer.aclose()

    async def pages(self, call: Call, kind: type[T], limit: int | None = None) -> AsyncIterator[T]:
        """Every item of a list, page by page; at most `limit` of them."""
        left = limit
        cursor = None
        while left is None or left > 0:
            size = 500 if left is None else min(500, left)
            call.query = {**call.query, "limit": size, "cursor": cursor}
            page = await self.call(call, dict[str, Any])
            for item in page.get("items") or []:
                yield policy.convert(item, kind, call.op.id)
                if left is not None:
                    left -= 1
            following = page.get("next_cursor")
            if not following or following == cursor:
                return
            cursor = following

    # -- operations

    async def start(self, call: Call, kind: type[T], timeout: float | None = None) -> T:
        """Performs a call that starts an operation, waits for its end, and returns its result."""
        deadline = time.monotonic() + (self.config.operation_timeout if timeout is None else timeout)
        call.query = {**call.query, "wait": wait_until(deadline)}
        call.read_timeout = policy.WAIT_SECONDS + self.config.read_timeout
        try:
            status, body = await self.read(call)
        except APIError as err:
            if err.code != "IDEMPOTENCY_IN_PROGRESS" or not err.operation_id:
                raise
            operation = await self.wait(err.operation_id, deadline)  # the server received an earlier try
        else:
            if status != 202:
                return policy.decode(body or b"null", kind, call.op.id)
            operation = await self.settle(policy.decode(body, models.Operation, call.op.id), deadline)
        if operation.state == "failed":
            raise policy.failure(operation.problem, f"operation {operation.id}", operation.id)
        return policy.convert(operation.result, kind, f"operation {operation.id}")

    async def settle(self, operation: models.Operation, deadline: float) -> models.Operation:
        if operation.state in ("succeeded", "failed"):
            return operation
        return await self.wait(operation.id, deadline)

    async def wait(self, operation_id: str, deadline: float) -> models.Operation:
        """Waits for the end of an operation."""
        away = policy.Away(self.config)
        while True:
            call = Call(op.getOperation, {"operation_id": operation_id}, {"wait": wait_until(deadline)})
            call.read_timeout = policy.WAIT_SECONDS + self.config.read_timeout
            try:
                operation = await self.call(call, models.Operation)
            except CoppiceError as err:
                pause = away.pause(err)
                if pause is None:
                    raise
                await runtime.sleep(pause)
                continue
            away.back()
            if operation.state in ("succeeded", "failed"):
                return operation
            if time.monotonic() >= deadline:
                raise WaitTimeout(
                    f"operation {operation_id} is still {operation.state}; it goes on: wait for it again "
                    f"with client.wait_operation({operation_id!r})",
                    operation_id,
                )


def wait_until(deadline: float) -> int:
    """How many seconds one request may wait."""
    return max(0, min(policy.WAIT_SECONDS, int(deadline - time.monotonic() + 0.999)))


def lost(what: str, err: Exception) -> ConnectionFailedError:
    problem = ConnectionFailedError(f"{what}: {type(err).__name__}: {err}")
    problem.__cause__ = err
    return problem


async def read_bounded(answer: httpx.Response, limit: int, what: str) -> bytes:
    """The body of an answer. The bytes are taken as they come: nothing is decompressed."""
    parts: list[bytes] = []
    size = 0
    async for part in answer.aiter_raw():
        size += len(part)
        if size > limit:
            raise ProtocolError(f"{what}: the answer has more than {limit} bytes")
        parts.append(part)
    return b"".join(parts)

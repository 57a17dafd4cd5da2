"""Waits that a cancellation does not cut off."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def ended(tasks: Collection[asyncio.Future[Any]], timeout: float | None = None) -> bool:
    """Waits until all tasks have ended, or for so many seconds. Returns whether it was cancelled meanwhile."""
    cancelled = False
    clock = asyncio.get_running_loop().time
    until = None if timeout is None else clock() + timeout
    while pending := [t for t in tasks if not t.done()]:
        left = None if until is None else until - clock()
        if left is not None and left <= 0:
            break
        try:
            await asyncio.wait(pending, timeout=left)
        except asyncio.CancelledError:
            cancelled = True
    return cancelled


async def whole(work: Coroutine[Any, Any, T]) -> T:
    """Does some work to its end, also if the caller is cancelled: then it raises CancelledError afterwards."""
    task = asyncio.ensure_future(work)
    if await ended([task]):
        if not task.cancelled():
            task.exception()  # it was seen
        raise asyncio.CancelledError
    return task.result()


async def attempt(work: Coroutine[Any, Any, T], timeout: float) -> asyncio.Future[T]:
    """Does some work, for so many seconds at most, and is not cut off by a cancellation. Returns how the work ended."""
    task = asyncio.ensure_future(work)
    await ended([task], timeout)
    if not task.done():
        task.cancel()
        await ended([task])
    if not task.cancelled():
        task.exception()  # it was seen
    return task

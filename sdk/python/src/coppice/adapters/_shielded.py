"""Work that no cancellation cuts in half."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio
import anyio.lowlevel

T = TypeVar("T")


async def shielded(work: Awaitable[T], undo: Callable[[T], Awaitable[Any]] | None = None) -> T:
    """Does work to its end, and raises a cancellation only then: otherwise what was made would be left, and nobody would know of it.

    With `undo`, what the work made is undone first. This covers both kinds of cancellation: asyncio cancels a task once, anyio
    cancels every wait in a scope.
    """
    task = asyncio.ensure_future(work)
    stop: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as cancelled:
                stop = cancelled
    failed = task.cancelled() or task.exception() is not None
    try:
        if stop is not None:
            raise stop
        if undo is not None:
            await anyio.lowlevel.checkpoint()
    except BaseException:
        if undo is not None and not failed:
            await shielded(undo(task.result()))
        raise
    return task.result()

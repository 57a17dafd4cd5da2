"""Work that no cancellation cuts in half."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio
import anyio.lowlevel

T = TypeVar("T")


async def shielded(work: Awaitable[T], undo: Callable[[T], Awaitable[Any]] | None = None) -> T:
    """Does work to its end, and raises a cancellation afterwards: what was made by then would be left, unknown to anybody.

    With `undo`, what the work made is undone before. Both kinds of cancellation are meant: asyncio cancels a task once, anyio
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

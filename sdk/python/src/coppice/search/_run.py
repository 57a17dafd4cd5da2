"""The ways in."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from .. import _requests as requests
from .._async.checkpoint import AsyncCheckpoint
from .._async.client import AsyncCoppice
from .._sync.checkpoint import Checkpoint
from ._checkpoints import AsyncTask, Checkpoints, Forks, Task
from ._engine import Options, Search
from ._result import SearchResult
from ._strategy import Strategy

if TYPE_CHECKING:
    from typing_extensions import Unpack


async def run_async(
    root: AsyncCheckpoint,
    task: AsyncTask | Task,
    strategy: Strategy,
    *,
    name: str = "",
    fork: requests.ForkLaunch | None = None,
    read_all: bool = True,
    **options: Unpack[Options],
) -> SearchResult:
    """Searches from a checkpoint: beside any number of other searchers, and on from where an earlier search ended.

    `name` tells the search from others over the same checkpoints, in at most 64 bytes; see `Checkpoints`. `fork` has
    options of the forks, such as `labels`, `allow` or `ttl`; see `AsyncCheckpoint.fork`. With `read_all`, the result
    has what other searchers have done, and the data of all nodes, for which each node is read at the end. See `Search`
    for the other options. Raises what made the search fail.
    """
    store = Checkpoints(root, name)
    threads = options.get("parallel", 8) * options.get("batch", 1)
    forks = Forks(root, task, store, threads=max(threads, 1), **(fork or {}))
    try:
        one = Search(root.id, forks, store, strategy, **options)
        found = await one.run()
        if read_all:
            await one.read_all()
            found = one.result
        return found
    finally:
        forks.close()


def run(
    root: Checkpoint | AsyncCheckpoint,
    task: AsyncTask | Task,
    strategy: Strategy,
    *,
    name: str = "",
    fork: requests.ForkLaunch | None = None,
    read_all: bool = True,
    **options: Unpack[Options],
) -> SearchResult:
    """The same as `run_async`, and returns when the search has ended."""

    async def main() -> SearchResult:
        async with AsyncCoppice(config=root._t.config) as client:
            from_here = AsyncCheckpoint(client._t, root.info)
            return await run_async(from_here, task, strategy, name=name, fork=fork, read_all=read_all, **options)

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(main())
    # Within a notebook there is a loop already, which must not be blocked by itself.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, main()).result()

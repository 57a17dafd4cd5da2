"""Coppice: checkpoint and fork of running machines.

    from coppice import Coppice

    ws = Coppice().create("base")
    ws.run("pip install -e .")
    node = ws.checkpoint("before")
    best = max(node.fork(8), key=lambda child: score(child.run("pytest -q")))

`AsyncCoppice` has the same names for asyncio. `coppice.search` grows trees; `coppice.errors` has the exceptions;
`coppice.models` has the data types of the API.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._version import __version__ as __version__

if TYPE_CHECKING:
    from . import search as search
    from . import errors as errors
    from . import models as models
    from ._async.checkpoint import AsyncCheckpoint as AsyncCheckpoint
    from ._async.checkpoint import AsyncCheckpointFiles as AsyncCheckpointFiles
    from ._async.client import AsyncCoppice as AsyncCoppice
    from ._async.files import AsyncFiles as AsyncFiles
    from ._async.network import AsyncNetwork as AsyncNetwork
    from ._async.session import AsyncAttached as AsyncAttached
    from ._async.session import AsyncSession as AsyncSession
    from ._async.watches import AsyncWatches as AsyncWatches
    from ._async.workspace import AsyncForks as AsyncForks
    from ._async.workspace import AsyncWorkspace as AsyncWorkspace
    from ._connection import Config as Config
    from ._errors import APIError as APIError
    from ._errors import CommandFailed as CommandFailed
    from ._errors import CoppiceError as CoppiceError
    from ._requests import action as action
    from ._results import Diff as Diff
    from ._results import Output as Output
    from ._results import Result as Result
    from ._sync.checkpoint import Checkpoint as Checkpoint
    from ._sync.checkpoint import CheckpointFiles as CheckpointFiles
    from ._sync.client import Coppice as Coppice
    from ._sync.files import Files as Files
    from ._sync.network import Network as Network
    from ._sync.session import Attached as Attached
    from ._sync.session import Session as Session
    from ._sync.watches import Watches as Watches
    from ._sync.workspace import Forks as Forks
    from ._sync.workspace import Workspace as Workspace
    from ._tar import Copied as Copied
    from ._trees import Tree as Tree

# Where the names are. Each is imported when it is first used, so that a synchronous program loads no asyncio.
_PLACES = {
    "APIError": "._errors",
    "AsyncAttached": "._async.session",
    "AsyncCheckpoint": "._async.checkpoint",
    "AsyncCheckpointFiles": "._async.checkpoint",
    "AsyncCoppice": "._async.client",
    "AsyncFiles": "._async.files",
    "AsyncForks": "._async.workspace",
    "AsyncNetwork": "._async.network",
    "AsyncSession": "._async.session",
    "AsyncWatches": "._async.watches",
    "AsyncWorkspace": "._async.workspace",
    "Attached": "._sync.session",
    "Checkpoint": "._sync.checkpoint",
    "CheckpointFiles": "._sync.checkpoint",
    "CommandFailed": "._errors",
    "Config": "._connection",
    "Copied": "._tar",
    "Coppice": "._sync.client",
    "CoppiceError": "._errors",
    "Diff": "._results",
    "Files": "._sync.files",
    "Forks": "._sync.workspace",
    "Network": "._sync.network",
    "Output": "._results",
    "Result": "._results",
    "Session": "._sync.session",
    "Tree": "._trees",
    "Watches": "._sync.watches",
    "Workspace": "._sync.workspace",
    "action": "._requests",
    "errors": ".errors",
    "models": ".models",
    "search": ".search",
}

__all__ = [*_PLACES, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    place = _PLACES.get(name)
    if place is None:
        raise AttributeError(f"module 'coppice' has no attribute {name!r}")
    module = import_module(place, __name__)
    value = module if place == "." + name else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__

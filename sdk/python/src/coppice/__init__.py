"""Coppice: checkpoint and fork of running machines.

    from coppice import Coppice

    ws = Coppice().create("base")
    ws.run("pip install -e .")
    node = ws.checkpoint("before")
    best = max(node.fork(8), key=lambda child: score(child.run("pytest -q")))

`AsyncCoppice` has the same names for asyncio. `coppice.search` grows trees; `coppice.errors` has the exceptions;
`coppice.models` has the data types of the API.
"""

from . import errors as errors
from . import models as models
from ._async.checkpoint import AsyncCheckpoint as AsyncCheckpoint
from ._async.checkpoint import AsyncStep as AsyncStep
from ._async.client import AsyncCoppice as AsyncCoppice
from ._async.files import AsyncFiles as AsyncFiles
from ._async.network import AsyncNetwork as AsyncNetwork
from ._async.session import AsyncAttached as AsyncAttached
from ._async.session import AsyncSession as AsyncSession
from ._async.workspace import AsyncForks as AsyncForks
from ._async.workspace import AsyncWorkspace as AsyncWorkspace
from ._connection import Config as Config
from ._errors import APIError as APIError
from ._errors import CommandFailed as CommandFailed
from ._errors import CoppiceError as CoppiceError
from ._results import Diff as Diff
from ._results import Output as Output
from ._results import Result as Result
from ._sync.checkpoint import Checkpoint as Checkpoint
from ._sync.checkpoint import Step as Step
from ._sync.client import Coppice as Coppice
from ._sync.files import Files as Files
from ._sync.network import Network as Network
from ._sync.session import Attached as Attached
from ._sync.session import Session as Session
from ._sync.workspace import Forks as Forks
from ._sync.workspace import Workspace as Workspace
from ._tar import Copied as Copied
from ._version import __version__ as __version__

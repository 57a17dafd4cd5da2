"""Searches over a tree of running machines.

    from coppice import Coppice, search

    class Repair:
        def actions(self, node):
            return ["edit a", "edit b", "edit c"]

        def act(self, ws, action):
            ws.run(["./apply", action.name])
            return passed(ws.run("pytest -q"))      # a value from 0 to 1

    found = search.run(node, Repair(), search.UCT(c=0.5), budget=100, parallel=8)
    print(found, found.best.trajectory())

Each step selects a node by the strategy, forks it, does an action there, records the result as a new checkpoint and
ends the fork. Values and visits are kept in the annotation "coppice.search/v1" of the checkpoints, which all searchers
change by compare-and-set. So any number of programs may search one tree, also those in Go with the package
sdk/go/search: its documentation describes the format. An action is tried by one searcher only. A search that was
interrupted, or whose program crashed, goes on when it is run again.

With coroutines for `actions` and `act`, and `run_async`, no thread is used. `Search`, with a `Problem` of one's own and
the store `Memory`, tries a strategy without machines.
"""

from ._checkpoints import KEY as KEY
from ._checkpoints import AsyncTask as AsyncTask
from ._checkpoints import Checkpoints as Checkpoints
from ._checkpoints import Forks as Forks
from ._checkpoints import Task as Task
from ._engine import Problem as Problem
from ._engine import Search as Search
from ._memory import Memory as Memory
from ._memory import NodeChanged as NodeChanged
from ._memory import NodeGone as NodeGone
from ._memory import Store as Store
from ._record import Action as Action
from ._record import Claim as Claim
from ._record import Edge as Edge
from ._record import Outcome as Outcome
from ._record import Record as Record
from ._record import RecordMangled as RecordMangled
from ._record import RecordTooLarge as RecordTooLarge
from ._record import SearchError as SearchError
from ._record import record_of as record_of
from ._result import SearchResult as SearchResult
from ._run import run as run
from ._run import run_async as run_async
from ._strategy import PUCT as PUCT
from ._strategy import UCT as UCT
from ._strategy import Beam as Beam
from ._strategy import BestOfN as BestOfN
from ._strategy import Strategy as Strategy
from ._tree import Node as Node

"""Searches over a tree of running machines.

    from coppice import Coppice, search

    class Repair:
        def actions(self, node):
            return ["edit a", "edit b", "edit c"]

        def act(self, ws, action):
            ws.run(["./apply", action.name])
            return passed(ws.run("pytest -q"))      # a score from 0 to 1

    found = search.run(node, Repair(), search.UCT(), steps=100, parallel=8)
    print(found, found.best.trajectory())

Each expansion forks a node, does an action there, records the result as a new checkpoint and ends the fork. Scores and
visits are kept in the annotations of the checkpoints, so that a search that was interrupted goes on when it is run again.
With coroutines for `actions` and `act`, and `run_async`, no thread is used.
"""

from ._engine import AsyncTask as AsyncTask
from ._engine import Search as Search
from ._engine import Task as Task
from ._engine import run as run
from ._engine import run_async as run_async
from ._result import SearchResult as SearchResult
from ._strategy import PUCT as PUCT
from ._strategy import UCT as UCT
from ._strategy import Beam as Beam
from ._strategy import BestOfN as BestOfN
from ._strategy import Strategy as Strategy
from ._tree import Action as Action
from ._tree import Node as Node
from ._tree import Outcome as Outcome

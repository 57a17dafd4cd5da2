"""What one searcher remembers of the nodes, and what it has under way. It asks nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Any

from ._record import NEVER, Action, Claim, Edge, Record, known


@dataclass(eq=False)
class Node:
    """A copy of what a search knows of a node."""

    id: str
    """The checkpoint."""
    parent: Node | None = None
    """None at the root."""
    action: Action | None = None
    """What led here from the parent; None at the root."""
    value: float = 0.0
    """Its own value; 0 at a root whose value is not known."""
    visits: int = 0
    """How many values are known of the node and below it."""
    value_sum: float = 0.0
    """The sum of these values."""
    terminal: bool = False
    """Nothing can be tried here."""
    data: Any = None
    """What the task keeps with it. None of a node that was not read."""
    children: list[Node] = field(default_factory=list)
    """In the order of the actions. Only in the tree of a result."""

    @property
    def mean(self) -> float:
        """The mean value of the node and all below it; 0 without visits."""
        return self.value_sum / self.visits if self.visits else 0.0

    @property
    def depth(self) -> int:
        """0 at the root."""
        return sum(1 for _ in self.path()) - 1

    def path(self) -> Iterator[Node]:
        """From this node to the root."""
        at: Node | None = self
        while at is not None:
            yield at
            at = at.parent

    def trajectory(self) -> list[Action]:
        """The actions from the root to this node."""
        return [n.action for n in self.path() if n.action is not None][::-1]

    def walk(self) -> Iterator[Node]:
        """This node and all below it, each after its parent."""
        stack: list[Node] = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children))


@dataclass(eq=False)
class TreeNode:
    """A node as it was last read or written."""

    id: str
    parent: TreeNode | None = None
    action: str = ""
    """That led here."""
    depth: int = 0
    record: Record = field(default_factory=Record)
    version: int = 0
    stale: bool = True
    """It must be read before it is used."""
    busy: bool = False
    """It is being read, or its edges are being proposed."""
    written: bool = False
    """This searcher has written it."""
    lost: set[str] = field(default_factory=set)
    """Actions that may have led to a child that is not written down."""
    mine: dict[str, Claim] = field(default_factory=dict)
    """What this searcher has under way, by the action that leads to it."""
    children: dict[str, TreeNode] = field(default_factory=dict)
    """Those that were looked at, by action."""

    def child(self, e: Edge) -> TreeNode:
        """The node that an edge led to."""
        if e.name not in self.children:
            self.children[e.name] = TreeNode(e.child, self, e.name, self.depth + 1)
        return self.children[e.name]

    def up(self) -> Iterator[TreeNode]:
        """From this node to the root."""
        at: TreeNode | None = self
        while at is not None:
            yield at
            at = at.parent

    def behind(self) -> bool:
        """Whether the parent knows of values below this node that this one does not know of."""
        e = self.parent.record.edge(self.action) if self.parent is not None else None
        return e is not None and e.child == self.id and e.visits > self.record.visits

    def count(self, action: str, by: int, until: datetime = NEVER) -> None:
        """Counts further expansions of an action as under way, or fewer."""
        at = self.mine.get(action, Claim())
        if at.count + by <= 0:
            self.mine.pop(action, None)
        else:
            self.mine[action] = Claim(at.count + by, max(at.until, until))

    def less(self, action: str, by: int) -> Claim:
        """What is under way without some of it."""
        at = self.mine.get(action, Claim())
        return Claim(at.count - by, at.until)

    def mark(self, actions: Sequence[Action], sign: int, until: datetime = NEVER) -> None:
        """Counts actions of the node as under way, here and on the way to it; or no longer as that."""
        for a in actions:
            self.count(a.name, sign, until)
        for at in self.up() if actions else ():
            if at.parent is not None:
                at.parent.count(at.action, sign * len(actions), until)

    # -- copies

    def view(self) -> Node:
        """A copy, with its way from the root."""
        out: Node | None = None
        for at in list(self.up())[::-1]:
            out = at.copy(out)
        assert out is not None
        return out

    def copy(self, parent: Node | None) -> Node:
        """A copy below a copy of its parent. If it was not read, it has what the parent's edge says."""
        e = self.parent.record.edge(self.action) if self.parent is not None else None
        action = e.action if e is not None else Action(self.action) if self.parent is not None else None
        r = self.record
        if e is not None and self.version == 0:
            return Node(self.id, parent, action, e.value, e.visits, e.value_sum)
        return Node(self.id, parent, action, r.value or 0.0, r.visits, r.value_sum, r.terminal, known(r.data))

    def best(self) -> tuple[TreeNode, TreeNode | None]:
        """The node of the greatest value: the first of equals on the way from here, then in the order of the actions.

        If a node must be read to know the way to it, or all about it, that is the second answer.
        """
        at = self
        while True:
            r = at.record
            if r.visits == 0 or (r.value is not None and r.value >= r.max):
                return at, None
            e = next((e for e in r.edges if e.visits and e.max >= r.max), None)
            if e is None:
                return at, None
            child = at.child(e)
            if child.record.visits and child.record.max >= e.max:
                at = child
            else:
                return (child if e.value >= e.max else at), child


class Step(Enum):
    """What kind of thing to do next."""

    NOTHING = "nothing"
    """Nothing is left, or nothing until something under way has ended."""
    READ = "read"
    """Read the node."""
    PROPOSE = "propose"
    """Ask what can be tried at the node."""
    ADOPT = "adopt"
    """Look for children that a searcher has made and not written down."""
    EXPAND = "expand"
    """Try actions at the node."""


@dataclass
class Decision:
    """What a strategy has chosen."""

    step: Step
    node: TreeNode | None = None
    actions: list[Action] = field(default_factory=list)
    """To try."""
    waiting: bool = False
    """Something that may change the choice is under way."""


@dataclass(eq=False)
class Tree:
    """All nodes that one searcher knows."""

    root: TreeNode
    searcher: str
    now: Callable[[], datetime]

    def in_flight(self, n: TreeNode, e: Edge) -> int:
        """What is under way at an edge and below it: of this searcher by what it remembers, of others by the record."""
        return n.mine.get(e.name, Claim()).count + e.others(self.searcher, self.now())

    def free(self, n: TreeNode, e: Edge) -> bool:
        """Whether an edge can be tried now."""
        return not e.child and not e.done and self.in_flight(n, e) == 0

    def untried(self, n: TreeNode) -> tuple[list[Action], bool]:
        """The actions of a node that can be tried now, and whether others are under way."""
        open_edges = [e for e in n.record.edges if not e.child and not e.done]
        actions = [e.action for e in open_edges if self.free(n, e)]
        return actions, len(actions) < len(open_edges)

    def ready(self, n: TreeNode) -> Decision | None:
        """What must be done at a node before a strategy can look at its edges; None: nothing."""
        if n.lost and not n.busy and not n.stale:
            return Decision(Step.ADOPT, n)
        if n.record.done:
            return Decision(Step.NOTHING)
        if n.busy:
            return Decision(Step.NOTHING, waiting=True)
        if n.stale:
            return Decision(Step.READ, n)
        if not n.record.proposed:
            return Decision(Step.PROPOSE, n)
        if any(e.abandoned(self.searcher, self.now()) for e in n.record.edges):
            return Decision(Step.ADOPT, n)
        return None

    def nodes(self) -> Iterator[TreeNode]:
        """All nodes that were looked at."""
        stack = [self.root]
        while stack:
            n = stack.pop()
            yield n
            stack.extend(n.children.values())

    def refresh(self) -> None:
        """Has the nodes read again at which others have something under way."""
        now = self.now()
        for n in self.nodes():
            if any(e.others(self.searcher, now) for e in n.record.edges):
                n.stale = True

    def snapshot(self) -> Node:
        """A copy of the tree. What is known of nodes that were not read is in their parents' edges."""
        root = self.root.copy(None)
        stack = [(self.root, root)]
        while stack:
            n, copied = stack.pop()
            for e in n.record.edges:
                if e.child:
                    child = n.child(e)
                    below = child.copy(copied)
                    copied.children.append(below)
                    stack.append((child, below))
        return root

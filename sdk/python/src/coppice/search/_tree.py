"""The tree of a search, and what of it is kept in the annotations of checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Action:
    """Something that can be tried at a node. Its name is unique there, and data is what the task needs to do it."""

    name: str
    data: Any = None
    prior: float = 1.0
    """How promising it is, before it was tried; PUCT compares it with the priors of the other actions."""


@dataclass(frozen=True)
class Outcome:
    """What an action led to."""

    score: float
    """From 0, the worst, to 1, the best."""
    terminal: bool = False
    """Nothing can be tried from here."""
    data: Any = None
    """Facts about the node, as JSON; kept with it."""


@dataclass(eq=False)
class Node:
    """A checkpoint in a search."""

    checkpoint_id: str
    parent: Node | None = None
    action: Action | None = None
    score: float = 0.0
    terminal: bool = False
    data: Any = None
    children: list[Node] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    """The names of actions that could not be carried out here."""
    actions: list[Action] | None = None
    """What can be tried here; None: the task was not asked yet."""
    visits: int = 0
    """How many outcomes are known at this node and below it, with failures."""
    value: float = 0.0
    """The sum of their scores."""
    pending: int = 0
    """How many expansions are under way at this node and below it."""
    under_way: set[str] = field(default_factory=set)

    @property
    def depth(self) -> int:
        return sum(1 for _ in self.path()) - 1

    @property
    def mean(self) -> float:
        return self.value / self.visits if self.visits else 0.0

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
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children))

    def untried(self) -> list[Action]:
        """The actions that were neither tried nor are under way."""
        if self.terminal or not self.actions:
            return []
        known = {c.action.name for c in self.children if c.action} | set(self.failed) | self.under_way
        return [a for a in self.actions if a.name not in known]

    def add(self, child: Node) -> None:
        """Adds a child with its outcome, and counts it up to the root."""
        self.children.append(child)
        child.parent = self
        for node in child.path():
            node.visits += 1
            node.value += child.score

    def fail(self, action: str) -> None:
        """Counts an action that could not be carried out as one of score 0."""
        self.failed.append(action)
        for node in self.path():
            node.visits += 1


def record(node: Node) -> dict[str, Any]:
    """What the annotation of a checkpoint has of its node."""
    out: dict[str, Any] = {"score": node.score, "visits": node.visits, "value": node.value}
    if node.action is not None:
        out["action"] = {"name": node.action.name, "data": node.action.data, "prior": node.action.prior}
    if node.terminal:
        out["terminal"] = True
    if node.data is not None:
        out["data"] = node.data
    return out


def from_record(checkpoint_id: str, found: Any) -> Node | None:
    """The node of an annotation, without its statistics; None if it is none.

    Statistics are counted anew when a tree is read: those of a process that crashed may not have all been written.
    """
    if not isinstance(found, Mapping) or not isinstance(found.get("action"), Mapping):
        return None
    action = found["action"]
    name, prior = action.get("name"), number(action.get("prior"), 1.0)
    if not isinstance(name, str):
        return None
    node = Node(checkpoint_id, action=Action(name, action.get("data"), prior))
    node.score = min(1.0, max(0.0, number(found.get("score"), 0.0)))
    node.terminal, node.data = found.get("terminal") is True, found.get("data")
    node.failed = failures(found)
    return node


def failures(found: Any) -> list[str]:
    names = found.get("failed") if isinstance(found, Mapping) else None
    return [n for n in names if isinstance(n, str)] if isinstance(names, list) else []


def number(value: Any, otherwise: float) -> float:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if good else otherwise


def count(root: Node) -> None:
    """Counts the statistics of a tree that was read."""
    for node in reversed(list(root.walk())):
        node.visits = len(node.failed) + (1 if node.parent else 0) + sum(c.visits for c in node.children)
        node.value = (node.score if node.parent else 0.0) + sum(c.value for c in node.children)

"""Which node is expanded next, and by which actions. Pure functions of what a search knows of its tree."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Union

from ._record import Action, Edge
from ._tree import Decision, Node, Step, Tree, TreeNode

MAX_OF_N = 50
"""The most actions of BestOfN."""

Untried = Callable[[Node, "list[Action]"], Sequence[Action]]


@dataclass(frozen=True)
class UCT:
    """Upper confidence bounds applied to trees. It descends from the root to the child with the greatest

        Q'(s, a) + c · √(ln N'(s) / n'(s, a))

    and expands the first node that has an action to try. With f expansions in flight below an edge,
    n' = n + virtual_loss · f and Q' = W / n': each counts as `virtual_loss` values of 0, so that parallel expansions
    spread.
    """

    c: float
    """The constant of exploration, in the unit of values, 0 or more.

    It is √2 for values from 0 to 1 in theory, and often 0.1 to 0.5 in practice.
    """
    virtual_loss: float = 1.0
    """The number of values of 0 that an expansion in flight counts for, more than 0."""
    min_max: bool = False
    """Scales Q to 0 … 1 by the least and the greatest value of the whole tree, as MuZero does.

    `c` has no unit then, and values need not be between 0 and 1.
    """
    widening: float = 0.0
    """k of progressive widening. 0: all actions of a node are tried before one of its children is expanded.

    Otherwise a node gets a further child only while it has fewer than k · √N(s), or if no other child can be descended
    to."""
    untried: Untried | None = None
    """Orders the untried actions of a node, best first; None: the order of the proposal.

    It may leave some out for now. It is called often, and must be quick."""

    def __post_init__(self) -> None:
        check(self, self.c >= 0, self.virtual_loss > 0, self.widening >= 0)

    def proposals(self, depth: int, actions: Sequence[Action]) -> Sequence[Action]:
        """The actions that a node of a depth gets, out of those that were proposed."""
        return actions

    def choose(self, tree: Tree, batch: int) -> Decision:
        """What to do next, with at most `batch` actions."""
        scale = Scale.of(tree, self.min_max, self.virtual_loss)

        def order(n: TreeNode) -> Candidates:
            untried, waiting = tree.untried(n)
            free = len(untried)
            if self.untried is not None and untried:
                untried = list(self.untried(n.view(), untried))
            total = scale.total(tree, n)
            scored: list[tuple[float, Edge | None]] = []
            for e in open_edges(n):
                q, visits = scale.mean(e.visits, e.value_sum, tree.in_flight(n, e))
                scored.append((q + self.c * math.sqrt(math.log(max(total, 1)) / max(visits, 1)), e))
            out = best_first(scored)
            if not untried:
                return Candidates(out, [], waiting)
            tried = sum(1 for e in n.record.edges if e.child or e.done)
            children = sum(1 for e in n.record.edges if e.child)
            children += len(n.record.edges) - tried - free  # those that are being made
            wide = self.widening > 0 and children >= self.widening * math.sqrt(total)
            return Candidates([*out, None] if wide else [None, *out], untried, waiting)

        return descend(tree, batch, order)


@dataclass(frozen=True)
class PUCT:
    """UCT with priors, as AlphaZero uses it. It takes the action of the greatest

        Q'(s, a) + c · P(s, a) · √N'(s) / (1 + n'(s, a))

    whether it has been tried or not. P is normalised over the node's actions; Q' and n' are those of UCT.
    """

    c: float
    """The constant of exploration, in the unit of values, 0 or more; AlphaZero's c_puct is 1.25 at the start."""
    fpu: float = 0.0
    """The first-play urgency reduction, 0 or more: an action that was not tried counts with Q(s) - fpu."""
    virtual_loss: float = 1.0
    """As in UCT."""
    min_max: bool = False
    """As in UCT."""

    def __post_init__(self) -> None:
        check(self, self.c >= 0, self.fpu >= 0, self.virtual_loss > 0)

    def proposals(self, depth: int, actions: Sequence[Action]) -> Sequence[Action]:
        """The actions that a node of a depth gets, out of those that were proposed."""
        return actions

    def choose(self, tree: Tree, batch: int) -> Decision:
        """What to do next, with at most `batch` actions."""
        scale = Scale.of(tree, self.min_max, self.virtual_loss)

        def order(n: TreeNode) -> Candidates:
            untried, waiting = tree.untried(n)
            edges = n.record.edges
            total = 0.0
            for e in edges:  # the sum in this order, as other searchers have it; `sum` may round in another way
                total += e.prior

            def prior(of: Action | Edge) -> float:
                return of.prior / total if total else 1 / len(edges)

            root = math.sqrt(max(scale.total(tree, n), 1))
            scored: list[tuple[float, Edge | None]] = []
            for e in open_edges(n):
                q, visits = scale.mean(e.visits, e.value_sum, tree.in_flight(n, e))
                scored.append((q + self.c * prior(e) * root / (1 + visits), e))
            if untried:
                untried = sorted(untried, key=prior, reverse=True)
                q, _ = scale.mean(n.record.visits, n.record.value_sum, 0)
                scored.append((q - self.fpu + self.c * prior(untried[0]) * root, None))
            return Candidates(best_first(scored), untried, waiting)

        return descend(tree, batch, order)


@dataclass(frozen=True)
class BestOfN:
    """Tries n actions of the root, and nothing else, 1 to 50.

    If fewer are proposed, each is tried several times, under names that end in "#2", "#3", … The root's record has room
    for fewer if names, priors or data are long; then the search fails.
    """

    n: int

    def __post_init__(self) -> None:
        check(self, 0 < self.n <= MAX_OF_N)

    def proposals(self, depth: int, actions: Sequence[Action]) -> Sequence[Action]:
        """The actions that a node of a depth gets, out of those that were proposed."""
        if depth > 0 or not actions:
            return []
        out = []
        for i in range(self.n):
            a, attempt = actions[i % len(actions)], i // len(actions) + 1
            out.append(a if attempt == 1 else replace(a, name=f"{a.name}#{attempt}"))
        return out

    def choose(self, tree: Tree, batch: int) -> Decision:
        """What to do next, with at most `batch` actions."""
        first = tree.ready(tree.root)
        if first is not None:
            return first
        untried, waiting = tree.untried(tree.root)
        return Decision(Step.EXPAND, tree.root, untried[:batch]) if untried else Decision(Step.NOTHING, waiting=waiting)


@dataclass(frozen=True)
class Beam:
    """Beam search.

    It tries all actions of the nodes of a level, keeps the `width` children of the greatest values, and goes on with
    these, `depth` levels deep.
    """

    width: int
    depth: int

    def __post_init__(self) -> None:
        check(self, self.width > 0, self.depth > 0)

    def proposals(self, depth: int, actions: Sequence[Action]) -> Sequence[Action]:
        """The actions that a node of a depth gets, out of those that were proposed."""
        return actions if depth < self.depth else []

    def choose(self, tree: Tree, batch: int) -> Decision:
        """What to do next, with at most `batch` actions."""
        level = [tree.root]
        for _ in range(self.depth):
            waiting = False
            for n in level:
                first = tree.ready(n)
                if first is not None:
                    if first.step is not Step.NOTHING:
                        return first
                    waiting = waiting or first.waiting
                    continue
                untried, busy = tree.untried(n)
                if untried:
                    return Decision(Step.EXPAND, n, untried[:batch])
                waiting = waiting or busy
            if waiting:
                return Decision(Step.NOTHING, waiting=True)  # the best of a level are known when it is complete
            level = self._next(level)
        return Decision(Step.NOTHING)

    def _next(self, level: list[TreeNode]) -> list[TreeNode]:
        """The best children of a level, the first of equals."""
        children = [(n, e) for n in level for e in n.record.edges if e.child]
        children.sort(key=lambda c: c[1].value, reverse=True)
        return [n.child(e) for n, e in children[: self.width]]


Strategy = Union[UCT, PUCT, BestOfN, Beam]
"""Chooses which node is expanded next, and by which actions."""


def check(strategy: object, *conditions: bool) -> None:
    if not all(conditions):
        raise ValueError(f"a number is out of its range: {strategy}")


@dataclass
class Scale:
    """Turns sums of values into means between 0 and 1."""

    least: float
    span: float
    loss: float

    @classmethod
    def of(cls, tree: Tree, min_max: bool, virtual_loss: float) -> Scale:
        r = tree.root.record
        if not min_max:
            return cls(0.0, 1.0, virtual_loss)
        return cls(r.min, r.max - r.min if r.max > r.min else 1.0, virtual_loss)

    def mean(self, visits: int, value_sum: float, in_flight: int) -> tuple[float, float]:
        """Q' and n' of visits and a sum of values, with expansions in flight."""
        n = visits + self.loss * in_flight
        if n == 0:
            return 0.0, 0.0
        return (value_sum - visits * self.least) / self.span / n, n

    def total(self, tree: Tree, n: TreeNode) -> float:
        """N' of a node: its visits, and what is in flight below it."""
        return n.record.visits + self.loss * sum(tree.in_flight(n, e) for e in n.record.edges)


@dataclass
class Candidates:
    """What a descent may do at a node, best first."""

    edges: list[Edge | None]
    """None: expand the node."""
    untried: list[Action]
    waiting: bool


def best_first(scored: list[tuple[float, Edge | None]]) -> list[Edge | None]:
    """The first of equals first."""
    return [e for _, e in sorted(scored, key=lambda c: c[0], reverse=True)]


def open_edges(n: TreeNode) -> Iterator[Edge]:
    """The edges with a child below which something may be left."""
    return (e for e in n.record.edges if e.child and not e.done)


def descend(tree: Tree, batch: int, order: Callable[[TreeNode], Candidates]) -> Decision:
    """Follows the best candidates until one can be expanded. If there is nothing on that way, it takes the next."""
    waiting = False
    at: TreeNode | None = tree.root
    above: list[tuple[TreeNode, Iterator[Edge | None], list[Action]]] = []
    while True:
        if at is not None:
            first = tree.ready(at)
            if first is None:
                found = order(at)
                waiting = waiting or found.waiting
                above.append((at, iter(found.edges), found.untried))
            elif first.step is not Step.NOTHING:
                return first
            else:
                waiting = waiting or first.waiting
        if not above:
            return Decision(Step.NOTHING, waiting=waiting)
        n, edges, untried = above[-1]
        try:
            e = next(edges)
        except StopIteration:
            above.pop()
            at = None
            continue
        if e is None:
            return Decision(Step.EXPAND, n, untried[:batch])
        at = n.child(e)

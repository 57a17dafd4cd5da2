"""Which node to expand next, and by which action. Strategies know no machines."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from ._tree import Action, Node


class Strategy(Protocol):
    """Chooses. It is asked again whenever there is room for another expansion."""

    def select(self, root: Node) -> tuple[Node, Action] | Node | None:
        """A node and an action to try there; or a node whose actions must be known first; or None: nothing for now."""
        ...


@dataclass
class UCT:
    """Upper confidence bounds: every action of a node is tried once, then the most promising child is entered.

    An expansion under way counts as `virtual_loss` outcomes of score 0, so that others go elsewhere meanwhile.
    """

    exploration: float = math.sqrt(2)
    virtual_loss: float = 1.0
    max_depth: int = 200

    def select(self, root: Node) -> tuple[Node, Action] | Node | None:
        return descend(root, self, 0)

    def bound(self, node: Node, child: Node) -> float:
        n = child.visits + self.virtual_loss * child.pending
        total = max(1.0, node.visits + self.virtual_loss * node.pending)
        if n == 0:
            return math.inf
        return child.value / n + self.exploration * math.sqrt(math.log(total) / n)


def descend(node: Node, uct: UCT, depth: int) -> tuple[Node, Action] | Node | None:
    """The best expansion below a node. A subtree that has nothing to expand is left for the next best."""
    if node.terminal or depth >= uct.max_depth:
        return None
    if node.actions is None:
        return node
    untried = node.untried()
    if untried:
        return node, untried[0]
    for child in sorted(node.children, key=lambda c: uct.bound(node, c), reverse=True):
        found = descend(child, uct, depth + 1)
        if found is not None:
            return found
    return None


@dataclass
class PUCT:
    """UCT with priors, as in AlphaZero: an action of a high prior is tried first, and one of a low prior perhaps never.

    The value of an action that was not tried is its node's mean, less `reduction`.
    """

    exploration: float = 1.5
    reduction: float = 0.1
    virtual_loss: float = 1.0
    max_depth: int = 200

    def select(self, root: Node) -> tuple[Node, Action] | Node | None:
        return self._descend(root, 0)

    def _descend(self, node: Node, depth: int) -> tuple[Node, Action] | Node | None:
        if node.terminal or depth >= self.max_depth:
            return None
        if node.actions is None:
            return node
        total = sum(max(0.0, a.prior) for a in node.actions) or 1.0
        visited = math.sqrt(max(1.0, node.visits + self.virtual_loss * node.pending))
        choices: list[tuple[float, Node | Action]] = []
        for action in node.untried():
            value = max(0.0, node.mean - self.reduction)
            choices.append((value + self.exploration * max(0.0, action.prior) / total * visited, action))
        for child in node.children:
            n = child.visits + self.virtual_loss * child.pending
            prior = max(0.0, child.action.prior) / total if child.action else 0.0
            choices.append((child.value / n + self.exploration * prior * visited / (1 + n), child))
        for _, choice in sorted(choices, key=lambda c: c[0], reverse=True):
            if isinstance(choice, Action):
                return node, choice
            found = self._descend(choice, depth + 1)
            if found is not None:
                return found
        return None


@dataclass
class BestOfN:
    """Tries actions of the root only. Each may be tried several times: the names of further attempts end in `#2`, `#3`."""

    n: int

    def select(self, root: Node) -> tuple[Node, Action] | Node | None:
        if root.actions is None:
            return root
        tried = len(root.children) + len(root.failed) + len(root.under_way)
        if tried >= self.n or not root.actions:
            return None
        taken = {c.action.name for c in root.children if c.action} | set(root.failed) | root.under_way
        attempt = 1
        while True:
            for action in root.actions:
                name = action.name if attempt == 1 else f"{action.name}#{attempt}"
                if name not in taken:
                    return root, Action(name, action.data, action.prior)
            attempt += 1


@dataclass
class Beam:
    """Goes down level by level: all actions of the `width` best nodes of a level, then of the next."""

    width: int
    depth: int

    def select(self, root: Node) -> tuple[Node, Action] | Node | None:
        level = [root]
        for _ in range(self.depth):
            busy = False
            for node in level:
                if node.terminal:
                    continue
                if node.actions is None:
                    return node
                untried = node.untried()
                if untried:
                    return node, untried[0]
                busy = busy or bool(node.under_way)
            if busy:
                return None  # the level is not complete, so its best are not known
            following = [c for node in level for c in node.children]
            level = sorted(following, key=lambda c: c.score, reverse=True)[: self.width]
            if not level:
                return None
        return None

"""Strategies: the cases that the searches of all SDKs keep to, and what the formulas give by hand."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest
from coppice.search import PUCT, UCT, Action, Beam, BestOfN, Strategy
from coppice.search._record import Edge, from_plain
from coppice.search._tree import Decision, Step, Tree, TreeNode
from test_search_records import cases, time_of

KINDS: dict[str, Any] = {"UCT": UCT, "PUCT": PUCT, "BestOfN": BestOfN, "Beam": Beam}
NOW = time_of("2026-11-28T15:00:00Z")


def strategy_of(setting: dict[str, Any]) -> Strategy:
    built: Strategy = KINDS[setting["kind"]](**{k: v for k, v in setting.items() if k != "kind"})
    return built


def tree_of(case: Any) -> Tree:
    """What a searcher named "me" knows of a tree."""
    nodes: dict[str, TreeNode] = {}

    def build(n: TreeNode) -> None:
        nodes[n.id] = n
        if n.id in case["nodes"]:
            n.record, n.version, n.stale = from_plain(case["nodes"][n.id]), 1, False
            for e in n.record.edges:
                if e.child:
                    build(n.child(e))

    build(TreeNode("root"))
    for id in case.get("stale", []):
        nodes[id].stale = True
    for id in case.get("busy", []):
        nodes[id].busy = True
    for id, lost in case.get("lost", {}).items():
        nodes[id].lost = set(lost)
    now = time_of(case["now"])
    for mark in case.get("marks", []):
        for name in mark["actions"]:
            nodes[mark["node"]].mark([Action(name)], 1, now + timedelta(hours=1))
    return Tree(nodes["root"], "me", lambda: now)


@pytest.mark.parametrize("case", cases("strategies.json", "choices"))
def test_choices(case: Any) -> None:
    d = strategy_of(case["strategy"]).choose(tree_of(case), case["batch"])
    got = {
        "step": d.step.value, "node": d.node.id if d.node else "", "actions": [a.name for a in d.actions],
        "waiting": d.waiting,
    }
    assert got == case["want"]


@pytest.mark.parametrize("case", cases("strategies.json", "proposals"))
def test_proposals(case: Any) -> None:
    actions = [Action(name, {"x": name}, 0.5) for name in case["actions"]]
    got = strategy_of(case["strategy"]).proposals(case["depth"], actions)
    assert [a.name for a in got] == case["want"]
    assert all(a.data == {"x": a.name[0]} and a.prior == 0.5 for a in got)


def small(*values: tuple[int, float]) -> Tree:
    """A tree whose root has children of so many visits and such sums of values; one without visits was not tried."""
    root = TreeNode("root", version=1, stale=False)
    root.record.proposed = True
    for i, (visits, value_sum) in enumerate(values):
        e = Edge("abc"[i], prior=i + 1.0)
        if visits:
            mean = value_sum / visits
            e.child, e.visits, e.value_sum, e.min, e.max = f"child {e.name}", visits, value_sum, mean, mean
        root.record.edges.append(e)
    root.record.count()
    return Tree(root, "me", lambda: NOW)


def takes(tree: Tree, s: Strategy) -> str:
    """The action of the root that a strategy takes."""
    d = s.choose(tree, 1)
    if d.step is Step.READ:  # of the child that it would descend to
        assert d.node is not None
        return d.node.action
    assert d.step is Step.EXPAND
    return "try " + d.actions[0].name


FULL = ((10, 6.0), (4, 2.0), (2, 0.6))


@pytest.mark.parametrize(
    "s, want",
    [(UCT(c=0), "a"), (UCT(c=1.4), "c"), (PUCT(c=0.1), "a")],  # UCT: 1.337, 1.666, 1.948; PUCT: 0.606, 0.527, 0.367
)
def test_formulas(s: Strategy, want: str) -> None:
    assert takes(small(*FULL), s) == want


def test_ties() -> None:
    """The constant at which b gets ahead of a."""
    # 0.6 + c·√(ln 16/10) = 0.5 + c·√(ln 16/4)
    uct = 0.1 / (math.sqrt(math.log(16) / 4) - math.sqrt(math.log(16) / 10))
    # 0.6 + c·(1/6)·4/11 = 0.5 + c·(2/6)·4/5
    puct = 0.1 / (4 * 2 / 6 / 5 - 4 / 6 / 11)
    for kind, tie in ((UCT, uct), (PUCT, puct)):
        for c, want in ((tie - 0.001, "a"), (tie + 0.001, "b")):
            tree = small(*FULL)
            tree.root.record.edges[2].done = True
            assert takes(tree, kind(c=c)) == want


@pytest.mark.parametrize(
    "s, least", [(UCT(c=0.5), 2), (PUCT(c=0.5, virtual_loss=3), 2), (UCT(c=0.01, virtual_loss=1e-6), 0)]
)
def test_virtual_loss(s: Strategy, least: int) -> None:
    """Parallel descents spread over equal children, and without it, or almost, they do not."""
    tree = small((4, 2.01), (4, 2), (4, 2))
    for e in tree.root.record.edges:
        e.prior = 1
    times: dict[str, int] = {}
    for _ in range(9):
        n = s.choose(tree, 1).node
        assert n is not None
        times[n.action] = times.get(n.action, 0) + 1
        n.mark([Action("x")], 1, NOW)  # an expansion at the child
    assert all(times.get(name, 0) >= least if least else name not in times for name in "bc")


@pytest.mark.parametrize("s", [UCT(c=0.5), PUCT(c=0.5), BestOfN(2), Beam(2, 2)])
def test_busy(s: Strategy) -> None:
    """What another worker is about to do is waited for."""
    tree = small((0, 0), (0, 0))
    d = s.choose(tree, 5)
    assert d.step is Step.EXPAND and len(d.actions) == 2 and d.node is not None
    d.node.mark(d.actions, 1, NOW)
    assert s.choose(tree, 5) == Decision(Step.NOTHING, waiting=True)
    tree.root.busy = True
    assert s.choose(tree, 5) == Decision(Step.NOTHING, waiting=True)
    tree.root.busy = False
    d.node.mark(d.actions, -1)
    assert s.choose(tree, 5) == d


def test_a_deep_tree() -> None:
    """It is deeper than functions can be nested."""
    root = at = TreeNode("root", version=1, stale=False)
    for i in range(5000):
        at.record.proposed, at.record.edges = True, [Edge("a", child=f"n{i}", visits=1)]
        at = at.child(at.record.edges[0])
        at.stale, at.version = False, 1
    tree = Tree(root, "me", lambda: NOW)
    assert UCT(c=1).choose(tree, 1) == Decision(Step.PROPOSE, at)
    assert sum(1 for _ in tree.snapshot().walk()) == 5001 and at.view().depth == 5000
    assert root.best()[0] is root


@pytest.mark.parametrize(
    "make",
    [lambda: UCT(c=-1), lambda: UCT(c=math.nan), lambda: UCT(1, virtual_loss=0), lambda: UCT(1, widening=-1),
     lambda: PUCT(c=-1), lambda: PUCT(1, fpu=-1), lambda: BestOfN(0), lambda: BestOfN(51), lambda: Beam(0, 1),
     lambda: Beam(1, 0)],
)
def test_numbers_out_of_range(make: Any) -> None:
    with pytest.raises(ValueError, match="out of its range"):
        make()

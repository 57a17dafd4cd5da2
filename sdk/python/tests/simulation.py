"""A search without machines: a problem with a known optimum, and stores that fail."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from coppice.search import Action, Memory, Node, NodeChanged, NodeGone, Outcome, Record, Search, SearchResult, record_of
from coppice.search._tree import Tree

ROOT = "root"


def word_of(node: Node) -> str:
    return "".join(a.name[0] for a in node.trajectory())


class Words(Memory):
    """A node is a word, an action adds a letter, and the value is how much of the target the word begins with."""

    def __init__(self, target: str = "cab", letters: str = "abc", priors: Mapping[str, float] | None = None) -> None:
        super().__init__()
        self.target = target
        self.letters = letters
        self.priors = priors or {}
        self.tried: list[str] = []
        """Words, in the order of their ends."""
        self.hook: Callable[[str], Awaitable[Any]] | None = None
        """Called before a word is made."""

    def value(self, word: str) -> float:
        same = 0
        while same < min(len(word), len(self.target)) and word[same] == self.target[same]:
            same += 1
        return same / len(self.target)

    async def actions(self, node: Node) -> Sequence[Action]:
        if node.depth >= len(self.target):
            return []
        return [Action(letter, prior=self.priors.get(letter, 0)) for letter in self.letters]

    async def expand(self, node: Node, actions: Sequence[Action]) -> Sequence[Outcome]:
        out: list[Outcome] = []
        for a in actions:
            word = word_of(node) + a.name[0]
            try:
                if self.hook is not None:
                    await self.hook(word)
            except asyncio.CancelledError as err:
                if not out:
                    raise
                return out + [Outcome(error=err)] * (len(actions) - len(out))  # what was made must be known
            out.append(self.make(node.id, a.name, word))
        return out

    def make(self, parent: str, action: str, word: str) -> Outcome:
        """A fork that became a checkpoint."""
        self.tried.append(word)
        id, ends = f"{word}-{len(self.tried)}", len(word) == len(self.target)
        outcome = Outcome(self.value(word), terminal=ends, data={"word": word}, child=id)
        self.add(parent, outcome.child, record_of(action, outcome))
        return outcome


class Broken(Exception):
    """A store that is away."""


class Shared:
    """What one searcher has of a shared store: it may crash, lose nodes, and have other writers."""

    def __init__(self, words: Words) -> None:
        self.words = words
        self.dead = False
        self.others = False
        """About every second change comes after one of somebody else."""
        self.gone = ""
        """What the ids of deleted nodes begin with."""
        self.conflicts = 0
        self.rng = random.Random(1)

    def check(self, id: str) -> None:
        if self.dead:
            raise Broken
        if self.gone and id.startswith(self.gone):
            raise NodeGone(id)

    async def load(self, id: str) -> tuple[Record, int]:
        self.check(id)
        await asyncio.sleep(0)
        return await self.words.load(id)

    async def save(self, id: str, version: int, record: Record) -> int:
        self.check(id)
        await asyncio.sleep(0)
        if self.others and self.rng.random() < 0.5:
            now, v = await self.words.load(id)
            await self.words.save(id, v, now)
        try:
            return await self.words.save(id, version, record)
        except NodeChanged:
            self.conflicts += 1
            raise

    async def children(self, id: str) -> dict[str, Record]:
        self.check(id)
        return await self.words.children(id)


def tree_of(s: Search) -> Tree:
    return s._tree


async def run(s: Search) -> SearchResult:
    """Runs a search, which has nothing under way afterwards."""
    result = await s.run()
    assert not any(n.mine or n.busy for n in tree_of(s).nodes())
    return result


async def check_tree(words: Words, id: str = ROOT) -> tuple[int, list[float]]:
    """Compares the statistics of each node with what is below it, and wants nothing in flight.

    Returns how many nodes there are, and their values.
    """
    record, _ = await words.load(id)
    values = [] if record.value is None else [record.value]
    for e in record.edges:
        assert not e.in_flight, (id, e)
        if e.child:
            nodes, below = await check_tree(words, e.child)
            assert (e.visits, e.min, e.max) == (nodes, min(below), max(below)), (id, e)
            assert math.isclose(e.value_sum, sum(below), abs_tol=1e-9), (id, e)
            values += below
    assert record.visits == len(values), (id, record)
    if values:
        assert (record.min, record.max) == (min(values), max(values)), (id, record)
        assert math.isclose(record.value_sum, sum(values), abs_tol=1e-9), (id, record)
    return len(values), values

"""A store in memory."""

from __future__ import annotations

from typing import Protocol

from ._record import Record, SearchError


class NodeChanged(SearchError):
    """Another searcher has changed the node: its version is another one."""


class NodeGone(SearchError):
    """The node is deleted: it cannot be expanded any more."""


class Store(Protocol):
    """Keeps the records of nodes."""

    async def load(self, id: str) -> tuple[Record, int]:
        """The record of a node, an empty one if it has none, and its version.

        The version is 1 or more and grows with each change. Raises NodeGone.
        """
        ...

    async def save(self, id: str, version: int, record: Record) -> int:
        """Replaces the record of a node if it has this version still, and returns the new one.

        Raises NodeChanged and NodeGone.
        """
        ...

    async def children(self, id: str) -> dict[str, Record]:
        """The children of a node that have a record, by id.

        It is asked when a searcher may have made children that it did not write down, for example because it crashed.
        It answers when the children that are being made exist or have failed. Raises NodeGone.
        """
        ...


class Memory:
    """A store in memory: to try a strategy on a simulated problem."""

    def __init__(self) -> None:
        self._nodes: dict[str, tuple[str, Record, int]] = {}

    def add(self, parent: str, id: str, record: Record) -> None:
        """Makes a node, as a checkpoint with a record is made."""
        self._nodes[id] = (parent, record.clone(), 1)

    async def load(self, id: str) -> tuple[Record, int]:
        """The record of a node, and its version. A node that was never added has an empty record."""
        _, record, version = self._nodes.get(id, ("", Record(), 1))
        return record.clone(), version

    async def save(self, id: str, version: int, record: Record) -> int:
        """Replaces the record of a node. Raises NodeChanged if it has another version."""
        parent, _, now = self._nodes.get(id, ("", Record(), 1))
        if version != now:
            raise NodeChanged(f"node {id} has version {now}, and not {version}")
        self._nodes[id] = (parent, record.clone(), version + 1)
        return version + 1

    async def children(self, id: str) -> dict[str, Record]:
        """The nodes that were added below a node."""
        return {child: record.clone() for child, (parent, record, _) in self._nodes.items() if parent == id}

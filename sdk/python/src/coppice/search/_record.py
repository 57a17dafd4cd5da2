"""What the annotation of a node holds, and how searchers change it. Pure: no clock, no I/O.

The format is "coppice.search/v1". The package sdk/go/search of the Go SDK describes it; both keep to the cases in
sdk/conformance/search.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Annotated, Any, Union

import msgspec
from msgspec import UNSET, UnsetType

from .._errors import CoppiceError
from ._json import dumps, well_formed

MAX_RECORD = 12 << 10
"""The most bytes of a record as JSON. A checkpoint has room for 16 KiB of annotations; others may need some."""
MAX_SEARCHERS = 32
"""How many searchers can be named at one edge."""
MAX_REASON = 160
"""The most bytes, as JSON, of the reason of an action that led to no node. The rest is cut."""
MAX_NAME = 128
"""The most bytes of the name of an action or of a searcher."""
MAX_SEARCH = 64
"""The most bytes of the name of a search."""
EARLIER = "-"
"""Stands for a searcher that left a claim and is gone."""
TRIED_BYTES = 200
"""What an edge needs besides its action when it has been tried: its child's id and numbers, or a reason."""
NEVER = datetime(1, 1, 1, tzinfo=timezone.utc)
"""The end of a claim that is over in any case."""

Count = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Data = Union[UnsetType, Any]
"""Any JSON; UNSET if there is none."""


class SearchError(CoppiceError):
    """The base of the exceptions of searches."""


class RecordTooLarge(SearchError, ValueError):
    """A record does not fit into annotations of a checkpoint: propose fewer actions, or keep less data with them."""


class RecordMangled(SearchError, ValueError):
    """A record is not one: another program has changed it, or a newer version wrote it."""


@dataclass(frozen=True)
class Action:
    """Something that can be tried at a node."""

    name: str
    """Tells the action from the others of the node, in 1 to 128 bytes of UTF-8."""
    data: Any = None
    """What the task needs to do it, as JSON; None if there is none."""
    prior: float = 0.0
    """P(s, a) up to a factor, 0 or more. PUCT divides it by the sum over the node's actions; all 0 are all equal."""


@dataclass(frozen=True)
class Outcome:
    """What became of an action."""

    value: float = 0.0
    """The value of the child, the greater the better; from 0 to 1 unless the strategy has `min_max`."""
    terminal: bool = False
    """Nothing can be tried at the child."""
    data: Any = None
    """Facts about the child, as JSON; kept with it. Its numbers may become doubles. None if there are none."""
    reason: str = ""
    """Why the action led to no child. It counts as tried then, and has no value."""
    child: str = ""
    """The id of the child. `Task.act` leaves it empty: it is set when the checkpoint is made."""
    error: BaseException | None = None
    """Why the action could not be tried. It may be tried again."""
    unknown: bool = False
    """With `error`: the action may have led to a child all the same. It is looked for before the next try."""


class Claim(msgspec.Struct, frozen=True):
    """What one searcher has under way, until its time is over: nobody waits for a searcher that crashed."""

    count: Count = 0
    until: Annotated[datetime, msgspec.Meta(tz=True)] = NEVER


class Edge(msgspec.Struct, rename={"name": "action"}):
    """An action of a node, with the statistics of the subtree that it led to."""

    name: str = ""
    prior: float = 0.0
    data: Data = UNSET
    child: str = ""
    """The node that the action led to; empty if it was not tried, or led to none."""
    value: float = 0.0
    """The child's own value."""
    visits: Count = 0
    """N(s, a): how many values are known of the child and below it."""
    value_sum: float = 0.0
    """W(s, a): the sum of these values."""
    min: float = 0.0
    """The least of these values."""
    max: float = 0.0
    """The greatest of these values."""
    done: bool = False
    """Nothing is left to be tried on this way."""
    reason: str = ""
    """Why the action led to no node."""
    in_flight: dict[str, Claim] = {}
    """By the name of a searcher: its expansions under way on this way."""

    @property
    def action(self) -> Action:
        return Action(self.name, known(self.data), self.prior)

    def merge(self, child: str, record: Record) -> None:
        """Takes over what is known of a child. It can be repeated, and done in any order: visits only grow."""
        if self.child and self.child != child:
            return  # another searcher tried the same action after the claim of the first was over, and was faster
        if not self.child and record.value is not None:
            self.value = record.value
        self.child = child
        self.done = self.done or record.done or record.terminal
        if record.visits > self.visits:
            self.visits, self.value_sum, self.min, self.max = record.visits, record.value_sum, record.min, record.max

    def settle(self, outcome: Outcome) -> None:
        """Writes what came out, unless another searcher has tried the same action meanwhile."""
        if self.child:
            return
        if not outcome.child:
            self.done, self.reason = True, clip(outcome.reason)
            return
        v = outcome.value
        self.merge(outcome.child, Record(value=v, visits=1, value_sum=v, min=v, max=v, terminal=outcome.terminal))

    def claim(self, searcher: str, claim: Claim, now: datetime) -> None:
        """Sets what one searcher has under way here.

        It drops claims whose time is over, but not if the action was not tried: what the searcher that crashed has left
        must be looked for first.
        """
        if self.child or self.done:
            self.drop(now)
        self.in_flight.pop(searcher, None)
        exclusive = not self.child and bool(self.in_flight)
        if claim.count > 0 and not exclusive and len(self.in_flight) < MAX_SEARCHERS:
            self.in_flight[searcher] = claim

    def drop(self, now: datetime) -> None:
        """Removes the claims whose time is over."""
        self.in_flight = {name: c for name, c in self.in_flight.items() if now < c.until}

    def others(self, searcher: str, now: datetime) -> int:
        """How many expansions of other searchers are under way here."""
        return sum(max(c.count, 0) for name, c in self.in_flight.items() if name != searcher and now < c.until)

    def abandoned(self, searcher: str, now: datetime) -> bool:
        """Whether the action was not tried, and has only claims whose time is over."""
        if self.child or self.done or any(now < c.until for c in self.in_flight.values()):
            return False
        return any(name != searcher for name in self.in_flight)

    def abandon(self) -> None:
        """Has every searcher look for a child before it tries the action again."""
        if not self.child and not self.done:
            self.in_flight[EARLIER] = Claim(1)

    def clone(self) -> Edge:
        copied: Edge = msgspec.structs.replace(self, in_flight=dict(self.in_flight))
        return copied

    def plain(self) -> dict[str, Any]:
        """The edge as JSON has it. What is empty is left out."""
        out: dict[str, Any] = {"action": self.name}
        for name in ("prior", "data", "child", "value", "visits", "value_sum", "min", "max", "done", "reason"):
            value = getattr(self, name)
            if value is not UNSET and (value or name == "data"):
                out[name] = value
        if self.in_flight:
            out["in_flight"] = {
                name: {"count": c.count, "until": timestamp(c.until)} for name, c in sorted(self.in_flight.items())
            }
        return out


class Record(msgspec.Struct):
    """What the annotation of a node holds. All searchers change it by compare-and-set."""

    action: str = ""
    """The name of the action that led to the node; empty at a root."""
    value: float | None = None
    """The node's own value; None for a root that was not evaluated."""
    terminal: bool = False
    """Nothing can be tried here."""
    data: Data = UNSET
    """Whatever the task keeps with the node."""
    visits: Count = 0
    """N(s): 1 if the node has a value of its own, and the visits of its edges."""
    value_sum: float = 0.0
    """W(s): the sum of these values."""
    min: float = 0.0
    """The least of these values; 0 without visits."""
    max: float = 0.0
    """The greatest of these values; 0 without visits."""
    done: bool = False
    """Nothing is left to be tried here and below."""
    edges: list[Edge] = []
    """The actions, in the order of the proposal."""
    proposed: bool = False
    """Whether the edges are there, perhaps none."""

    @property
    def mean(self) -> float:
        """The mean of the values that are known of the node and below it; 0 without visits."""
        return self.value_sum / self.visits if self.visits else 0.0

    def edge(self, action: str) -> Edge | None:
        """The edge of an action; None if there is none."""
        return next((e for e in self.edges if e.name == action), None)

    def clone(self) -> Record:
        copied: Record = msgspec.structs.replace(self, edges=[e.clone() for e in self.edges])
        return copied

    def propose(self, actions: Iterable[Action]) -> None:
        """Sets the edges, unless another searcher was faster. Raises ValueError for actions that a node cannot have."""
        if self.proposed:
            return
        actions = list(actions)
        names: set[str] = set()
        for a in actions:
            if not a.name or well_formed(a.name, "") != a.name or len(a.name.encode()) > MAX_NAME:
                raise ValueError(f"action {a.name[:MAX_NAME]!r}: a name has 1 to {MAX_NAME} bytes of UTF-8")
            if a.name in names:
                raise ValueError(f"two actions of a node are named {a.name!r}")
            if not 0 <= a.prior < math.inf:
                raise ValueError(f"the prior of action {a.name!r} is {a.prior}; it must be 0 or more")
            names.add(a.name)
        edges = [Edge(a.name, float(a.prior), kept(a.data)) for a in actions]
        proposed: Record = msgspec.structs.replace(self, edges=self.edges + edges)
        size = TRIED_BYTES * len(actions) + len(proposed._json())
        if size > MAX_RECORD:
            raise too_large(f"{len(actions)} actions need {size} bytes when all are tried")
        self.edges, self.proposed = proposed.edges, True

    def count(self) -> None:
        """Sums up the node's own value and its edges."""
        v = self.value
        known_of = [] if v is None else [(1, v, v, v)]
        known_of += [(e.visits, e.value_sum, e.min, e.max) for e in self.edges if e.visits]
        self.visits, self.value_sum, self.min, self.max = 0, 0.0, 0.0, 0.0
        for i, (visits, value_sum, least, greatest) in enumerate(known_of):
            self.visits += visits
            self.value_sum += value_sum
            self.min = min(self.min, least) if i else least
            self.max = max(self.max, greatest) if i else greatest
        done = self.proposed and all(e.done for e in self.edges)
        self.done = self.done or done or self.terminal

    def disown(self, searcher: str) -> None:
        """Ends the claims that a searcher left before it was started again."""
        for e in self.edges:
            if searcher in e.in_flight:
                e.in_flight[EARLIER] = Claim(e.in_flight.pop(searcher).count)

    def plain(self) -> dict[str, Any]:
        """The record as JSON has it. What is empty is left out, apart from the totals."""
        out: dict[str, Any] = {}
        for name in ("action", "value", "terminal", "data", "visits", "value_sum", "min", "max", "done"):
            value = getattr(self, name)
            if name == "value":
                keep = value is not None
            else:
                keep = value is not UNSET and (bool(value) or name in ("data", "visits", "value_sum", "min", "max"))
            if keep:
                out[name] = value
        if self.edges:
            out["edges"] = [e.plain() for e in self.edges]
        if self.proposed:
            out["proposed"] = True
        return out

    def _json(self) -> bytes:
        return dumps(self.plain()).encode()

    def check_size(self) -> None:
        """Raises RecordTooLarge if `encode` would. It is quick for a record that is small."""
        if 6 * len(msgspec.json.encode(self)) > MAX_RECORD:  # no character and no number grows by more
            self.encode()

    def encode(self) -> bytes:
        """The record as JSON, of at most MAX_RECORD bytes. Raises RecordTooLarge.

        If there is no room for the claims of all, it leaves out those that keep no other searcher from trying the same
        action: without them there is less virtual loss.
        """
        text = self._json()
        if len(text) <= MAX_RECORD:
            return text
        small = self.clone()
        for e in small.edges:
            if e.child:
                e.in_flight = {}
        text = small._json()
        if len(text) > MAX_RECORD:
            raise too_large(f"it has {len(text)} bytes")
        return text


def decode(text: bytes) -> Record:
    """Reads a record as JSON. Raises RecordMangled for what no searcher writes."""
    if len(text) > 2 * MAX_RECORD:  # the server may add white space
        raise mangled(f"{len(text)} bytes")
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
        raise mangled(str(err)) from err
    return from_plain(found)


def from_plain(found: Any) -> Record:
    """A record from JSON that was read already. Raises RecordMangled for what no searcher writes."""
    if not isinstance(found, Mapping):
        raise mangled(f"it is {type(found).__name__}, and no object")
    try:
        if len(dumps(found).encode()) > 2 * MAX_RECORD:
            raise mangled(f"more than {2 * MAX_RECORD} bytes")
        record = msgspec.convert(without_nulls(found), Record)
    except RecordMangled:
        raise
    except (msgspec.ValidationError, ValueError, OverflowError, RecursionError) as err:
        raise mangled(str(err)) from err
    names: set[str] = set()
    for e in record.edges:
        if not e.name or e.name in names or e.visits < 0 or len(e.in_flight) > MAX_SEARCHERS:
            raise mangled(f"edge {e.name!r}")
        names.add(e.name)
        e.in_flight = {name: normal(c) for name, c in e.in_flight.items()}
    if record.visits < 0:
        raise mangled(f"{record.visits} visits")
    return record


def without_nulls(found: Any, depth: int = 0) -> Any:
    """JSON without the members that are null, which count as absent. What is in "data" stays as it is."""
    if isinstance(found, Mapping):
        return {
            k: v if k == "data" and depth < 2 else without_nulls(v, depth + 1)
            for k, v in found.items()
            if v is not None or (k == "data" and depth < 2)
        }
    if isinstance(found, list):
        return [without_nulls(v, depth) for v in found]
    return found


def normal(claim: Claim) -> Claim:
    try:
        return Claim(claim.count, claim.until.astimezone(timezone.utc))
    except OverflowError as err:
        raise mangled(f"a claim until {claim.until}") from err


def mangled(why: str) -> RecordMangled:
    return RecordMangled(f"another program has changed it, or it was written by a newer version: {why[:200]}")


def too_large(what: str) -> RecordTooLarge:
    return RecordTooLarge(
        f"{what}, and at most {MAX_RECORD} fit into the annotations of a checkpoint; "
        "propose fewer actions, or keep less data with them"
    )


def timestamp(at: datetime) -> str:
    """A time in UTC, as RFC 3339 has it, without a fraction that is 0."""
    text = at.astimezone(timezone.utc).replace(tzinfo=None).isoformat()
    return (text.rstrip("0") if "." in text else text) + "Z"


def known(data: Any) -> Any:
    """Data for a program: None if there are none."""
    return None if data is UNSET else data


def kept(data: Any) -> Data:
    """Data of a program, as they are read again. Raises ValueError if JSON does not have them."""
    return UNSET if data is None else msgspec.json.decode(dumps(data))


def clip(reason: str) -> str:
    """Cuts a reason to MAX_REASON."""
    reason, size = well_formed(reason, "?"), 0
    for i, c in enumerate(reason):
        size += len(dumps(c).encode()) - 2
        if size > MAX_REASON:
            return reason[:i]
    return reason


def record_of(action: str, outcome: Outcome) -> Record:
    """The record of a new child. Raises ValueError if JSON does not have its data."""
    record = Record(action=action, value=outcome.value, terminal=outcome.terminal, data=kept(outcome.data))
    record.count()
    return record


def failed(error: BaseException, *, unknown: bool = False) -> Outcome:
    """The outcome of an action that could not be tried."""
    return Outcome(error=error, unknown=unknown)

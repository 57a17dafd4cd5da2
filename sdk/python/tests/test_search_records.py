"""Records, and the cases that the searches of all SDKs keep to: sdk/conformance/search."""

from __future__ import annotations

import json
import math
import random
import string
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from coppice.search import Action, Claim, Edge, Outcome, Record, RecordMangled, RecordTooLarge
from coppice.search._json import dumps
from coppice.search._record import MAX_REASON, MAX_RECORD, MAX_SEARCHERS, clip, decode, from_plain

CASES = Path(__file__).parents[2] / "conformance" / "search"


def cases(file: str, kind: str) -> list[Any]:
    """The cases of a kind, with their names for pytest."""
    found = json.loads((CASES / file).read_text())[kind]
    return [pytest.param(c, id=c.get("name")) for c in found]


def time_of(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def same(got: Record, want: object) -> None:
    """Compares what a searcher writes for two records."""
    assert got.encode().decode() == from_plain(want).encode().decode()


@pytest.mark.parametrize("case", cases("records.json", "kept"))
def test_kept(case: Any) -> None:
    assert decode(case["read"].encode()).encode().decode() == case["written"]
    assert from_plain(json.loads(case["read"])).encode().decode() == case["written"]


@pytest.mark.parametrize("case", cases("records.json", "refused"))
def test_refused(case: Any) -> None:
    with pytest.raises(RecordMangled):
        decode(case["read"].encode())


@pytest.mark.parametrize("found", [None, 5, "x", [], {"value": math.inf}, {"data": "x" * 2 * MAX_RECORD}, {5: 5}])
def test_what_is_no_record(found: object) -> None:
    with pytest.raises(RecordMangled):
        from_plain(found)


@pytest.mark.parametrize("case", cases("records.json", "too_large"))
def test_too_large(case: Any) -> None:
    record = decode(case["read"].encode())
    with pytest.raises(RecordTooLarge, match="at most 12288"):
        record.encode()


@pytest.mark.parametrize("case", cases("records.json", "counted"))
def test_count(case: Any) -> None:
    record = from_plain(case["record"])
    record.count()
    same(record, case["want"])


@pytest.mark.parametrize("case", cases("proposals.json", "proposals"))
def test_proposals(case: Any) -> None:
    record = from_plain(case["record"])
    actions = [Action(a["action"], a.get("data"), a.get("prior", 0)) for a in case["actions"]]
    if case["want"] is None:
        before = record.clone()
        with pytest.raises(ValueError):
            record.propose(actions)
        assert record == before
    else:
        record.propose(actions)
        same(record, case["want"])


@pytest.mark.parametrize(
    "action", [Action("\ud800"), Action("a", prior=math.nan), Action("a", prior=math.inf), Action("a", data={1, 2}),
               Action("a", data={1: 2}), Action("a", data=math.nan)],
)
def test_actions_that_json_does_not_have(action: Action) -> None:
    with pytest.raises(ValueError):
        Record().propose([action])


@pytest.mark.parametrize("case", cases("proposals.json", "reasons"))
def test_reasons(case: Any) -> None:
    assert clip(case["reason"]) == case["want"]
    assert len(dumps(clip(case["reason"])).encode()) <= MAX_REASON + 2


def test_a_reason_that_is_no_text() -> None:
    assert clip("a\ud800\ud801b\udfff") == "a?b?"


@pytest.mark.parametrize("case", cases("merges.json", "merges"))
def test_merges(case: Any) -> None:
    record = from_plain({"edges": [case["edge"]]})
    for step in case["steps"]:
        if step.get("settle"):
            child, reason = step.get("child", ""), step.get("reason", "")
            outcome = Outcome(step.get("value", 0.0), step.get("terminal", False), reason=reason, child=child)
            record.edges[0].settle(outcome)
        else:
            record.edges[0].merge(step["child"], from_plain(step["record"]))
    same(record, {"edges": [case["want"]]})


@pytest.mark.parametrize("case", cases("claims.json", "claims"))
def test_claims(case: Any) -> None:
    now, record = time_of(case["now"]), from_plain(case["record"])
    for step in case["steps"]:
        edge = record.edge(step.get("action", "")) or Edge()
        if step["do"] == "claim":
            edge.claim(step["searcher"], Claim(step["count"], time_of(step["until"])), now)
        elif step["do"] == "drop":
            edge.drop(now)
        elif step["do"] == "abandon":
            edge.abandon()
        else:
            assert step["do"] == "disown"
            record.disown(step["searcher"])
    same(record, case["want"])
    for seen in case["seen"]:
        found = record.edge(seen["action"])
        assert found is not None
        assert found.others(seen["searcher"], now) == seen["others"], seen
        assert found.abandoned(seen["searcher"], now) == seen["abandoned"], seen


def test_claims_are_bounded() -> None:
    """Many searchers at many edges do not fill the annotation, and an edge that only one may try keeps its claim."""
    now, until = time_of("2026-11-28T15:00:00Z"), time_of("2026-11-28T16:00:00Z")
    edges = [Edge("x" * (i + 1), child="ckpt_06e5bqv7z0f3m8k2h1t9r4w6xc", visits=1) for i in range(30)]
    record = Record(edges=[*edges, Edge("untried")])
    for i in range(2 * MAX_SEARCHERS):
        for e in record.edges:
            e.claim(f"searcher {i}", Claim(1, until), now)
    assert len(record.edges[0].in_flight) == MAX_SEARCHERS and len(record.edges[30].in_flight) == 1
    again = decode(record.encode())
    assert not again.edges[0].in_flight and len(again.edges[30].in_flight) == 1
    assert len(record.edges[0].in_flight) == MAX_SEARCHERS  # only what is written lacks them


def test_what_was_proposed_has_room_until_all_are_tried() -> None:
    for reason in ("x" * 1000, "\0" * 1000, "é" * 1000, "<" * 1000, ""):
        record = Record()
        record.propose([Action(str(i)) for i in range(56)])
        for e in record.edges:
            e.settle(Outcome(1 / 3, child="" if reason else "ckpt_06e5bqv7z0f3m8k2h1t9r4w6xc", reason=reason))
            if not reason:
                e.visits, e.value_sum = 123456, 123456 / 7
        record.count()
        record.encode()


def test_a_copy_is_changed_alone() -> None:
    record = Record(edges=[Edge("a", in_flight={"x": Claim(1)})])
    copied = record.clone()
    copied.edges[0].in_flight["y"] = Claim(1)
    copied.edges[0].child = "c"
    assert record.edges[0].child == "" and list(record.edges[0].in_flight) == ["x"]


def test_json_is_what_a_parser_reads() -> None:
    rng = random.Random(5)

    def value(depth: int) -> Any:
        kinds: list[Any] = [None, True, False, rng.randint(-(10**20), 10**20)]
        kinds += [rng.uniform(-1, 1) * 10 ** rng.randint(-30, 15), float(rng.randint(-100, 100))]
        kinds.append("".join(rng.choices(string.printable + "é€😀\u2028<", k=8)))
        if depth < 3:
            kinds.append([value(depth + 1) for _ in range(3)])
            kinds.append({str(rng.random()): value(depth + 1) for _ in range(3)})
        return rng.choice(kinds)

    for _ in range(2000):
        v = value(0)
        assert json.loads(dumps(v)) == v

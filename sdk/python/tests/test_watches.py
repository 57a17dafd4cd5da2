"""Watches, and what a guest may send as their events."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from coppice import AsyncCoppice, Config, Coppice, errors
from double import Answer, Double, problem
from samples import WATCH, WS, watch, watch_event, workspace


def lines(*events: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(e).encode() + b"\n" for e in events)


def test_create_list_and_delete(double: Double, client: Coppice) -> None:
    double.script = [
        Answer(200, workspace()), Answer(201, watch()), Answer(201, watch(recursive=True)),
        Answer(200, {"items": [watch(), watch(ended=True)]}), Answer(204),
    ]
    watches = client.workspace(WS).watches
    assert watches.create("/d").id == WATCH
    assert watches.create("~/d", recursive=True, user="dev").recursive
    assert [w.ended for w in watches.list()] == [False, True]
    watches.delete(WATCH)
    path = f"/v1/workspaces/{WS}/watches"
    sent = double.requests[1:]
    assert [(r.method, r.path) for r in sent] == [("POST", path), ("POST", path), ("GET", path), ("DELETE", f"{path}/{WATCH}")]
    assert [r.json() for r in sent[:2]] == [{"path": "/d"}, {"path": "~/d", "recursive": True, "user": "dev"}]


@pytest.mark.parametrize("step", [1, 7, 1 << 20])
def test_events_in_pieces(double: Double, client: Coppice, step: int) -> None:
    data = lines(watch_event(3, name="ü\n"), watch_event(4, type="overflow")) + b"\n" + lines(watch_event(9, dir=True))
    double.script = [Answer(200, workspace()), Answer(200, chunks=[data[i : i + step] for i in range(0, len(data), step)])]
    got = list(client.workspace(WS).watches.events(WATCH, after=2))
    assert [(e.seq, e.type, e.name, e.dir) for e in got] == [
        (3, "create", "ü\n", False), (4, "overflow", "4", False), (9, "create", "9", True),
    ]
    sent = double.requests[1]
    assert sent.path == f"/v1/workspaces/{WS}/watches/{WATCH}/events" and sent.query == {"after": ["2"]}


def test_following(double: Double) -> None:
    """It may be silent for as long as nothing changes."""
    times: list[Any] = []

    async def note(request: Any) -> None:
        times.append(request.extensions["timeout"]["read"])

    async def main() -> list[int]:
        async with AsyncCoppice(config=Config(server=double.url)) as c:
            ws = await c.workspace(WS)
            ws._t.http.event_hooks = {"request": [note]}
            return [e.seq for f in (False, True) async for e in ws.watches.events(WATCH, follow=f)]

    double.script = [Answer(200, workspace()), Answer(200, chunks=[lines(watch_event(1), watch_event(2))])]
    assert asyncio.run(main()) == [1, 2, 1, 2]
    assert [r.query for r in double.requests[1:]] == [{}, {"follow": ["true"]}]
    assert times == [Config(server=double.url).read_timeout, None]


BROKEN = [
    ("within an event", Answer(200, chunks=[lines(watch_event(1)), b'{"seq":2'])),
    ("without an end", Answer(200, chunks=[lines(watch_event(1)), lines(watch_event(2))[:-1]])),
    ("connection", Answer(200, lines(watch_event(1), watch_event(2)), cut=len(lines(watch_event(1))) + 5)),
]


@pytest.mark.parametrize(("what", "answer"), BROKEN, ids=[b[0] for b in BROKEN])
def test_events_that_break_off(double: Double, client: Coppice, what: str, answer: Answer) -> None:
    """What came whole is there, and the error says that there was more."""
    double.script = [Answer(200, workspace()), answer]
    got = []
    with pytest.raises(errors.ConnectionFailedError):
        for event in client.workspace(WS).watches.events(WATCH, follow=True):
            got.append(event.seq)
    assert got == [1] and len(double.requests) == 2


HOSTILE = [
    ("no JSON", [b"noise\n"]),
    ("not an event", [b"[]\n"]),
    ("a field is missing", [b'{"seq": 2}\n']),
    ("deep", [b"[" * 90_000 + b"\n"]),
    ("no text", [b'{"seq": 2, "type": "\xff"}\n']),
    ("a long line", [lines(watch_event(2, name="n" * (128 << 10)))]),
    ("a line without an end", [b" " * (64 << 10)] * 100),
]


@pytest.mark.parametrize(("what", "chunks"), HOSTILE, ids=[h[0] for h in HOSTILE])
def test_hostile_events(double: Double, client: Coppice, what: str, chunks: list[bytes]) -> None:
    double.script = [Answer(200, workspace()), Answer(200, chunks=[lines(watch_event(1)), *chunks])]
    got = []
    with pytest.raises(errors.ProtocolError):
        for event in client.workspace(WS).watches.events(WATCH):
            got.append(event.seq)
    assert got == [1]


def test_a_watch_that_is_gone(double: Double, client: Coppice) -> None:
    double.script = [Answer(200, workspace()), problem(404, "WATCH_NOT_FOUND")]
    with pytest.raises(errors.WatchNotFound):
        list(client.workspace(WS).watches.events(WATCH))

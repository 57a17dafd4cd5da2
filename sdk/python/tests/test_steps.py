"""Steps: the table of sdk/conformance, their requests, and a live step whose connection breaks."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from conftest import Live
from coppice import AsyncCoppice, Config, Coppice, action, errors, models
from double import Answer, Double, problem
from samples import CKPT, WS, checkpoint, workspace

CASES: list[dict[str, Any]] = json.loads((Path(__file__).resolve().parents[2] / "conformance/steps.json").read_text())


def answer(a: dict[str, Any]) -> Answer:
    if "problem" in a:
        return problem(a["status"], a["problem"])
    body = ("".join(line + "\n" for line in a["lines"]) + a.get("part", "")).encode()
    # An answer that is cut has one byte less than it says.
    return Answer(200, body + b"\n", cut=len(body)) if a.get("cut") else Answer(200, body)


def shown(event: models.StepEvent) -> str:
    a = event.action
    if a is None:
        return event.operation_id
    return f"{event.operation_id} {a.index} {a.kept}" + (f" {a.problem.code}" if a.problem else "")


@pytest.mark.parametrize("which", ["sync", "async"])
@pytest.mark.parametrize("case", CASES, ids=[c["name"] for c in CASES])
def test_conformance(case: dict[str, Any], which: str, double: Double) -> None:
    double.script = [Answer(200, checkpoint()), *(answer(a) for a in case["answers"])]
    seen: list[str] = []
    code = ""
    config = Config(server=double.url, max_pause=0.01, away=0 if case.get("apart") else 60)

    async def read() -> None:
        async with AsyncCoppice(config=config) as c:
            node = await c.checkpoint(CKPT)
            async for event in node.stream_step(["true", "false"], idempotency_key=case.get("key", "")):
                seen.append(shown(event))

    try:
        if which == "async":
            asyncio.run(read())
        else:
            with Coppice(config=config) as client:
                for event in client.checkpoint(CKPT).stream_step(["true", "false"], idempotency_key=case.get("key", "")):
                    seen.append(shown(event))
    except errors.APIError as err:
        code = err.code
    assert (seen, code) == (case["events"], case.get("error", ""))
    sent = double.requests[1:]
    assert len(sent) == case["requests"]
    keys = {r.headers["idempotency-key"] for r in sent}
    assert len(keys) == 1 and "" not in keys and (not case.get("key") or keys == {case["key"]})
    assert {(r.method, r.path, r.headers["accept"]) for r in sent} == {
        ("POST", f"/v1/checkpoints/{CKPT}/step", "application/x-ndjson")
    }


@pytest.mark.parametrize("which", ["sync", "async"])
def test_a_connection_that_falls_silent(which: str, double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"coppice._{which}.steps.MAX_SILENCE", 0.2)
    first, last = b'{"operation_id":"op_1"}\n', b'{"operation_id":"op_1","state":"succeeded"}\n'
    silent = Answer(200, first + b"\n", cut=len(first), silent=True)
    double.script = [Answer(200, checkpoint()), silent, silent, Answer(200, first + last)]
    config = Config(server=double.url, max_pause=0.01, away=0)
    seen: list[str] = []

    async def read() -> None:
        async with AsyncCoppice(config=config) as c:
            node = await c.checkpoint(CKPT)
            async for event in node.stream_step(["true"]):
                seen.append(shown(event))

    if which == "async":
        asyncio.run(read())
    else:
        with Coppice(config=config) as c:
            seen += [shown(event) for event in c.checkpoint(CKPT).stream_step(["true"])]
    assert seen == ["op_1"] and len(double.requests) == 4


def test_the_request(double: Double, client: Coppice) -> None:
    result = {"operation_id": "op_1", "checkpoint_id": CKPT, "actions": [], "timings": []}
    double.script = [Answer(200, checkpoint()), Answer(200, result)]
    node = client.checkpoint(CKPT)
    tries: list[models.StepAction | str] = [
        action(["make"], files={"/a": "text", "/b": b"\xff"}, timeout=1.5, keep="workspace", only_if=models.StepCondition(exit_code=0)),
        "echo one",
    ]
    assert node.step(tries, parallel=2, env={"A": "1"}, allow=["a.example.com"], ttl=60, idempotency_key="mine").operation_id == "op_1"
    assert double.requests[1].headers["idempotency-key"] == "mine"
    assert double.requests[1].json() == {
        "actions": [
            {
                "command": ["make"], "timeout_ms": 1500, "keep": "workspace", "only_if": {"exit_code": 0},
                "files": [{"path": "/a", "content": "text"}, {"path": "/b", "content_base64": "/w=="}],
            },
            {"command": ["sh", "-c", "echo one"]},
        ],
        "parallel": 2, "env": {"A": "1"}, "network": {"allow": ["a.example.com"]}, "ttl_seconds": 60,
    }
    with pytest.raises(TypeError):
        node.step("echo one")


def test_a_result_that_is_too_long(double: Double, client: Coppice) -> None:
    double.script = [Answer(200, checkpoint()), Answer(200, b"x" * (3 << 20))]
    with pytest.raises(errors.ProtocolError):
        list(client.checkpoint(CKPT).stream_step(["true"]))
    assert len(double.requests) == 2


class Breaking:
    """Passes requests on to a server, and breaks the first streamed answer after its first action."""

    def __init__(self, url: str) -> None:
        self.keys: list[str] = []
        breaking, target = self, urlsplit(url)

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                connection = http.client.HTTPConnection(target.netloc)
                connection.request(self.command, self.path, body, dict(self.headers))
                got = connection.getresponse()
                streams = self.headers.get("accept") == "application/x-ndjson"
                if streams:
                    breaking.keys.append(self.headers["idempotency-key"])
                self.send_response(got.status)
                self.send_header("content-type", got.headers["content-type"])
                self.end_headers()  # HTTP/1.0: the body ends with the connection
                for line in got:
                    self.wfile.write(line)
                    if streams and len(breaking.keys) == 1 and b'"action"' in line:
                        break
                connection.close()

            do_POST = do_DELETE = do_GET

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def breaking(live: Live) -> Iterator[Breaking]:
    b = Breaking(live.url)
    yield b
    b.close()


@pytest.mark.live
def test_a_live_step_whose_connection_breaks(live: Live, breaking: Breaking) -> None:
    with Coppice(breaking.url, live.token) as c, c.create(live.image) as ws:
        node = ws.checkpoint()
        tries = [action(f"echo {i}", only_if=models.StepCondition(min_score=1)) for i in range(4)]
        events = list(node.stream_step(tries, parallel=1))
        assert len(breaking.keys) == 2 and len(set(breaking.keys)) == 1
        assert events[0].action is None
        ended = [e.action for e in events[1:] if e.action]
        assert [a.stdout for a in sorted(ended, key=lambda a: a.index)] == [f"{i}\n" for i in range(4)]
        assert sorted((a.index, a.score, a.kept) for a in ended) == [
            (0, 0, "nothing"), (1, 1, "checkpoint"), (2, 2, "checkpoint"), (3, 3, "checkpoint"),
        ]
        assert {n.id for n in node.children()} == {a.checkpoint_id for a in ended if a.checkpoint_id}


@pytest.mark.live
def test_a_live_step_of_the_asynchronous_client(live: Live) -> None:
    async def main() -> None:
        async with AsyncCoppice(live.url, live.token) as c:
            ws = await c.create(live.image)
            node = await ws.checkpoint()
            result = await node.step([action("cat", stdin="in", files={"/f": "x"}), "exit 3"])
            assert [(a.exit_code, a.stdout, a.kept) for a in result.actions] == [(0, "in", "checkpoint"), (3, None, "checkpoint")]
            child = await c.checkpoint(result.actions[0].checkpoint_id or "")
            assert await child.files.read_text("/f") == "x"
            with pytest.raises(errors.InvalidError):
                await node.step([action()])
            await ws.terminate()

    asyncio.run(main())


def test_a_step_of_a_workspace(double: Double, client: Coppice) -> None:
    ended = {
        "operation_id": "op_1", "index": 0, "kept": "checkpoint", "checkpoint_id": CKPT, "exit_code": 0, "stdout": "1\n", "timings": []
    }
    double.script = [Answer(200, workspace()), Answer(200, ended)]
    ws = client.workspace(WS)
    result = ws.step("make", when="on_success", files={"/a": "text"}, timeout=2, idempotency_key="mine")
    assert (result.kept, result.exit_code, ws.checkpoint_id) == ("checkpoint", 0, CKPT)
    assert (double.requests[1].path, double.requests[1].headers["idempotency-key"]) == (f"/v1/workspaces/{WS}/step", "mine")
    assert double.requests[1].json() == {
        "command": ["sh", "-c", "make"], "files": [{"path": "/a", "content": "text"}], "timeout_ms": 2000, "when": "on_success"
    }

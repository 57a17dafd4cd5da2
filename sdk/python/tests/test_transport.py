"""What the client does when calls fail."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from coppice import AsyncCoppice, Config, Coppice, errors, models
from double import Answer, Double, Request, problem
from samples import CKPT, OP, SESS, WS, checkpoint, exec_result, file_info, operation, session, workspace


def keys(double: Double) -> list[str | None]:
    return [r.headers.get("idempotency-key") for r in double.requests]


def test_token_and_agent_are_sent(double: Double, client: Coppice) -> None:
    double.script = [Answer(200, workspace())]
    assert client.workspace(WS).name == "one"
    assert double.requests[0].headers["authorization"] == "Bearer key_secret"
    assert double.requests[0].headers["user-agent"].startswith("coppice-python/")
    assert "key_secret" not in repr(client.config)


def test_a_creation_is_repeated_with_its_key_after_a_lost_connection(double: Double, client: Coppice) -> None:
    double.script = [Answer(cut=0), Answer(201, workspace(), cut=10), Answer(201, workspace())]
    client.create("base")
    assert len(double.requests) == 3
    assert len(set(keys(double))) == 1 and keys(double)[0]


def test_each_creation_has_a_key_of_its_own(double: Double, client: Coppice) -> None:
    double.script = [Answer(201, workspace())]
    client.create("base")
    client.create("base")
    client.create("base", idempotency_key="mine")
    assert len(set(keys(double))) == 3 and keys(double)[2] == "mine"


def test_a_change_without_key_is_not_repeated_after_a_lost_connection(double: Double, client: Coppice) -> None:
    double.script = [Answer(200, workspace()), Answer(cut=0), Answer(200, workspace())]
    ws = client.workspace(WS)
    with pytest.raises(errors.ConnectionFailedError):
        ws.update(ttl=5)
    assert len(double.requests) == 2


def test_retries_end(double: Double, client: Coppice) -> None:
    double.script = [problem(503, "DATABASE_UNAVAILABLE")]
    with pytest.raises(errors.DatabaseUnavailable) as caught:
        client.workspace(WS)
    assert len(double.requests) == 1 + client.config.retries
    assert caught.value.hint and caught.value.request_id == "req" and "hint: " in str(caught.value)


def test_nobody_listens(double: Double) -> None:
    double.close()
    with Coppice(config=Config(server=double.url, max_pause=0.01)) as c, pytest.raises(errors.ConnectionFailedError):
        c.create()


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (503, "GUEST_UNREACHABLE"), (503, "GUEST_PROTOCOL"), (503, "SANDBOX_LOST"), (404, "COMMAND_NOT_FOUND"),
        (409, "COMMAND_NOT_STARTED"), (429, "SESSION_LIMIT"), (429, "QUOTA_EXCEEDED"), (503, "SOMETHING_NEW"), (500, "INTERNAL"),
        (503, "FORK_FAILED"), (503, "NO_RUNNER"), (507, "DISK_FULL"),
    ],
)
def test_an_answer_about_the_work_is_final(double: Double, client: Coppice, status: int, code: str) -> None:
    double.script = [Answer(200, workspace()), problem(status, code, retry_after=0)]
    ws = client.workspace(WS)
    with pytest.raises(errors.APIError) as caught:
        ws.run("true")
    assert caught.value.code == code and len(double.requests) == 2


def test_what_a_program_prints_is_never_an_error_of_the_server(double: Double, client: Coppice) -> None:
    text = '{"code": "DATABASE_UNAVAILABLE", "status": 503}'
    double.script = [Answer(200, workspace()), Answer(200, exec_result(exit_code=75, stdout=text))]
    result = client.workspace(WS).run("true")
    assert (result.exit_code, result.stdout, len(double.requests)) == (75, text, 2)


def test_retry_after_is_obeyed(double: Double, client: Coppice) -> None:
    double.script = [problem(429, "RATE_LIMITED", retry_after=1), Answer(200, workspace())]
    began = time.monotonic()
    client.workspace(WS)
    assert time.monotonic() - began >= 1


def test_a_retry_after_over_the_bound_is_the_callers(double: Double, client: Coppice) -> None:
    double.script = [problem(429, "RATE_LIMITED", retry_after=86400)]
    with pytest.raises(errors.RateLimited) as caught:
        client.workspace(WS)
    assert caught.value.retry_after == 86400 and len(double.requests) == 1


@pytest.mark.parametrize("value", ["-1", "soon", "1e9", "١", "9" * 400])
def test_a_retry_after_that_is_none(double: Double, client: Coppice, value: str) -> None:
    first = problem(429, "RATE_LIMITED")
    first.headers["retry-after"] = value.encode().decode("latin-1")
    double.script = [first, Answer(200, workspace())]
    assert client.workspace(WS).id == WS


def test_a_proxy_that_answers(double: Double, client: Coppice) -> None:
    double.script = [Answer(502, b"<html>bad gateway</html>"), Answer(201, workspace())]
    client.create()
    double.script = [Answer(200, b"<html>log in</html>")]
    with pytest.raises(errors.ProtocolError):
        client.workspace(WS)
    double.script = [Answer(302, headers={"location": "http://127.0.0.1:1/"})]
    with pytest.raises(errors.APIError) as caught:
        client.workspace(WS)
    assert caught.value.code == "HTTP_302"


def test_an_operation_that_goes_on_is_waited_for(double: Double, client: Coppice) -> None:
    double.script = [
        Answer(202, operation("running")),
        Answer(200, operation("running")),
        Answer(cut=0),
        Answer(200, operation("succeeded", result=workspace(name="two"))),
    ]
    assert client.create().name == "two"
    assert all("wait" in r.query for r in double.requests)


def test_a_wait_bears_a_server_that_is_away(double: Double, client: Coppice) -> None:
    done = Answer(200, operation("succeeded", result=workspace(name="two")))
    double.script = [Answer(202, operation("running")), *[Answer(cut=0)] * 12, Answer(503, b"starting"), done]
    assert client.create().name == "two"
    double.script = [Answer(200, session(state="running", exit_code=None)), *[Answer(cut=0)] * 12, Answer(200, session())]
    assert client.session(SESS).wait() == 0


def test_a_wait_does_not_bear_it_for_ever(double: Double, client: Coppice) -> None:
    double.script = [Answer(202, operation("running")), Answer(cut=0)]
    with pytest.raises(errors.ConnectionFailedError):
        client.with_options(away=0.05).create()


def test_the_first_try_goes_on(double: Double, client: Coppice) -> None:
    double.script = [
        Answer(cut=0),
        problem(409, "IDEMPOTENCY_IN_PROGRESS", operation_id=OP),
        Answer(200, operation("succeeded", result=workspace(name="two"))),
    ]
    assert client.create().name == "two"
    assert double.requests[2].path == "/v1/operations/" + OP


def test_the_first_try_of_a_program_goes_on(double: Double, client: Coppice) -> None:
    busy = problem(409, "IDEMPOTENCY_IN_PROGRESS")
    double.script = [Answer(200, workspace()), Answer(cut=0), *[busy] * 12, Answer(200, exec_result(stdout="done"))]
    assert client.workspace(WS).run("true").stdout == "done"
    assert len(set(keys(double)[1:])) == 1


def test_a_program_goes_on_while_the_server_is_away(double: Double, client: Coppice) -> None:
    double.script = [Answer(200, workspace()), *[Answer(cut=0)] * 12, Answer(200, exec_result(stdout="done"))]
    ws = client.workspace(WS)
    assert ws.run("true").stdout == "done"
    assert len(set(keys(double)[1:])) == 1
    double.script = [Answer(200, workspace()), Answer(cut=0)]
    with pytest.raises(errors.ConnectionFailedError):
        client.with_options(away=0.05).workspace(WS).run("true")


@pytest.mark.parametrize("first", [Answer(cut=0), problem(503, "CONTROLLER_STOPPING"), problem(409, "IDEMPOTENCY_IN_PROGRESS")])
def test_a_key_that_the_server_may_have_forgotten(
    double: Double, client: Coppice, monkeypatch: pytest.MonkeyPatch, first: Answer
) -> None:
    """The work would be done again. The machine may have slept meanwhile: the wall clock counts."""

    def slept(_: Request) -> Answer:
        monkeypatch.setattr("coppice._policy.time.time", lambda: 24 * 3600.0)
        return first

    monkeypatch.setattr("coppice._policy.time.time", lambda: 0.0)
    double.script = [slept, Answer(201, workspace())]
    with pytest.raises(errors.CoppiceError):
        client.create("base")
    assert len(double.requests) == 1


@pytest.mark.parametrize("first", [Answer(cut=0), Answer(201, workspace(), cut=10)])
def test_a_machine_that_sleeps_within_a_pause(
    double: Double, client: Coppice, monkeypatch: pytest.MonkeyPatch, first: Answer
) -> None:
    now = [0.0]
    monkeypatch.setattr("coppice._policy.time.time", lambda: now[0])
    monkeypatch.setattr("coppice._sync.runtime.sleep", lambda _: now.insert(0, 24 * 3600.0))
    double.script = [first, Answer(201, workspace())]
    with pytest.raises(errors.ConnectionFailedError):
        client.create("base")
    assert len(double.requests) == 1


def test_a_first_try_that_goes_on_for_ever(double: Double, client: Coppice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coppice._policy.SLACK", -client.config.read_timeout)
    double.script = [Answer(200, workspace()), problem(409, "IDEMPOTENCY_IN_PROGRESS")]
    with pytest.raises(errors.IdempotencyInProgress):
        client.workspace(WS).run("true", timeout=0.05)
    assert len(double.requests) > 2


def test_an_event_in_which_the_connection_breaks_is_asked_for_again(
    double: Double, client: Coppice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coppice._sync.events.PAUSE", 0.01)
    double.script = [Answer(200, b"id: 7\ndata: {", {"content-type": "text/event-stream"}, cut=12), problem(403, "FORBIDDEN")]
    with pytest.raises(errors.APIError):
        list(client.events(after="6"))
    assert [r.headers.get("last-event-id") for r in double.requests] == ["6", "6"]


def test_an_operation_that_fails(double: Double, client: Coppice) -> None:
    lost = {"code": "SANDBOX_LOST", "message": "it ended", "recover_from": CKPT}
    double.script = [Answer(202, operation("failed", problem=lost))]
    with pytest.raises(errors.SandboxLost) as caught:
        client.create()
    assert caught.value.operation_id == OP and caught.value.recover_from == CKPT and caught.value.status == 0


def test_a_wait_ends(double: Double, client: Coppice) -> None:
    double.script = [Answer(202, operation("running"))]
    with pytest.raises(errors.WaitTimeout) as caught:
        client.with_options(operation_timeout=0.05).create()
    assert caught.value.operation_id == OP and f"client.wait_operation('{OP}')" in str(caught.value)


def test_an_answer_is_bounded(double: Double, client: Coppice, monkeypatch: pytest.MonkeyPatch) -> None:
    double.script = [Answer(200, workspace()), Answer(200, b"x" * 2000)]
    ws = client.workspace(WS)
    with pytest.raises(errors.ProtocolError):
        ws.files.read("/f", limit=1000)
    monkeypatch.setattr("coppice._policy.MAX_PROBLEM", 1000)
    double.script = [Answer(500, b"x" * 2000)]
    with pytest.raises(errors.ServerError) as caught:
        client.workspace(WS)
    assert caught.value.code == "HTTP_500"


def test_nothing_is_decompressed(double: Double, client: Coppice) -> None:
    import gzip

    double.script = [Answer(200, workspace()), Answer(200, gzip.compress(b"0" * 100_000), {"content-encoding": "gzip"})]
    got = client.workspace(WS).files.read("/f")
    assert len(got) < 1000 and double.requests[0].headers["accept-encoding"] == "identity"


@pytest.mark.parametrize("body", [b"", b"null", b"[]", b"{}", b"\xff", b'{"id": 5}', b"[" * 100_000, b'{"a":' * 100_000])
def test_a_wrong_answer(double: Double, client: Coppice, body: bytes) -> None:
    double.script = [Answer(200, body)]
    with pytest.raises(errors.CoppiceError):
        client.workspace(WS)


@pytest.mark.parametrize("body", [b"", b"null", b"{}", b"\xff", b'{"code": 5}', b"[" * 100_000])
def test_a_wrong_problem(double: Double, client: Coppice, body: bytes) -> None:
    double.script = [Answer(404, body)]
    with pytest.raises(errors.NotFoundError) as caught:
        client.workspace(WS)
    assert caught.value.code == "HTTP_404"


def test_fields_and_codes_of_a_newer_server(double: Double, client: Coppice) -> None:
    double.script = [Answer(200, workspace(state="dreaming", moon=True))]
    assert client.workspace(WS).state == "dreaming"
    double.script = [problem(409, "MOON_IS_FULL")]
    with pytest.raises(errors.ConflictError) as caught:
        client.workspace(WS)
    assert caught.value.code == "MOON_IS_FULL"


def test_wrong_fields_are_named(double: Double, client: Coppice) -> None:
    double.script = [problem(400, "INVALID_FIELD", fields=[{"field": "resources.vcpus", "detail": "at most 64"}])]
    with pytest.raises(errors.InvalidField, match=r"resources\.vcpus: at most 64"):
        client.create(vcpus=65)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "ws_../../x", "ws_a?b=c", "ws_%2e%2e"])
def test_an_id_stays_a_segment_of_its_path(double: Double, client: Coppice, name: str) -> None:
    double.script = [problem(404, "SESSION_NOT_FOUND")]
    with pytest.raises((errors.APIError, ValueError)):
        client.session(name)
    for r in double.requests:
        assert r.path.startswith("/v1/sessions/") and r.path.count("/") == 3 and r.query == {}


def test_pages(double: Double, client: Coppice) -> None:
    def page(r: Request) -> Answer:
        cursor = r.query.get("cursor")
        body: dict[str, Any] = {"items": [workspace(name=f"p{cursor}")]}
        if cursor != ["b"]:
            body["next_cursor"] = "b" if cursor else "a"
        return Answer(200, body)

    double.script = [page]
    assert [w.name for w in client.workspaces()] == ["pNone", "p['a']", "p['b']"]
    assert [w.name for w in client.workspaces(limit=1)] == ["pNone"]


def test_pages_that_do_not_end(double: Double, client: Coppice) -> None:
    double.script = [Answer(200, {"items": [], "next_cursor": "same"})]
    assert list(client.workspaces()) == []


def test_a_fork_with_a_failed_child(double: Double, client: Coppice) -> None:
    result = {
        "operation_id": OP, "checkpoint_id": CKPT, "timings": [],
        "children": [
            {"timings": [], "problem": {"code": "RESEAL_FAILED", "message": "no"}},
            {"timings": [], "workspace": workspace()},
        ],
    }
    double.script = [Answer(200, checkpoint()), Answer(201, result)]
    forks = client.checkpoint(CKPT).fork(2, all_or_nothing=False)
    assert len(forks) == 1 and isinstance(forks.failures[0], errors.ResealFailed)


def test_annotations_are_compared_and_set(double: Double, client: Coppice) -> None:
    double.script = [
        Answer(200, checkpoint(annotations={"visits": 1}, version=3)),
        problem(409, "VERSION_CONFLICT", current_version=4),
        Answer(200, checkpoint(annotations={"visits": 2}, version=4)),
        Answer(200, checkpoint(annotations={"visits": 3}, version=5)),
    ]
    node = client.checkpoint(CKPT)
    node.annotate(lambda now: {"visits": now["visits"] + 1})
    sent = [r.json() for r in double.requests if r.method == "PATCH"]
    assert sent == [{"version": 3, "annotations": {"visits": 2}}, {"version": 4, "annotations": {"visits": 3}}]


def test_output_that_is_no_text(double: Double, client: Coppice) -> None:
    double.script = [
        Answer(200, workspace()),
        Answer(200, exec_result(stdout="/wA=", stderr="", encoding="base64")),
        Answer(200, exec_result(stdout="!", encoding="base64")),
    ]
    ws = client.workspace(WS)
    assert ws.run("true").stdout_bytes == b"\xff\x00"
    with pytest.raises(errors.ProtocolError):
        ws.run("true")


def test_check(double: Double, client: Coppice) -> None:
    double.script = [Answer(200, workspace()), Answer(200, exec_result(exit_code=3, stderr="no"))]
    with pytest.raises(errors.CommandFailed, match="exit code 3\nno") as caught:
        client.workspace(WS).run(["make", "a b"], check=True)
    assert caught.value.exit_code == 3
    assert double.requests[1].json()["command"] == ["make", "a b"]


def test_an_upload_is_sent_once(double: Double, client: Coppice) -> None:
    double.script = [Answer(200, workspace()), Answer(cut=0), Answer(200, file_info())]
    ws = client.workspace(WS)
    with pytest.raises(errors.ConnectionFailedError):
        ws.files.write("/f", b"x")
    assert len(double.requests) == 2


def test_a_download_that_breaks_off(double: Double, client: Coppice) -> None:
    double.script = [Answer(200, workspace()), Answer(200, b"x" * 1000, cut=500)]
    ws = client.workspace(WS)
    with pytest.raises(errors.ConnectionFailedError):
        ws.files.read("/f")


def test_secrets_are_not_shown() -> None:
    assert "hidden" not in repr(models.PutGrantRequest(secret="hidden"))


def test_a_cancelled_call_ends(double: Double) -> None:
    async def main() -> None:
        async with AsyncCoppice(config=Config(server=double.url, max_pause=60)) as c:
            call = asyncio.create_task(c.workspace(WS))
            while not double.requests:
                await asyncio.sleep(0.01)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call

    double.script = [problem(503, "DATABASE_UNAVAILABLE", retry_after=29)]
    asyncio.run(main())


def test_many_calls_at_once(double: Double) -> None:
    double.script = [Answer(200, workspace())]

    async def main() -> None:
        async with AsyncCoppice(config=Config(server=double.url)) as c:
            assert len(await asyncio.gather(*(c.workspace(WS) for _ in range(64)))) == 64

    asyncio.run(main())


@pytest.mark.parametrize("key", ["a\nb: c", "ü", "k" * 256])
def test_a_key_that_is_no_header(double: Double, client: Coppice, key: str) -> None:
    with pytest.raises(ValueError, match="idempotency key"):
        client.create(idempotency_key=key)
    assert not double.requests

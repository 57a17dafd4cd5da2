"""The scenarios of sdk/conformance, which every SDK passes."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec
import pytest
import yaml
from conftest import Live
from coppice import Checkpoint, Coppice, Workspace, action, errors
from double import Answer, Double, problem

TABLE: dict[str, Any] = yaml.safe_load(
    (Path(__file__).resolve().parents[2] / "conformance/scenarios.yaml").read_text(encoding="utf-8")
)
OBJECTS: dict[str, Any] = TABLE["objects"]


def by_name(kind: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("scenario", TABLE[kind], ids=[s["name"] for s in TABLE[kind]])


def answers(scripted: list[dict[str, Any]]) -> list[Answer]:
    out = []
    for a in scripted:
        status, extra = a.get("status", 200), a.get("with", {})
        if "problem" in a:
            answer = problem(status, a["problem"], **extra)
        elif "object" in a:
            answer = Answer(status, {**OBJECTS[a["object"]], **extra})
        elif "items" in a:
            answer = Answer(status, {"items": [OBJECTS[n] for n in a["items"]], "next_cursor": a.get("next_cursor", "")})
        else:
            answer = Answer(status, a.get("text", "").encode())
        if "retry_after" in a:
            answer.headers["retry-after"] = str(a["retry_after"])
        if "location" in a:
            answer.headers["location"] = a["location"]
        answer.cut = {"before": 0, "within": 20}.get(a.get("cut", ""))
        out += [answer] * a.get("times", 1)
    return out


class Driver:
    """Makes the calls of the table."""

    def __init__(self, client: Coppice, live: Live | None = None) -> None:
        self.client = client
        self.live = live
        self.named: dict[str, Any] = {}

    def value(self, v: Any) -> Any:
        """`$x.field` is a field of a named object."""
        if isinstance(v, str) and v.startswith("$"):
            name, _, attribute = v[1:].partition(".")
            return fields(self.named[name])[attribute]
        if isinstance(v, dict):
            return {k: self.value(x) for k, x in v.items()}
        return v

    def call(self, step: dict[str, Any]) -> Any:
        a = {k: self.value(v) for k, v in step.items() if k not in ("do", "of", "as", "expect")}
        on: Any = self.named.get(step.get("of", ""))
        result = getattr(self, "do_" + step["do"])(on, a)
        if "as" in step:
            self.named[step["as"]] = result
        return result

    def do_create(self, _: None, a: dict[str, Any]) -> Workspace:
        client = self.client.with_options(operation_timeout=a["wait"]) if "wait" in a else self.client
        return client.create(a.get("image"), name=a.get("name"), labels=a.get("labels", {}), idempotency_key=a.get("key", ""))

    def do_workspace(self, _: None, a: dict[str, Any]) -> Workspace:
        return self.client.workspace(a["id"])

    def do_checkpoint(self, _: None, a: dict[str, Any]) -> Checkpoint:
        return self.client.checkpoint(a["id"])

    def do_run(self, on: Workspace, a: dict[str, Any]) -> Any:
        return on.run(
            a["command"], stdin=a.get("stdin"), env=a.get("env"), timeout=a.get("timeout"), idempotency_key=a.get("key", "")
        )

    def do_stream(self, on: Workspace, a: dict[str, Any]) -> Any:
        said: dict[str, str] = {"stdout": "", "stderr": ""}
        session = on.start(a["command"])
        for piece in session.stream():
            said[piece.stream] += piece.text
        return {**said, "exit_code": session.exit_code}

    def do_make_checkpoint(self, on: Workspace, a: dict[str, Any]) -> Checkpoint:
        return on.checkpoint(a.get("name"), annotations=a.get("annotations"), labels=a.get("labels"), pinned=a.get("pinned"))

    def do_fork(self, on: Workspace | Checkpoint, a: dict[str, Any]) -> Any:
        return on.fork(a["count"], name=a.get("name"))

    def do_restore(self, on: Workspace, a: dict[str, Any]) -> Workspace:
        return on.restore(a["to"])

    def do_step(self, on: Checkpoint, a: dict[str, Any]) -> Checkpoint:
        (ended,) = on.step([a["command"]]).actions
        return self.client.checkpoint(ended.checkpoint_id or "none was kept")

    def do_stream_step(self, on: Checkpoint, a: dict[str, Any]) -> Any:
        events = list(on.stream_step([action(**x) for x in a["actions"]], idempotency_key=a.get("key", "")))
        assert events[0].action is None and {e.operation_id for e in events} == {events[0].operation_id}
        return sorted((e.action for e in events if e.action), key=lambda x: x.index)

    def do_suspend(self, on: Workspace, _: dict[str, Any]) -> Workspace:
        return on.suspend()

    def do_resume(self, on: Workspace, _: dict[str, Any]) -> Workspace:
        return on.resume()

    def do_terminate(self, on: Workspace, _: dict[str, Any]) -> Workspace:
        return on.terminate()

    def do_delete(self, on: Checkpoint, _: dict[str, Any]) -> Any:
        return on.delete()

    def do_refresh(self, on: Workspace, _: dict[str, Any]) -> Workspace:
        return on.refresh()

    def do_label(self, on: Workspace, a: dict[str, Any]) -> Workspace:
        return on.update(labels=a["set"], version=a.get("version"))

    def do_annotate(self, on: Checkpoint, a: dict[str, Any]) -> Checkpoint:
        return on.update(annotations=a["set"], version=a.get("version"))

    def do_list_workspaces(self, _: None, a: dict[str, Any]) -> Any:
        return list(self.client.workspaces(labels=a.get("labels", [])))

    def do_tree(self, on: Checkpoint, _: dict[str, Any]) -> Any:
        return list(on.tree())

    def do_children(self, on: Checkpoint, _: dict[str, Any]) -> Any:
        return list(on.children())

    def do_lineage(self, on: Checkpoint, _: dict[str, Any]) -> Any:
        return list(on.lineage())

    def do_diff(self, on: Checkpoint, a: dict[str, Any]) -> Any:
        return on.diff(a["to"]).files

    def do_write_file(self, on: Workspace, a: dict[str, Any]) -> Any:
        return on.files.write(a["path"], a["text"])

    def do_read_file(self, on: Workspace, a: dict[str, Any]) -> str:
        return on.files.read_text(a["path"])

    def do_stat_file(self, on: Workspace, a: dict[str, Any]) -> Any:
        return on.files.stat(a["path"])

    def do_list_files(self, on: Workspace, a: dict[str, Any]) -> Any:
        return on.files.list(a["path"])

    def do_remove_file(self, on: Workspace, a: dict[str, Any]) -> None:
        on.files.remove(a["path"])

    def do_allow(self, on: Workspace, a: dict[str, Any]) -> Any:
        return on.network.allow(a["entries"])

    def do_grant(self, on: Workspace, a: dict[str, Any]) -> Any:
        return on.network.grant(a["name"], secret=a["secret"], hosts=[a["host"]], header="authorization")

    def do_revoke(self, on: Workspace, a: dict[str, Any]) -> None:
        on.network.revoke(a["name"])

    def do_grants(self, on: Workspace, _: dict[str, Any]) -> Any:
        return on.network.grants()

    def do_open_port(self, on: Workspace, a: dict[str, Any]) -> Any:
        return on.network.open_port(a["port"])

    def do_close_port(self, on: Workspace, a: dict[str, Any]) -> None:
        on.network.close_port(a["port"])

    def do_ports(self, on: Workspace, _: dict[str, Any]) -> Any:
        return on.network.ports()

    def do_put_upload(self, _: None, a: dict[str, Any]) -> Any:
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as tar:
            for name, text in a["files"].items():
                info = tarfile.TarInfo(name)
                info.size = len(text.encode())
                tar.addfile(info, io.BytesIO(text.encode()))
        return self.client.put_upload(a["id"], out.getvalue())

    def do_upload(self, _: None, a: dict[str, Any]) -> Any:
        return self.client.upload(a["id"])

    def do_delete_upload(self, _: None, a: dict[str, Any]) -> None:
        self.client.delete_upload(a["id"])

    def do_build_image(self, _: None, a: dict[str, Any]) -> Any:
        text, key = a["dockerfile"], a.get("key", "")
        if "context" in a:
            return self.client.build_image(a["name"], dockerfile=text, context=a["context"], idempotency_key=key)
        return self.client.build_image(a["name"], dockerfile=text, idempotency_key=key)

    def do_built_images(self, _: None, __: dict[str, Any]) -> Any:
        return self.client.built_images()

    def do_built_image(self, _: None, a: dict[str, Any]) -> Any:
        return self.client.built_image(a["name"])

    def do_delete_image(self, _: None, a: dict[str, Any]) -> None:
        self.client.delete_image(a["name"])

    def do_whoami(self, _: None, __: dict[str, Any]) -> Any:
        return self.client.whoami()

    def do_ready(self, _: None, __: dict[str, Any]) -> Any:
        return self.client.ready()

    def do_restart_server(self, _: None, __: dict[str, Any]) -> None:
        assert self.live is not None
        self.live.restart()


def fields(result: Any) -> dict[str, Any]:
    if isinstance(result, dict):
        return result
    if isinstance(result, (Workspace, Checkpoint)):
        result = result.info
    if isinstance(result, msgspec.Struct):
        return msgspec.structs.asdict(result)
    names = ("exit_code", "stdout", "stderr", "timed_out", "ok", "session_id")
    return {n: getattr(result, n) for n in names}


def kind_of(err: Exception) -> str:
    if isinstance(err, errors.APIError):
        return err.code
    kinds: dict[type[Exception], str] = {
        errors.ConnectionFailedError: "connection", errors.ProtocolError: "protocol", errors.WaitTimeout: "timeout",
        ValueError: "argument",
    }
    return kinds[type(err)]


KNOWN = {
    "result", "contains", "names", "paths", "length", "text", "error", "fields", "retry_after", "operation_id",
    "current_version", "recover_from", "requests", "same_key", "sent", "paths_sent",
}


def expect(driver: Driver, step: dict[str, Any]) -> None:
    """Makes a call and compares what comes of it."""
    wanted = driver.value(step.get("expect", {}))
    assert set(wanted) <= KNOWN
    try:
        got = driver.call(step)
    except (errors.CoppiceError, ValueError) as err:
        assert kind_of(err) == wanted.get("error"), f"{step}: {err}"
        for name in ("retry_after", "operation_id", "current_version", "recover_from"):
            if name in wanted:
                assert getattr(err, name) == wanted[name]
        if "fields" in wanted:
            assert isinstance(err, errors.APIError) and [f.field for f in err.fields] == wanted["fields"]
        return
    assert "error" not in wanted, f"{step}: it succeeded"
    for name, value in wanted.get("result", {}).items():
        assert fields(got)[name] == value, f"{step}: {name}"
    for name, text in wanted.get("contains", {}).items():
        assert text in fields(got)[name]
    if "names" in wanted:
        assert [x.name for x in got] == wanted["names"]
    if "paths" in wanted:
        assert [x.path for x in got] == wanted["paths"]
    if "length" in wanted:
        assert len(got) == wanted["length"], step
    if "text" in wanted:
        assert got == wanted["text"]


@by_name("scripted")
def test_scripted(scenario: dict[str, Any], double: Double, client: Coppice) -> None:
    driver = Driver(client)
    on = scenario["call"].get("of")
    if on is not None:
        double.script = [Answer(200, OBJECTS[on])]
        driver.named[on] = driver.call({"do": on, "id": OBJECTS[on]["id"]})
        double.requests.clear()
    double.script = list(answers(scenario["answers"]))
    wanted = scenario["expect"]
    expect(driver, {**scenario["call"], "expect": wanted})
    sent = double.requests
    if "requests" in wanted:
        assert len(sent) == wanted["requests"]
    if "same_key" in wanted:
        keys = {r.headers.get("idempotency-key") for r in sent}
        assert len(keys) == 1 and None not in keys
    if "sent" in wanted:
        assert {k: v for k, v in sent[-1].json().items() if k in wanted["sent"]} == wanted["sent"]
    if "paths_sent" in wanted:
        assert [unquote(r.path) for r in sent] == [unquote(p) for p in wanted["paths_sent"]]
        assert [r.path.count("/") for r in sent] == [p.count("/") for p in wanted["paths_sent"]]


@pytest.mark.live
@by_name("live")
def test_live(scenario: dict[str, Any], coppice: Coppice, live: Live) -> None:
    driver = Driver(coppice, live)
    for step in scenario["steps"]:
        expect(driver, step)


def test_the_table_is_large_enough() -> None:
    assert len(TABLE["scripted"]) + sum(len(s["steps"]) for s in TABLE["live"]) >= 150
    for kind in ("scripted", "live"):
        names = [s["name"] for s in TABLE[kind]]
        assert len(names) == len(set(names))

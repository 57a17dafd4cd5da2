"""Objects as the server sends them."""

from __future__ import annotations

from typing import Any

AT = "2026-11-28T00:00:00Z"
WS = "ws_06e5bqv7z0f3m8k2h1t9r4w6xc"
CKPT = "ckpt_06e5bqv7z0f3m8k2h1t9r4w6xc"
OP = "op_06e5bqv7z0f3m8k2h1t9r4w6xc"
SESS = "sess_06e5bqv7z0f3m8k2h1t9r4w6xc"
WATCH = "watch_06e5bqv7z0f3m8k2h1t9r4w6xc"
RESOURCES = {"vcpus": 1, "memory_mib": 512, "disk_gib": 1}
IMAGE = {"name": "base", "digest": "sha256:" + "0" * 64}


def workspace(**fields: Any) -> dict[str, Any]:
    return {
        "id": WS, "name": "one", "state": "ready", "epoch": 1, "version": 1, "image": IMAGE, "resources": RESOURCES,
        "network": {"egress_policy": "deny-all"}, "labels": {}, "created_at": AT, **fields,
    }


def checkpoint(**fields: Any) -> dict[str, Any]:
    return {
        "id": CKPT, "state": "captured", "kind": "user", "labels": {}, "annotations": {}, "version": 1, "image": IMAGE,
        "resources": RESOURCES, "delta_bytes": 0, "device_state_bytes": 0, "disk_bytes": 0, "pause_ms": 1.5,
        "timings": [], "children_count": 0, "created_at": AT, **fields,
    }


def session(**fields: Any) -> dict[str, Any]:
    return {
        "id": SESS, "workspace_id": WS, "epoch": 1, "command": ["true"], "cwd": "/", "state": "exited", "pty": False,
        "pid": 1, "exit_code": 0, "timed_out": False, "stdin_open": False, "stdout_bytes": 0, "stderr_bytes": 0,
        "stdout_first": 0, "stderr_first": 0, "started_at": AT, "ended_at": AT, **fields,
    }


def exec_result(**fields: Any) -> dict[str, Any]:
    return {
        "session": session(), "exit_code": 0, "timed_out": False, "stdout": "", "stderr": "", "encoding": "utf-8",
        "stdout_truncated": False, "stderr_truncated": False, "timings": [], **fields,
    }


def operation(state: str, **fields: Any) -> dict[str, Any]:
    return {
        "id": OP, "kind": "create_workspace", "state": state, "workspace_ids": [], "timings": [], "created_at": AT, **fields,
    }


def file_info(**fields: Any) -> dict[str, Any]:
    return {
        "path": "/d", "name": "d", "type": "dir", "size": 0, "mode": "0755", "uid": 0, "gid": 0, "mtime": AT, **fields,
    }


def watch(**fields: Any) -> dict[str, Any]:
    return {
        "id": WATCH, "path": "/d", "recursive": False, "created_at": AT, "last": 0, "incomplete": False, "ended": False,
        **fields,
    }


def watch_event(seq: int, **fields: Any) -> dict[str, Any]:
    return {"seq": seq, "type": "create", "path": f"/d/{seq}", "name": str(seq), "dir": False, **fields}

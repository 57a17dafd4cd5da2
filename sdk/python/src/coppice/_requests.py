"""The bodies of requests that start workspaces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from . import models
from ._results import Command, milliseconds, words


class Launch(TypedDict, total=False):
    """What every new workspace can have. Durations are in seconds."""

    env: Mapping[str, str]
    labels: Mapping[str, str]
    allow: Sequence[str]
    """What it may reach; see `Allow` in the contract. A fork that does not say has its parent's."""
    egress_policy: str
    ttl: int
    """Terminate it after this time."""
    idle: int
    """Do what `on_idle` says when nobody has used it for this time."""
    on_idle: str
    auto_resume: bool


class ForkLaunch(Launch, total=False):
    grants: str | Sequence[str]
    """Which grants of the parent the children have: `inherit`, `none`, or a list of ids."""


class StepLaunch(TypedDict, total=False):
    """What all workspaces of a step can have."""

    env: Mapping[str, str]
    labels: Mapping[str, str]
    allow: Sequence[str]
    egress_policy: str
    ttl: int
    """Terminate a workspace that is kept after this time, in seconds."""
    grants: str | Sequence[str]


class Build(TypedDict, total=False):
    """How an image is built: either `dockerfile`, or `from_` and `steps`."""

    dockerfile: str
    """The text of a Dockerfile with one stage."""
    context: str
    """The id of the upload that COPY and ADD read; see `put_upload`."""
    build_args: Mapping[str, str]
    target: str
    from_: str
    """The base: an image of the project or of the runners, a reference that was pulled, or a checkpoint's id."""
    steps: Sequence[models.BuildStep]
    start: models.BuildStart
    """A program that runs in the image."""
    vcpus: int
    memory_mib: int
    disk_gib: int
    allow: Sequence[str]
    """What the build may reach. By default the package managers' sites."""
    egress_policy: str
    no_cache: bool
    labels: Mapping[str, str]


def build(name: str, options: Build) -> models.BuildImageRequest:
    """The request of a build."""
    unknown = set(options) - set(Build.__annotations__)
    if unknown:
        raise TypeError(f"unknown option {min(unknown)!r}")
    steps, args = options.get("steps"), options.get("build_args")
    labels, allow = options.get("labels"), options.get("allow")
    network = None
    if allow is not None or options.get("egress_policy") is not None:
        network = models.NetworkRequest(
            allow=None if allow is None else list(allow), egress_policy=options.get("egress_policy")
        )
    return models.BuildImageRequest(
        name=name, from_=options.get("from_"), dockerfile=options.get("dockerfile"), context=options.get("context"),
        build_args=None if args is None else dict(args), target=options.get("target"),
        steps=None if steps is None else list(steps), start=options.get("start"),
        resources=resources(options.get("vcpus"), options.get("memory_mib"), options.get("disk_gib")), network=network,
        no_cache=options.get("no_cache"), labels=None if labels is None else dict(labels),
    )


def action(
    command: Command | None = None,
    *,
    files: Mapping[str, str | bytes] | None = None,
    stdin: str | bytes | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    user: str | None = None,
    timeout: float | None = None,
    keep: str | None = None,
    only_if: models.StepCondition | None = None,
    workspace_name: str | None = None,
    checkpoint: models.CreateCheckpointRequest | None = None,
) -> models.StepAction:
    """An action of a step: files by their paths, which are written first, and a program. At least one of both.

    `keep` is `checkpoint` (the default), `workspace` or `nothing`; with `only_if`, something is kept only if that holds.
    `checkpoint` has the name, labels and annotations of the checkpoint. The program may run for 60 seconds, or `timeout`.
    """
    made = models.StepAction(
        command=None if command is None else words(command), env=dict(env) if env else None, cwd=cwd, user=user,
        timeout_ms=None if timeout is None else milliseconds(timeout), keep=keep, only_if=only_if, name=workspace_name,
        checkpoint=checkpoint,
    )
    if files:
        made.files = [
            models.StepFile(path=path, content=data) if isinstance(data, str) else models.StepFile(path=path, content_base64=data)
            for path, data in files.items()
        ]
    if isinstance(stdin, str):
        made.stdin = stdin or None
    elif stdin:
        made.stdin_base64 = stdin
    return made


def within(made: models.StepAction, when: str | None) -> models.WorkspaceStepRequest:
    """The request of a step of a workspace."""
    return models.WorkspaceStepRequest(
        files=made.files, command=made.command, cwd=made.cwd, env=made.env, user=made.user, stdin=made.stdin,
        stdin_base64=made.stdin_base64, timeout_ms=made.timeout_ms, when=when, checkpoint=made.checkpoint,
    )


def step(
    actions: Sequence[models.StepAction | str], parallel: int | None, options: Mapping[str, Any]
) -> models.StepRequest:
    """The request of a step. A text is an action with that line for `sh -c`."""
    if isinstance(actions, str):
        raise TypeError("actions must be a list")
    return models.StepRequest(
        actions=[action(a) if isinstance(a, str) else a for a in actions], parallel=parallel, **launch(options)
    )


def launch(options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request."""
    out: dict[str, Any] = {}
    network = models.NetworkRequest()
    for name, value in options.items():
        if value is None:
            continue
        if name in ("env", "labels"):
            out[name] = dict(value)
        elif name == "allow":
            network.allow = list(value)
        elif name == "egress_policy":
            network.egress_policy = value
        elif name in ("ttl", "idle"):
            out[name + "_seconds"] = value
        elif name in ("on_idle", "auto_resume"):
            out[name] = value
        elif name == "grants":
            out[name] = value if isinstance(value, str) else list(value)
        else:
            raise TypeError(f"unknown option {name!r}")
    if network.allow is not None or network.egress_policy is not None:
        out["network"] = network
    return out


def resources(vcpus: int | None, memory_mib: int | None, disk_gib: int | None) -> models.ResourcesRequest | None:
    if vcpus is None and memory_mib is None and disk_gib is None:
        return None
    return models.ResourcesRequest(vcpus=vcpus, memory_mib=memory_mib, disk_gib=disk_gib)


def is_id(value: str, prefix: str) -> bool:
    """Whether a value is an id, and not a name: names have no underscore."""
    return value.startswith(prefix + "_")

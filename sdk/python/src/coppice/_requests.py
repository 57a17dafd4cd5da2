"""The bodies of requests that start workspaces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from . import models


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

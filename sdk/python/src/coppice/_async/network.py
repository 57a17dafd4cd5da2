"""What a workspace may reach, and what reaches it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from .. import _operations as op
from .. import models
from .._policy import Call
from .transport import AsyncTransport


class AsyncNetwork:
    """Rules, grants, forwarded ports and flows of one workspace."""

    def __init__(self, transport: AsyncTransport, workspace_id: str) -> None:
        self._t = transport
        self._id = workspace_id

    async def allow(self, entries: Sequence[str], *, version: int | None = None) -> models.Network:
        """Replaces what the workspace may reach: names, `*.names`, `tcp://host:port`, `bundle:python`.

        A fork may reach what its parent may reach, never more. What is removed here is removed from all forks, too.
        """
        body = models.PatchWorkspaceRequest(network=models.NetworkPatch(allow=list(entries)), version=version)
        return (await self._t.call(self._call(op.patchWorkspace, body=body), models.Workspace)).network

    async def flows(self, *, outcome: str | None = None, host: str | None = None) -> AsyncIterator[models.Flow]:
        """What it sent, or tried to send, newest first."""
        call = self._call(op.listEgress, query={"outcome": outcome, "host": host})
        async for flow in self._t.pages(call, models.Flow):
            yield flow

    async def grant(
        self,
        name: str,
        *,
        secret: str | None = None,
        vault_ref: str | None = None,
        hosts: Sequence[str] | None = None,
        provider: str | None = None,
        mode: str | None = None,
        header: str | None = None,
        methods: Sequence[str] | None = None,
        paths: Sequence[str] | None = None,
        env: str | None = None,
        base_url_env: str | None = None,
        base_url_path: str | None = None,
        ttl: int | None = None,
        max_bytes: int | None = None,
        requests_per_minute: int | None = None,
    ) -> models.Grant:
        """Lets the workspace and its forks use a secret for certain hosts. The secret itself never enters the machine."""

        def listed(values: Sequence[str] | None) -> list[str] | None:
            return None if values is None else list(values)

        body = models.PutGrantRequest(
            secret=secret, vault_ref=vault_ref, allowed_hosts=listed(hosts), provider=provider, mode=mode, header=header,
            methods=listed(methods), paths=listed(paths), env=env, base_url_env=base_url_env, base_url_path=base_url_path,
            ttl_seconds=ttl, max_bytes=max_bytes, requests_per_minute=requests_per_minute,
        )
        return await self._t.call(self._call(op.putGrant, grant_id=name, body=body), models.Grant)

    async def grants(self) -> list[models.Grant]:
        return (await self._t.call(self._call(op.listGrants), models.GrantList)).items

    async def get_grant(self, name: str) -> models.Grant:
        return await self._t.call(self._call(op.getGrant, grant_id=name), models.Grant)

    async def revoke(self, name: str) -> None:
        """Revokes a grant from the workspace and its forks, and breaks off the requests that use it."""
        await self._t.run(self._call(op.deleteGrant, grant_id=name))

    async def ports(self) -> list[models.Port]:
        return (await self._t.call(self._call(op.listPorts), models.PortList)).items

    async def open_port(self, guest_port: int, *, listen: str | None = None) -> models.Port:
        """Forwards a TCP address of the runner's host to a port of the guest; `listen` of the answer says which."""
        body = models.CreatePortRequest(guest_port=guest_port, listen=listen)
        return await self._t.call(self._call(op.createPort, body=body), models.Port)

    async def close_port(self, port_id: str) -> None:
        await self._t.run(self._call(op.deletePort, port_id=port_id))

    def _call(
        self, operation: op.Operation, *, body: Any = None, query: dict[str, Any] | None = None, **path: str
    ) -> Call:
        return Call(operation, {"workspace_id": self._id, **path}, query or {}, body)

"""What operators do: projects, keys, runners, the store, the audit log."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from datetime import datetime

from .. import _operations as op
from .. import models
from .._policy import Call
from .transport import AsyncTransport


class AsyncAdmin:
    """The calls of an operator. Most need a key with the scope `admin`."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._t = transport

    # -- projects and keys

    async def create_project(
        self, name: str, *, quotas: models.QuotasPatch | None = None, encryption: str | None = None
    ) -> models.Project:
        body = models.CreateProjectRequest(name=name, quotas=quotas, encryption=encryption)
        return await self._t.call(Call(op.createProject, body=body), models.Project)

    async def projects(self) -> AsyncIterator[models.Project]:
        async for project in self._t.pages(Call(op.listProjects), models.Project):
            yield project

    async def project(self, project_id: str) -> models.Project:
        return await self._t.call(Call(op.getProject, {"project_id": project_id}), models.Project)

    async def update_project(self, project_id: str, change: models.PatchProjectRequest) -> models.Project:
        return await self._t.call(Call(op.patchProject, {"project_id": project_id}, body=change), models.Project)

    async def delete_project(self, project_id: str) -> None:
        await self._t.run(Call(op.deleteProject, {"project_id": project_id}))

    async def create_key(
        self, project_id: str, name: str, *, scopes: Sequence[str] = (), ttl: int | None = None
    ) -> models.CreatedKey:
        """Only this answer has the secret."""
        body = models.CreateKeyRequest(name=name, scopes=list(scopes) or None, ttl_seconds=ttl)
        return await self._t.call(Call(op.createKey, {"project_id": project_id}, body=body), models.CreatedKey)

    async def keys(self, project_id: str) -> AsyncIterator[models.APIKey]:
        async for key in self._t.pages(Call(op.listKeys, {"project_id": project_id}), models.APIKey):
            yield key

    async def key(self, key_id: str) -> models.APIKey:
        return await self._t.call(Call(op.getKey, {"key_id": key_id}), models.APIKey)

    async def revoke_key(self, key_id: str) -> None:
        """Revokes a key and the keys that were made with it."""
        await self._t.run(Call(op.revokeKey, {"key_id": key_id}))

    # -- the audit log

    async def audit(
        self,
        *,
        project_id: str | None = None,
        actor: str | None = None,
        action: str | None = None,
        object_id: str | None = None,
        request_id: str | None = None,
        operation_id: str | None = None,
        outcome: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> AsyncIterator[models.AuditRecord]:
        """Who changed what, newest first. Times need a time zone."""
        query = {
            "project_id": project_id, "actor": actor, "action": action, "object_id": object_id, "request_id": request_id,
            "operation_id": operation_id, "outcome": outcome, "since": since, "until": until,
        }
        async for record in self._t.pages(Call(op.listAudit, query=query), models.AuditRecord):
            yield record

    async def check_audit(self, project_id: str | None = None) -> models.AuditCheck:
        return await self._t.call(Call(op.checkAudit, query={"project_id": project_id}), models.AuditCheck)

    # -- runners and the store

    async def runners(self) -> AsyncIterator[models.Runner]:
        async for runner in self._t.pages(Call(op.listRunners), models.Runner):
            yield runner

    async def drain_runner(self, runner_id: str, draining: bool = True) -> models.Runner:
        body = models.PatchRunnerRequest(draining=draining)
        return await self._t.call(Call(op.patchRunner, {"runner_id": runner_id}, body=body), models.Runner)

    async def remove_runner(self, runner_id: str, *, force: bool = False) -> None:
        await self._t.run(Call(op.deleteRunner, {"runner_id": runner_id}, {"force": force or None}))

    async def create_runner_token(self, runner_id: str | None = None, *, ttl: int | None = None) -> models.RunnerToken:
        body = models.CreateRunnerTokenRequest(runner_id=runner_id, ttl_seconds=ttl)
        return await self._t.call(Call(op.createRunnerToken, body=body), models.RunnerToken)

    async def collect_store(self, *, dry_run: bool = False) -> models.StoreGarbage:
        call = Call(op.collectStore, query={"dry_run": dry_run or None}, read_timeout=120)
        return await self._t.call(call, models.StoreGarbage)

    async def check_store(self) -> models.StoreReport:
        return await self._t.call(Call(op.checkStore, read_timeout=600), models.StoreReport)

    async def check_store_data(self, *, part: int = 1, of: int = 1, after: str = "") -> models.StoreData:
        call = Call(op.checkStoreData, query={"part": part, "of": of, "after": after or None}, read_timeout=120)
        return await self._t.call(call, models.StoreData)

"""Nodes of the tree."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, List

from .. import _operations as op
from .. import _policy as policy
from .. import _requests as requests
from .. import models
from .._codes import VersionConflict
from .._policy import Call
from .._results import Diff
from .files import absolute
from .steps import AsyncStepStream
from .transport import AsyncTransport, read_bounded
from .workspace import AsyncWorkspace, AsyncForks, children

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AsyncCheckpointFiles:
    """Reads files as they were when the machine was captured. No machine runs for it. Paths are absolute, in the guest."""

    def __init__(self, transport: AsyncTransport, checkpoint_id: str) -> None:
        self._t = transport
        self._id = checkpoint_id

    async def read(self, path: str, *, limit: int = 256 << 20) -> bytes:
        """The bytes of a file; a file of more than `limit` bytes is an error."""
        async with self._t.stream(self._call(path)) as answer:
            return await read_bounded(answer, limit, f"read {path}")

    async def read_text(self, path: str, *, encoding: str = "utf-8", limit: int = 256 << 20) -> str:
        return (await self.read(path, limit=limit)).decode(encoding)

    async def stream(self, path: str) -> AsyncIterator[bytes]:
        """The bytes of a file, as they arrive."""
        async with self._t.stream(self._call(path)) as answer:
            async for piece in answer.aiter_raw():
                yield piece

    async def stat(self, path: str) -> models.FileInfo:
        """Describes a path. A symbolic link at its end is not followed."""
        return await self._t.call(self._call(path, stat=True), models.FileInfo)

    async def list(self, path: str) -> List[models.FileInfo]:
        """The entries of a directory, at most 10,000."""
        return (await self._t.call(self._call(path, list=True), models.FileList)).entries

    def _call(self, path: str, **flags: bool) -> Call:
        return Call(op.getCheckpointFile, {"checkpoint_id": self._id}, {"path": absolute(path), **flags})


class AsyncCheckpoint:
    """An immutable node of the tree: a machine's memory, devices and disk."""

    def __init__(self, transport: AsyncTransport, info: models.Checkpoint) -> None:
        self._t = transport
        self.info = info
        """What was known when it was last asked for; `refresh` asks again."""
        self.files = AsyncCheckpointFiles(transport, info.id)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name or ''} {self.id} {self.info.state}>"

    @property
    def id(self) -> str:
        return self.info.id

    @property
    def name(self) -> str | None:
        return self.info.name

    @property
    def parent_id(self) -> str | None:
        return self.info.parent_id

    @property
    def annotations(self) -> dict[str, Any]:
        return self.info.annotations

    async def refresh(self, *, sealed: bool = False) -> AsyncCheckpoint:
        """Asks for it again. With `sealed`, waits until it is in the store, a minute at most."""
        call = self._call(op.getCheckpoint)
        if sealed:
            call.query = {"wait": "sealed"}
            call.read_timeout = 60 + self._t.config.read_timeout
        self.info = await self._t.call(call, models.Checkpoint)
        return self

    async def fork(
        self,
        count: int = 1,
        *,
        name: str | None = None,
        all_or_nothing: bool = True,
        spread: bool | None = None,
        idempotency_key: str = "",
        **options: Unpack[requests.ForkLaunch],
    ) -> AsyncForks:
        """Starts workspaces from this checkpoint, all at once, each with an identity of its own.

        If one fails, all are destroyed and the fork fails. Without `all_or_nothing` it succeeds with at least one, and
        `failures` of the answer has the problems of the others.
        """
        body = models.ForkCheckpointRequest(
            count=count, branch_name=name, all_or_nothing=all_or_nothing, spread=spread, **requests.launch(options)
        )
        call = self._call(op.forkCheckpoint, body)
        call.key = idempotency_key
        return children(self._t, await self._t.start(call, models.ForkResult))

    async def restore(
        self, name: str | None = None, *, idempotency_key: str = "", **options: Unpack[requests.ForkLaunch]
    ) -> AsyncWorkspace:
        """Starts one workspace from this checkpoint, with a name."""
        body = models.RestoreCheckpointRequest(workspace_name=name, **requests.launch(options))
        call = self._call(op.restoreCheckpoint, body)
        call.key = idempotency_key
        return AsyncWorkspace(self._t, (await self._t.start(call, models.RestoreResult)).workspace)

    async def step(
        self,
        actions: Sequence[models.StepAction | str],
        *,
        parallel: int | None = None,
        idempotency_key: str = "",
        **options: Unpack[requests.StepLaunch],
    ) -> models.StepResult:
        """Tries several actions, each in a fork of its own, and returns when all have ended.

        `coppice.action` makes an action; a text is one with a line for `sh -c`. An action that failed has a `problem`, and
        does not end the others. `parallel` of them have a workspace at the same time.
        """
        call = self._call(op.stepCheckpoint, requests.step(actions, parallel, options))
        call.key = idempotency_key
        return await self._t.start(call, models.StepResult)

    def stream_step(
        self,
        actions: Sequence[models.StepAction | str],
        *,
        parallel: int | None = None,
        idempotency_key: str = "",
        **options: Unpack[requests.StepLaunch],
    ) -> AsyncIterator[models.StepEvent]:
        """Does the same, and yields the results as they come.

        The first event has only the id of the operation; then there is one for each action when it ends. If the connection
        breaks, it asks again with the same key, and yields no result twice. If the operation failed, because it was canceled
        for example, it raises why. The step goes on if the caller stops reading: client.cancel_operation ends it.
        """
        call = self._call(op.stepCheckpoint, requests.step(actions, parallel, options))
        call.key = idempotency_key
        return AsyncStepStream(self._t, call).read()

    async def update(
        self,
        *,
        name: str | None = None,
        labels: Mapping[str, str | None] | None = None,
        annotations: Mapping[str, Any] | None = None,
        pinned: bool | None = None,
        version: int | None = None,
    ) -> AsyncCheckpoint:
        """Changes what is given; an empty name, a label or an annotation of None is removed.

        With `version`, the change is made only if that is still the checkpoint's version; otherwise it raises
        VersionConflict.
        """
        body = models.PatchCheckpointRequest(
            name=name, labels=dict(labels) if labels is not None else None, pinned=pinned, version=version,
            annotations=dict(annotations) if annotations is not None else None,
        )
        self.info = await self._t.call(self._call(op.patchCheckpoint, body), models.Checkpoint)
        return self

    async def annotate(
        self, change: Callable[[dict[str, Any]], Mapping[str, Any]], *, attempts: int = 64
    ) -> AsyncCheckpoint:
        """Changes annotations by compare-and-set: `change` gets the present ones and returns those to set.

        It is called again if another client was faster.
        """
        attempt = 0
        while True:
            try:
                return await self.update(annotations=change(dict(self.annotations)), version=self.info.version)
            except VersionConflict:
                attempt += 1
                if attempt >= attempts:
                    raise
                await self.refresh()

    async def delete(self, *, cascade: bool = False, dry_run: bool = False) -> models.PruneResult | None:
        """Deletes its bytes. With `cascade`, also those of its descendants: all of them or none.

        With `dry_run` it only says what would be deleted. Without both there is nothing to say.
        """
        call = self._call(op.deleteCheckpoint)
        if not cascade and not dry_run:
            await self._t.run(call)
            return None
        call.query = {"cascade": cascade or None, "dry_run": dry_run or None}
        return await self._t.start(call, models.PruneResult)

    # -- the tree

    async def parent(self) -> AsyncCheckpoint | None:
        if self.parent_id is None:
            return None
        call = Call(op.getCheckpoint, {"checkpoint_id": self.parent_id})
        return AsyncCheckpoint(self._t, await self._t.call(call, models.Checkpoint))

    async def lineage(self) -> AsyncIterator[models.Ancestor]:
        """The path to the root, beginning with itself."""
        async for node in self._t.pages(self._call(op.getLineage), models.Ancestor):
            yield node

    async def children(self) -> AsyncIterator[AsyncCheckpoint]:
        """Its direct children, oldest first."""
        async for info in self._t.pages(self._call(op.listChildren), models.Checkpoint):
            yield AsyncCheckpoint(self._t, info)

    async def tree(self, *, depth: int | None = None) -> AsyncIterator[models.TreeNode]:
        """Itself and all its descendants, every node after its parent."""
        call = self._call(op.getTree)
        call.query = {"depth": depth}
        async for node in self._t.pages(call, models.TreeNode):
            yield node

    async def diff(self, to: AsyncCheckpoint | str, *, limit: int = 100_000) -> Diff:
        """What differs in another checkpoint: files (at most `limit`), processes and memory."""
        call = self._call(op.diffCheckpoints)
        call.query = {"to": to if isinstance(to, str) else to.id}
        out: Diff | None = None
        while True:
            page = await self._t.call(call, models.CheckpointDiff)
            if out is None:
                out = Diff([], page.files_complete, 0, page.processes, page.memory_changed_bytes)
                out.identity_unknown = bool(page.identity_unknown)
            out.files += page.items[: limit - len(out.files)]
            out.unreadable += page.unreadable
            if not page.next_cursor or len(out.files) >= limit:
                return out
            call.query = {**call.query, "cursor": page.next_cursor}

    async def effects(self) -> AsyncIterator[models.Effect]:
        """What may have changed outside on the path from the root to this checkpoint."""
        async for effect in self._t.pages(self._call(op.listEffects), models.Effect):
            yield effect

    async def usage(self) -> models.Usage:
        """What all its descendants have used."""
        return await self._t.call(self._call(op.getCheckpointUsage), models.Usage)

    # -- retention, export

    async def prune(
        self, rules: models.RetentionPolicy, *, dry_run: bool = False
    ) -> models.PruneResult:
        """Deletes what the policy does not keep of this checkpoint and its descendants."""
        body = models.PruneRequest(
            keep_best=rules.keep_best, keep_path_to_root=rules.keep_path_to_root,
            max_age_seconds=rules.max_age_seconds, max_bytes=rules.max_bytes, dry_run=dry_run or None,
        )
        return await self._t.start(self._call(op.pruneCheckpoints, body), models.PruneResult)

    async def prepared(self) -> models.Prepared:
        """How many machines are prepared for forks of the checkpoint."""
        return await self._t.call(self._call(op.getPrepared), models.Prepared)

    async def prepare(self, count: int, *, ttl: int | None = None) -> models.Prepared:
        """Ask for machines that are prepared for forks of the checkpoint, for ``ttl`` seconds (2 minutes).

        It replaces what was asked for before. A count of 0 ends it.
        """
        wanted = models.PrepareRequest(count=count, ttl_seconds=ttl)
        return await self._t.call(self._call(op.putPrepared, wanted), models.Prepared)

    async def retention(self) -> models.Retention:
        return await self._t.call(self._call(op.getRetention), models.Retention)

    async def set_retention(self, rules: models.RetentionPolicy) -> models.Retention:
        """Stores a policy, which the server applies about every minute."""
        return await self._t.call(self._call(op.putRetention, rules), models.Retention)

    async def delete_retention(self) -> None:
        await self._t.run(self._call(op.deleteRetention))

    async def export(self, path: str | os.PathLike[str]) -> int:
        """Writes this checkpoint to a file, which another installation can import. Returns its size."""
        target = Path(path)
        temporary = target.with_name(f".coppice-{policy.new_key()}")
        size = 0
        try:
            with temporary.open("xb") as f:
                async with self._t.stream(self._call(op.exportCheckpoint)) as answer:
                    async for piece in answer.aiter_raw():
                        size += f.write(piece)
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return size

    def _call(self, operation: op.Operation, body: Any = None) -> Call:
        return Call(operation, {"checkpoint_id": self.id}, body=body)

"""The way in."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, List

from .. import _connection as connection
from .. import _operations as op
from .. import _requests as requests
from .. import models
from .._codes import CheckpointNotFound, WorkspaceNotFound
from .._policy import Call, decode
from .._tar import pack
from .._trees import Tree
from . import runtime
from .admin import AsyncAdmin
from .checkpoint import AsyncCheckpoint
from .events import AsyncEvents
from .files import Archive, body_of, pieces
from .session import AsyncSession
from .transport import AsyncTransport
from .workspace import AsyncWorkspace

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AsyncCoppice:
    """A client of one server.

    Without arguments it takes the server from the environment (COPPICE_SERVER, and COPPICE_TOKEN or
    COPPICE_TOKEN_FILE), or from what `coppice dev` left. It connects to nothing before the first call. It is safe for
    concurrent use.
    """

    def __init__(
        self,
        server: str | None = None,
        token: str | None = None,
        *,
        ca_file: str | None = None,
        config: connection.Config | None = None,
    ) -> None:
        self.config = connection.checked(config) if config else connection.resolve(server, token, ca_file)
        self._t = AsyncTransport(self.config)
        self.admin = AsyncAdmin(self._t)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.config.server}>"

    async def __aenter__(self) -> AsyncCoppice:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Closes the connections. Workspaces go on."""
        await self._t.aclose()

    def with_options(self, **changes: Any) -> AsyncCoppice:
        """A client with other settings, such as `retries` or `operation_timeout`; see Config."""
        return type(self)(config=replace(self.config, **changes))

    # -- workspaces

    async def create(
        self,
        image: str | None = None,
        *,
        name: str | None = None,
        vcpus: int | None = None,
        memory_mib: int | None = None,
        disk_gib: int | None = None,
        idempotency_key: str = "",
        **options: Unpack[requests.Launch],
    ) -> AsyncWorkspace:
        """Makes a workspace from an image, and returns it ready."""
        body = models.CreateWorkspaceRequest(
            image=image, name=name, resources=requests.resources(vcpus, memory_mib, disk_gib), **requests.launch(options)
        )
        call = Call(op.createWorkspace, body=body, key=idempotency_key)
        return AsyncWorkspace(self._t, await self._t.start(call, models.Workspace))

    async def workspace(self, id_or_name: str) -> AsyncWorkspace:
        """A workspace by its id, or a living one by its name."""
        if requests.is_id(id_or_name, "ws"):
            call = Call(op.getWorkspace, {"workspace_id": id_or_name})
            return AsyncWorkspace(self._t, await self._t.call(call, models.Workspace))
        async for found in self.workspaces(name=id_or_name, limit=1):
            return found
        raise WorkspaceNotFound(f"there is no workspace {id_or_name!r}", code=WorkspaceNotFound.code, status=404)

    async def workspaces(
        self,
        *,
        name: str | None = None,
        labels: Sequence[str] = (),
        states: Sequence[str] = (),
        checkpoint_id: str | None = None,
        parent_checkpoint_id: str | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[AsyncWorkspace]:
        """Workspaces, newest first; without `states`, all that have not been terminated. A label is `key` or `key=value`."""
        query = {
            "name": name, "label": list(labels), "state": list(states), "checkpoint_id": checkpoint_id,
            "parent_checkpoint_id": parent_checkpoint_id,
        }
        async for info in self._t.pages(Call(op.listWorkspaces, query=query), models.Workspace, limit):
            yield AsyncWorkspace(self._t, info)

    async def session(self, session_id: str) -> AsyncSession:
        call = Call(op.getSession, {"session_id": session_id})
        return AsyncSession(self._t, await self._t.call(call, models.Session))

    # -- checkpoints

    async def checkpoint(self, id_or_name: str) -> AsyncCheckpoint:
        """A checkpoint by its id or its name."""
        if requests.is_id(id_or_name, "ckpt"):
            call = Call(op.getCheckpoint, {"checkpoint_id": id_or_name})
            return AsyncCheckpoint(self._t, await self._t.call(call, models.Checkpoint))
        async for found in self.checkpoints(name=id_or_name, limit=1):
            return found
        raise CheckpointNotFound(f"there is no checkpoint {id_or_name!r}", code=CheckpointNotFound.code, status=404)

    async def checkpoints(
        self,
        *,
        name: str | None = None,
        labels: Sequence[str] = (),
        states: Sequence[str] = (),
        kind: str | None = None,
        workspace_id: str | None = None,
        parent_id: str | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[AsyncCheckpoint]:
        """Checkpoints, newest first; without `states`, those that can be forked."""
        query = {
            "name": name, "label": list(labels), "state": list(states), "kind": kind, "workspace_id": workspace_id,
            "parent_id": parent_id,
        }
        async for info in self._t.pages(Call(op.listCheckpoints, query=query), models.Checkpoint, limit):
            yield AsyncCheckpoint(self._t, info)

    async def tree(self, id_or_name: str, *, depth: int | None = None, limit: int = 10_000) -> Tree:
        """A checkpoint and what is below it, at most `limit` nodes, to look at: a notebook draws it as a tree."""
        root = id_or_name if requests.is_id(id_or_name, "ckpt") else (await self.checkpoint(id_or_name)).id
        call = Call(op.getTree, {"checkpoint_id": root}, {"depth": depth})
        nodes = [node async for node in self._t.pages(call, models.TreeNode, limit + 1)]
        return Tree(nodes[:limit], complete=len(nodes) <= limit)

    async def import_checkpoint(
        self, path: str | os.PathLike[str], *, name: str | None = None, idempotency_key: str = ""
    ) -> AsyncCheckpoint:
        """Imports a file that `Checkpoint.export` wrote, here or elsewhere."""
        with Path(path).open("rb") as f:
            call = Call(op.importCheckpoint, query={"name": name}, content=runtime.body(pieces(f)), key=idempotency_key)
            call.read_timeout = None  # the server verifies all of it
            return AsyncCheckpoint(self._t, await self._t.call(call, models.Checkpoint))

    # -- operations, events, facts

    async def operation(self, operation_id: str) -> models.Operation:
        return await self._t.call(Call(op.getOperation, {"operation_id": operation_id}), models.Operation)

    async def operations(
        self,
        *,
        states: Sequence[str] = (),
        kinds: Sequence[str] = (),
        workspace_id: str | None = None,
        checkpoint_id: str | None = None,
        idempotency_key: str | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[models.Operation]:
        """Operations, newest first, without their results. An idempotency key is that of the request that began one."""
        query = {
            "state": list(states), "kind": list(kinds), "workspace_id": workspace_id, "checkpoint_id": checkpoint_id,
            "idempotency_key": idempotency_key,
        }
        async for operation in self._t.pages(Call(op.listOperations, query=query), models.Operation, limit):
            yield operation

    async def cancel_operation(self, operation_id: str, timeout: float | None = None) -> models.Operation:
        """Stops an operation that makes workspaces, and waits for its end: it may still have succeeded.

        What it has begun is undone. Other operations raise OperationNotCancelable.
        """
        call = Call(op.cancelOperation, {"operation_id": operation_id})
        operation = await self._t.call(call, models.Operation)
        if operation.state in ("succeeded", "failed"):
            return operation
        return await self.wait_operation(operation_id, timeout)

    async def wait_operation(self, operation_id: str, timeout: float | None = None) -> models.Operation:
        """Waits for the end of an operation; its `problem` says whether it failed."""
        seconds = self.config.operation_timeout if timeout is None else timeout
        return await self._t.wait(operation_id, time.monotonic() + seconds)

    async def events(
        self,
        *,
        after: str | None = None,
        tree: str | None = None,
        workspace_id: str | None = None,
        types: Sequence[str] = (),
        follow: bool = True,
    ) -> AsyncIterator[models.Event]:
        """What happens in the project, each event once and in order.

        After a lost connection it continues where it was. `after` is the id of the last event that is known; "0" begins
        with the oldest one that is kept. With `follow=False` it ends when it has reached the present.
        """
        query = {"tree": tree, "workspace_id": workspace_id, "type": list(types), "follow": None if follow else False}
        events = AsyncEvents(self._t, query, after)
        async for event in events.read():
            yield event

    async def watch(
        self, on_event: Callable[[models.Event], Any], *, tree: str | None = None, workspace_id: str | None = None
    ) -> None:
        """Calls `on_event` with each event from now on, until it returns False."""
        async for event in self.events(tree=tree, workspace_id=workspace_id):
            answer = on_event(event)
            if hasattr(answer, "__await__"):
                answer = await answer
            if answer is False:
                return

    # -- images

    async def build_image(
        self, name: str, *, timeout: float | None = None, idempotency_key: str = "", **options: Unpack[requests.Build]
    ) -> models.BuiltImage:
        """Builds an image of the project, and returns it when it is built. `create(name)` makes workspaces from it.

        Raises BuildFailed if an instruction fails, and DockerfileInvalid. Instructions that were carried out before, with
        the same files, are not carried out again.
        """
        call = Call(op.buildImage, body=requests.build(name, options), key=idempotency_key)
        return (await self._t.start(call, models.BuildResult, timeout)).image

    async def start_build(
        self, name: str, *, idempotency_key: str = "", **options: Unpack[requests.Build]
    ) -> models.Operation:
        """Begins to build an image. `operation_log` has what it says, and `wait_operation` waits for its end."""
        call = Call(op.buildImage, query={"wait": 0}, body=requests.build(name, options), key=idempotency_key)
        status, body = await self._t.read(call)
        if status == 202:
            return decode(body, models.Operation, call.op.id)
        return await self.operation(decode(body, models.BuildResult, call.op.id).operation_id)

    async def operation_log(self, operation_id: str, offset: int = 0) -> bytes:
        """A part of the log of a build, of at most about 256 KiB. If it is empty, there is no more yet."""
        return (await self._t.read(Call(op.getOperationLog, {"operation_id": operation_id}, {"offset": offset})))[1]

    async def built_images(self) -> List[models.BuiltImage]:
        """The images that the project has built, by name."""
        return (await self._t.call(Call(op.listImages, query={"limit": 1}), models.ImageList)).built or []

    async def built_image(self, name: str) -> models.BuiltImage:
        return await self._t.call(Call(op.getImage, {"image_name": name}), models.BuiltImage)

    async def delete_image(self, name: str) -> None:
        """Removes the name of an image that the project has built. Its checkpoint stays, and can be deleted then."""
        await self._t.run(Call(op.deleteImage, {"image_name": name}))

    async def put_upload(self, upload_id: str, data: Archive | os.PathLike[str]) -> models.Upload:
        """Sends files for builds, in the place of an earlier upload with the id. It is kept for a day.

        `data` is a tar, plain or with gzip: bytes, an open file, or a Path. A Path may also be a directory: then its
        content is sent. The id has up to 128 lower-case letters, digits and hyphens.
        """
        call = Call(op.putUpload, {"upload_id": upload_id}, content_type="application/x-tar", read_timeout=None)
        if not isinstance(data, os.PathLike):
            return await self._put(call, body_of(data))
        if (source := Path(data)).is_dir():
            return await self._put(call, pack(source))
        with source.open("rb") as f:
            return await self._put(call, pieces(f))

    async def _put(self, call: Call, body: bytes | Iterable[bytes]) -> models.Upload:
        call.content = body if isinstance(body, bytes) else runtime.body(body)
        return await self._t.call(call, models.Upload)

    async def upload(self, upload_id: str) -> models.Upload:
        """What is known of an upload."""
        return await self._t.call(Call(op.getUpload, {"upload_id": upload_id}), models.Upload)

    async def delete_upload(self, upload_id: str) -> None:
        await self._t.run(Call(op.deleteUpload, {"upload_id": upload_id}))

    async def images(self) -> AsyncIterator[models.Image]:
        """The images that runners have. `built_images` has those of the project."""
        async for image in self._t.pages(Call(op.listImages), models.Image):
            yield image

    async def whoami(self) -> models.APIKey:
        """The key of this client."""
        return await self._t.call(Call(op.getSelf), models.APIKey)

    async def health(self) -> models.Health:
        """Whether the server runs."""
        return await self._t.call(Call(op.getHealth), models.Health)

    async def ready(self) -> models.Health:
        """Whether the server can accept work; raises DatabaseUnavailable or NoRunner."""
        return await self._t.call(Call(op.getReadiness), models.Health)

    async def authority(self) -> models.Authority:
        """The certificate that verifies attestations. Get it once, over a channel that you trust."""
        return await self._t.call(Call(op.getAuthority), models.Authority)

    async def specification(self) -> bytes:
        """The contract of the server, as YAML."""
        return (await self._t.read(Call(op.getSpecification)))[1]

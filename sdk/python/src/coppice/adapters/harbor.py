"""Workspaces as environments of Harbor (the package harbor, for Python 3.12 and newer).

    pip install 'coppice[harbor]'

    harbor run -p TASKS -a oracle -e coppice.adapters.harbor:CoppiceEnvironment

A task's Dockerfile is built on the server, once for its content. Each trial begins as a fork of that image. An agent of your own
may use `checkpoint`, `restore` and `branch`, to try several ways from one state and go on from the best.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import math
import re
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, override

from harbor.environments.base import BaseEnvironment, ExecResult, SandboxBuildFailedError
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities
from harbor.environments.definition import require_agent_environment_definition
from harbor.models.task.config import NetworkMode, NetworkPolicy

from coppice import AsyncCheckpoint, AsyncCoppice, AsyncSession, AsyncWorkspace, errors
from coppice._requests import Build, Launch
from coppice.adapters._shielded import shielded

LABEL = "harbor-session"
"""The label of each workspace, with the trial's name."""

PACKAGES = ("debian", "ubuntu", "alpine", "python", "npm", "go", "rust", "ruby", "maven", "github", "gitlab")
"""The bundles that a task with a public network may reach, if nothing else is said."""

SHELL = 'exec "$(command -v bash || command -v sh)" -c "$1"'
SCRIPT = 'exec "$(command -v bash || command -v sh)" "$1"'

MAX_ARGUMENT = 120 << 10
"""A longer command is sent as a file: one argument of a program has at most 128 KiB."""

MAX_OUTPUT = 16 << 20
"""What is kept of each stream of a command: its last bytes."""

REFUSED = 126
"""The exit code of a command that the server or the guest has refused to run, as in a shell."""


class CoppiceEnvironment(BaseEnvironment):
    """One workspace. The property `workspace` gives access to what Harbor has no calls for: the network, previews, grants."""

    def __init__(
        self,
        *args: Any,
        allow: str | Sequence[str] | None = None,
        egress_policy: str | None = None,
        ttl: int = 86400,
        **kwargs: Any,
    ) -> None:
        """The options are those of `--ek`.

        `allow` is what a task with a public network may reach, instead of the bundles in `PACKAGES`. With
        `egress_policy=allow-all` it may reach everything, if the server permits it. A workspace ends after `ttl` seconds.
        """
        self._public = listed(allow)
        self._egress_policy = egress_policy
        self._ttl = ttl
        self._client: AsyncCoppice | None = None
        self._workspace: AsyncWorkspace | None = None
        self._branches: list[AsyncWorkspace] = []
        self._nodes: list[AsyncCheckpoint] = []
        super().__init__(*args, **kwargs)

    @staticmethod
    @override
    def type() -> str:
        return "coppice"

    @property
    @override
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(
            disable_internet=True,
            network_allowlist=True,
            network_allowlist_hostnames=True,
            network_allowlist_wildcard_hostnames=True,
            network_allowlist_ipv4_addresses=True,
            network_allowlist_ipv6_addresses=True,
            # A policy of a workspace stays; the list of what it may reach can change.
            dynamic_network_policy=self._egress_policy != "allow-all",
        )

    @classmethod
    @override
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities(cpu_limit=True, memory_limit=True)

    @override
    def _validate_definition(self) -> None:
        require_agent_environment_definition(self.environment_dir, docker_image=self.task_env_config.docker_image)
        if not (self.environment_dir / "Dockerfile").exists() and not self.task_env_config.docker_image:
            raise ValueError("a workspace is one machine: a task needs a Dockerfile or docker_image, not docker-compose.yaml")

    @property
    def workspace(self) -> AsyncWorkspace:
        if self._workspace is None:
            raise RuntimeError("the environment does not run: start it first")
        return self._workspace

    # -- its life

    @override
    async def start(self, force_build: bool) -> None:
        client = self._client = AsyncCoppice()
        try:
            image = await self._image(client, force_build)
            launch: Launch = {
                "labels": {LABEL: self.session_id[:128]}, "ttl": self._ttl, **self._network(self.network_policy),
            }
            self._workspace = await shielded(client.create(image, **launch), lambda ws: ws.terminate())
            await self.ensure_dirs(self._mount_targets(writable_only=True))
            await self._upload_environment_dir_after_start()
        except BaseException:
            await self.stop(delete=True)
            raise

    async def _image(self, client: AsyncCoppice, force: bool) -> str:
        """The name of the image, which is built if the project does not have it."""
        options: Build = {"labels": {"harbor-task": self.environment_name[:128]}, "no_cache": force}
        if (cpus := self._effective_cpus) is not None:
            options["vcpus"] = int(cpus)
        if (memory := self._effective_memory_mb) is not None:
            options["memory_mib"] = memory
        if (storage := self._effective_storage_mb) is not None:
            options["disk_gib"] = math.ceil(storage / 1024)
        name = image_name(self.environment_name, self.environment_id, f"{cpus} {memory} {storage}")
        dockerfile = self.environment_dir / "Dockerfile"
        if dockerfile.exists():
            options["dockerfile"] = dockerfile.read_text()
        else:
            options["dockerfile"] = f"FROM {self.task_env_config.docker_image}\n"
        async with one_at_a_time(name):
            if not force:
                try:
                    await client.built_image(name)
                    return name
                except errors.NotFoundError:
                    pass
            self.logger.debug(f"Building the image {name}")
            if dockerfile.exists() and any(path != dockerfile for path in self.environment_dir.iterdir()):
                options["context"] = (await client.put_upload(name, self.environment_dir)).id
            try:
                await client.build_image(name, **options)
            except (errors.BuildFailed, errors.DockerfileInvalid) as problem:
                raise SandboxBuildFailedError(str(problem)) from problem
            finally:
                if "context" in options:
                    await client.delete_upload(name)
        return name

    def _network(self, policy: NetworkPolicy) -> Launch:
        """What a workspace may reach."""
        if policy.network_mode == NetworkMode.NO_NETWORK:
            return {"allow": ()}
        if policy.network_mode == NetworkMode.ALLOWLIST:
            return {"allow": tuple(policy.allowed_hosts)}
        if self._egress_policy is not None:
            return {"egress_policy": self._egress_policy, "allow": self._public or ()}
        return {"allow": tuple(f"bundle:{name}" for name in PACKAGES) if self._public is None else self._public}

    @override
    async def _apply_network_policy(self, network_policy: NetworkPolicy) -> None:
        allow = self._network(network_policy)["allow"]
        for ws in (self.workspace, *self._branches):
            await ws.network.allow(allow)

    @override
    async def stop(self, delete: bool) -> None:
        """Ends the workspace and its branches, and deletes its checkpoints without a name.

        Without `delete`, suspends the workspace and keeps the checkpoints.
        """
        client, ws = self._client, self._workspace
        self._client = self._workspace = None
        if client is None:
            return
        try:
            for branch in self._branches:
                await ended(branch)
            if ws is not None:
                await (ended(ws) if delete else shielded(ws.suspend()))
            for node in reversed(self._nodes if delete else []):
                try:
                    await shielded(node.delete())
                except (errors.NotFoundError, errors.ConflictError, errors.PreconditionError):
                    pass  # somebody has deleted it already, or uses it
        finally:
            self._branches.clear()
            self._nodes.clear()
            await shielded(client.aclose())

    # -- several ways from one state

    async def checkpoint(self, name: str | None = None) -> AsyncCheckpoint:
        """Records the whole machine. The checkpoint is deleted with the environment, unless it has a name."""
        node = await shielded(self.workspace.checkpoint(name), lambda node: node.delete())
        if name is None:
            self._nodes.append(node)
        return node

    async def restore(self, node: AsyncCheckpoint | str) -> None:
        """Sets the machine back to a checkpoint: its files, its memory, its programs."""
        await shielded(self.workspace.restore(node))

    @asynccontextmanager
    async def branch(self, count: int, node: AsyncCheckpoint | None = None) -> AsyncIterator[list[CoppiceEnvironment]]:
        """Environments that go on from the present state, or from `node`, at the same time. They end with the block.

        `adopt` gives this environment the state of one of them, and the verifier sees that state.
        """
        start = node or await self.checkpoint()
        forks = await shielded(start.fork(count), lambda forks: forks.__aexit__())
        self._branches.extend(forks)
        try:
            yield [self._with(ws) for ws in forks]
        finally:
            for ws in forks:
                await ended(ws)
                if ws in self._branches:
                    self._branches.remove(ws)

    def _with(self, workspace: AsyncWorkspace) -> CoppiceEnvironment:
        """An environment like this one, with another workspace. `branch` ends that workspace."""
        made = copy.copy(self)
        made._workspace = workspace
        return made

    async def adopt(self, branch: CoppiceEnvironment) -> None:
        """Goes on from the state of a branch. The workspace stays the same."""
        node = await shielded(branch.workspace.checkpoint(), lambda node: node.delete())
        self._nodes.append(node)
        await self.restore(node)

    # -- programs

    @override
    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Runs a command with bash, or with sh in an image without it."""
        who = self._resolve_user(user)
        path = None
        words = ["sh", "-c", SHELL, "sh", command]
        if len(command.encode()) > MAX_ARGUMENT:
            path = f"/tmp/.coppice-{uuid.uuid4().hex}"
            await self.workspace.files.write(path, command, mode=0o644)
            words = ["sh", "-c", SCRIPT, "sh", path]
        try:
            return await self._run(words, cwd, env, timeout_sec, None if who is None else str(who))
        finally:
            if path is not None:
                await shielded(self.workspace.files.remove(path))

    async def _run(
        self, words: list[str], cwd: str | None, env: dict[str, str] | None, timeout: int | None, user: str | None
    ) -> ExecResult:
        try:
            session: AsyncSession = await shielded(
                self.workspace.start(
                    words, cwd=cwd or self.task_env_config.workdir, env=self._merge_env(env), timeout=timeout or None, user=user
                ),
                lambda session: session.delete(),
            )
        except (errors.CommandNotFound, errors.CommandNotStarted, errors.InvalidField, errors.FileNotFound) as problem:
            return ExecResult(stderr=f"{problem.detail}\n", return_code=REFUSED)
        tell = self._output_callback()
        try:
            result = await session.result(
                tell and (lambda text: tell(text, "stdout")), tell and (lambda text: tell(text, "stderr")), limit=MAX_OUTPUT
            )
        except asyncio.CancelledError:
            await shielded(session.delete())  # nothing else would end the program
            raise
        if result.timed_out:
            raise RuntimeError(f"Command timed out after {timeout} seconds")  # as Harbor's own environments
        return ExecResult(stdout=result.stdout, stderr=result.stderr, return_code=result.exit_code)

    # -- files, which root reads and writes

    @override
    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        if not Path(source_path).is_file():
            raise FileNotFoundError(str(source_path))
        await self.workspace.files.upload(source_path, target_path)

    @override
    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        if not Path(source_dir).is_dir():
            raise FileNotFoundError(str(source_dir))
        await self.workspace.files.mkdir(target_dir, parents=True)
        await self.workspace.files.upload(source_dir, target_dir)

    @override
    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        if (await self.workspace.files.stat(source_path)).type == "dir":
            raise IsADirectoryError(source_path)
        Path(target_path).parent.mkdir(parents=True, exist_ok=True)
        await self.workspace.files.download(source_path, target_path)

    @override
    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        if (await self.workspace.files.stat(source_dir)).type != "dir":
            raise NotADirectoryError(source_dir)
        await self.workspace.files.download(source_dir, target_dir)


def listed(allow: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """Entries of a list, or of a text with commas, as `--ek` gives it."""
    if allow is None:
        return None
    return tuple(entry.strip() for entry in allow.split(",") if entry.strip()) if isinstance(allow, str) else tuple(allow)


def image_name(task: str, *parts: str) -> str:
    """The name of the image of a task: another one for each content, and for each size of machine."""
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    readable = re.sub("[^a-z0-9]+", "-", task.rsplit("/", 1)[-1].lower()).strip("-")[:32].strip("-")
    return f"harbor-{readable}-{digest}".replace("--", "-")


async def ended(ws: AsyncWorkspace) -> None:
    try:
        await shielded(ws.terminate())
    except errors.NotFoundError:
        pass


BUILDS: dict[tuple[asyncio.AbstractEventLoop, str], tuple[asyncio.Lock, int]] = {}


@asynccontextmanager
async def one_at_a_time(name: str) -> AsyncIterator[None]:
    """Trials of one task begin together: the first one builds the image."""
    key = (asyncio.get_running_loop(), name)
    lock, users = BUILDS.get(key, (asyncio.Lock(), 0))
    BUILDS[key] = (lock, users + 1)
    try:
        async with lock:
            yield
    finally:
        lock, users = BUILDS.pop(key)
        if users > 1:
            BUILDS[key] = (lock, users - 1)

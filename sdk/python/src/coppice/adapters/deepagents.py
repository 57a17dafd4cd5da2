"""A workspace as the backend of deep agents (the package deepagents, on LangGraph).

    pip install 'coppice[deepagents]'

    with Coppice() as client, client.create("base") as ws:
        agent = create_deep_agent(model="…", backend=CoppiceBackend(ws))

The agent's tools for files and commands work in the workspace. `checkpoint`, `fork` and `restore` are for what drives the
agent: to try several ways from one state, or to go back.
"""

from __future__ import annotations

from coppice import Checkpoint, Workspace, errors
from deepagents.backends.protocol import ExecuteResponse, FileDownloadResponse, FileOperationError, FileUploadResponse
from deepagents.backends.sandbox import BaseSandbox

TIMED_OUT = 124
"""The exit code of a command that was killed after its time, as of timeout(1)."""

REFUSED = 126
"""The exit code of a command that the server or the guest has refused to run, as of a shell."""

MAX_FILE = 256 << 20

# Both streams as one, in the order in which they were written; by bash, if the image has it.
SHELL = 'exec "$(command -v bash || command -v sh)" -c "$1" 2>&1'


class CoppiceBackend(BaseSandbox):
    """The files and the commands of one workspace. Who made the workspace ends it."""

    def __init__(self, workspace: Workspace, *, user: str | None = None, timeout: float | None = 1800) -> None:
        """Commands run as `user`, or as the image's; files are those of `user`, or of root.

        A command that does not say how long it may take gets `timeout` seconds.
        """
        self.workspace = workspace
        self.user = user
        self.timeout = timeout

    @property
    def id(self) -> str:
        return self.workspace.id

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        seconds = self.timeout if timeout is None else timeout or None  # 0 is no limit
        try:
            result = self.workspace.run(["sh", "-c", SHELL, "sh", command], user=self.user, timeout=seconds)
        except errors.APIError as problem:
            if not 400 <= problem.status < 500:
                raise
            return ExecuteResponse(output=str(problem), exit_code=REFUSED)  # such as one that is too long
        output, code = result.stdout, result.exit_code
        if result.timed_out:
            output, code = f"{output}\n(The command was killed after {seconds:g} seconds.)", TIMED_OUT
        return ExecuteResponse(output=output, exit_code=code, truncated=result.stdout_truncated)

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        return [FileUploadResponse(path=path, error=self._upload(path, content)) for path, content in files]

    def _upload(self, path: str, content: bytes) -> FileOperationError | str | None:
        if not path.startswith("/"):
            return "invalid_path"
        try:
            self.workspace.files.write(path, content, user=self.user)
        except errors.CoppiceError as problem:
            return code_of(problem)
        return None

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        return [self._download(path) for path in paths]

    def _download(self, path: str) -> FileDownloadResponse:
        if not path.startswith("/"):
            return FileDownloadResponse(path=path, error="invalid_path")
        files = self.workspace.files
        try:
            if files.stat(path, user=self.user).type == "dir":
                return FileDownloadResponse(path=path, error="is_directory")
            return FileDownloadResponse(path=path, content=files.read(path, limit=MAX_FILE, user=self.user))
        except errors.CoppiceError as problem:
            return FileDownloadResponse(path=path, error=code_of(problem))

    # -- beyond the interface

    def checkpoint(self, name: str | None = None) -> Checkpoint:
        """Records the whole machine. The state of the graph is not in it."""
        return self.workspace.checkpoint(name)

    def restore(self, checkpoint: Checkpoint | str) -> None:
        """Rolls the workspace back."""
        self.workspace.restore(checkpoint)

    def fork(self, count: int) -> list[CoppiceBackend]:
        """Backends over forks of the present state. Who calls this ends them: `backend.workspace.terminate()`."""
        return [CoppiceBackend(ws, user=self.user, timeout=self.timeout) for ws in self.workspace.fork(count)]


def code_of(problem: errors.CoppiceError) -> FileOperationError | str:
    if isinstance(problem, errors.FileNotFound):
        return "file_not_found"
    if isinstance(problem, errors.FileDenied):
        return "permission_denied"
    if isinstance(problem, errors.FileConflict):
        return "is_directory"
    if isinstance(problem, errors.InvalidField):
        return "invalid_path"
    return str(problem)

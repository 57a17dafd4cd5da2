"""What can go wrong, as exceptions."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import models


class CoppiceError(Exception):
    """The base of all exceptions of this package."""


class ConfigurationError(CoppiceError):
    """The client does not know which server to use, or its configuration cannot be read."""


class ConnectionFailedError(CoppiceError):
    """The server could not be reached, or the connection broke off. `__cause__` has the reason."""


class ProtocolError(CoppiceError):
    """The server's answer does not have the form of the contract, or is too large."""


class WaitTimeout(CoppiceError, TimeoutError):  # named like TimeoutError
    """The client has waited as long as it was told to. The work goes on at the server."""

    def __init__(self, message: str, operation_id: str = "") -> None:
        super().__init__(message)
        self.operation_id = operation_id


class OutputLost(CoppiceError):
    """The session no longer keeps bytes that were to be read."""


class UnsafeArchive(CoppiceError):
    """An archive from a guest exceeds its bounds, is broken, or ended early."""


class CommandFailed(CoppiceError):
    """A program ended with another exit code than 0; only with `check=True`."""

    def __init__(self, command: str, result: object, exit_code: int, stderr: str) -> None:
        tail = stderr[-2000:].strip()
        super().__init__(f"{command}: exit code {exit_code}" + (f"\n{tail}" if tail else ""))
        self.result = result
        self.exit_code = exit_code


class APIError(CoppiceError):
    """A refusal of the server, or the failure of an operation.

    Each code has a class of its own in `coppice.errors`, so that `except errors.CheckpointNotFound` works. A code that
    this version does not know is an instance of the class for its status.
    """

    code: str = ""
    hint: str = ""
    """What to do about it."""

    def __init__(
        self,
        detail: str,
        *,
        code: str,
        status: int = 0,
        request_id: str = "",
        operation_id: str = "",
        fields: list[models.FieldProblem] | None = None,
        current_version: int | None = None,
        recover_from: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.code = code
        self.status = status
        """The HTTP status; 0 for an operation that failed after it was accepted, and for a failed child of a fork."""
        self.request_id = request_id
        """The server's log has the cause under this id."""
        self.operation_id = operation_id
        self.fields = fields or []
        self.current_version = current_version
        self.recover_from = recover_from
        self.retry_after = retry_after
        """Seconds after which the server wants to be asked again."""

    def __str__(self) -> str:
        text = f"{self.detail} ({self.code})" if self.detail else self.code
        for f in self.fields:
            text += f"\n  {f.field}: {f.detail}"
        return f"{text}\n  hint: {self.hint}" if self.hint else text


class InvalidError(APIError):
    """The request is wrong."""


class AuthenticationError(APIError):
    """The API key is missing, unknown, expired or revoked."""


class PermissionDeniedError(APIError):
    """The key may not do this."""


class NotFoundError(APIError):
    """There is no such object."""


class ConflictError(APIError):
    """The object has changed meanwhile, or exists already."""


class PreconditionError(APIError):
    """The object is in a state in which this is not possible."""


class ExhaustedError(APIError):
    """A quota, a rate or the capacity is used up."""


class UnavailableError(APIError):
    """A part of the installation is away."""


class ServerError(APIError):
    """The server has a fault, or data is lost."""


def class_for_status(status: int) -> type[APIError]:
    """The class of a code that this version does not know."""
    exact: dict[int, type[APIError]] = {
        401: AuthenticationError,
        403: PermissionDeniedError,
        404: NotFoundError,
        409: ConflictError,
        429: ExhaustedError,
        502: UnavailableError,
        503: UnavailableError,
        504: UnavailableError,
        507: ExhaustedError,
    }
    if status in exact:
        return exact[status]
    return InvalidError if 400 <= status < 500 else ServerError if status >= 500 else APIError

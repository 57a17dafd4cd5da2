"""The exceptions of this package: categories, and one for each code of the API."""

from ._codes import *
from ._codes import BY_CODE as BY_CODE
from ._errors import APIError as APIError
from ._errors import AuthenticationError as AuthenticationError
from ._errors import CommandFailed as CommandFailed
from ._errors import ConfigurationError as ConfigurationError
from ._errors import ConflictError as ConflictError
from ._errors import ConnectionFailedError as ConnectionFailedError
from ._errors import CoppiceError as CoppiceError
from ._errors import ExhaustedError as ExhaustedError
from ._errors import InvalidError as InvalidError
from ._errors import NotFoundError as NotFoundError
from ._errors import OutputLost as OutputLost
from ._errors import PermissionDeniedError as PermissionDeniedError
from ._errors import PreconditionError as PreconditionError
from ._errors import ProtocolError as ProtocolError
from ._errors import ServerError as ServerError
from ._errors import UnavailableError as UnavailableError
from ._errors import UnsafeArchive as UnsafeArchive
from ._errors import WaitTimeout as WaitTimeout

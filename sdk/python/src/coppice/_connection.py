"""Which server to use, and with which key."""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from ._errors import ConfigurationError

# The most bytes that are read of a connection file or a token file.
MAX_FILE = 1 << 20


@dataclass(frozen=True)
class Config:
    """How a client reaches its server. Durations are in seconds."""

    server: str
    token: str = field(default="", repr=False)
    ca_file: str = ""
    user_agent: str = ""
    retries: int = 4
    """How often a call is repeated that may be repeated safely."""
    max_pause: float = 5.0
    """The longest pause between two tries that the client chooses itself."""
    max_retry_after: float = 30.0
    """The longest `Retry-After` that is obeyed. If the server wants a longer pause, its error is raised."""
    connect_timeout: float = 10.0
    read_timeout: float = 90.0
    """How long a server may be silent during a call that does not wait for work."""
    away: float = 60.0
    """How long a server may be away during a wait for an operation or a session."""
    operation_timeout: float = 1800.0
    """How long a call waits for the operation that it started."""

    @property
    def socket(self) -> str:
        """The path of the unix socket, if the server listens on one."""
        parts = urlsplit(self.server)
        return parts.path if parts.scheme == "unix" else ""

    @property
    def base(self) -> str:
        """The URL that paths are appended to."""
        return "http://coppice" if self.socket else self.server.rstrip("/")

    def tls(self) -> ssl.SSLContext | None:
        """What to trust; None for a server in the clear."""
        if urlsplit(self.server).scheme != "https":
            return None
        try:
            return ssl.create_default_context(cafile=self.ca_file or None)
        except OSError as err:
            raise ConfigurationError(f"ca_file {self.ca_file}: {err}") from err


def resolve(
    server: str | None, token: str | None, ca_file: str | None, environment: Mapping[str, str] | None = None
) -> Config:
    """Takes each value from the arguments, else from the environment, else from the file that `coppice dev` left.

    A key from the file is sent only to the server of the file.
    """
    env = os.environ if environment is None else environment
    server = server or env.get("COPPICE_SERVER", "")
    token = token or env.get("COPPICE_TOKEN", "")
    if not token and env.get("COPPICE_TOKEN_FILE"):
        token = read(Path(env["COPPICE_TOKEN_FILE"])).strip()
        if not token:
            raise ConfigurationError(f"COPPICE_TOKEN_FILE: {env['COPPICE_TOKEN_FILE']} is empty")
    if not server or not token:
        saved_server, saved_token = saved(connection_file(env))
        server = server or saved_server
        if not token and server == saved_server:
            token = saved_token
    if not server:
        raise ConfigurationError(
            "no server is configured: start one with `coppice dev`, or give server= and token= "
            "(or set COPPICE_SERVER, and COPPICE_TOKEN or COPPICE_TOKEN_FILE)"
        )
    return checked(Config(server=server, token=token, ca_file=ca_file or env.get("COPPICE_CA_FILE", "")))


def checked(config: Config) -> Config:
    """Refuses an address that is not one. It is not shown: it may have a password in it."""
    try:
        parts = urlsplit(config.server)
        _ = parts.port
    except ValueError:
        raise ConfigurationError("the server's address cannot be read") from None
    unix = parts.scheme == "unix" and not parts.netloc and bool(parts.path)
    http = parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in parts.netloc
    if not unix and not http or parts.query or parts.fragment:
        raise ConfigurationError(
            "the server's address is neither unix:///path nor http(s)://host:port, without a user or a query"
        )
    if any(c < " " or c > "~" for c in config.token):
        raise ConfigurationError("the token has a character that cannot stand in a header")
    return replace(config)


def connection_file(env: Mapping[str, str]) -> Path | None:
    """$COPPICE_CONNECTION, else coppice/connection.json in the user's configuration directory."""
    if env.get("COPPICE_CONNECTION"):
        return Path(env["COPPICE_CONNECTION"])
    base = env.get("XDG_CONFIG_HOME") or (env["HOME"] + "/.config" if env.get("HOME") else "")
    return Path(base) / "coppice" / "connection.json" if base else None


def saved(path: Path | None) -> tuple[str, str]:
    """The server and the key of the connection file; empty if there is none."""
    if path is None or not path.exists():
        return "", ""
    try:
        values = json.loads(read(path))
        return str(values["server"]), str(values.get("token", ""))
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise ConfigurationError(f"{path} is not a connection file: remove it, or start `coppice dev` again") from err


def read(path: Path) -> str:
    try:
        with path.open("rb") as f:
            data = f.read(MAX_FILE + 1)
        if len(data) > MAX_FILE:
            raise ConfigurationError(f"{path} has more than {MAX_FILE} bytes")
        return data.decode()
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigurationError(f"{path}: {err}") from err

"""Which server and which key the client takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from coppice._connection import resolve
from coppice.errors import ConfigurationError

FILE = {"server": "http://127.0.0.1:7070", "token": "from-file"}


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "coppice").mkdir()
    (tmp_path / "coppice/connection.json").write_text(json.dumps(FILE))
    return {"XDG_CONFIG_HOME": str(tmp_path)}


def test_the_file_of_coppice_dev(env: dict[str, str]) -> None:
    got = resolve(None, None, None, env)
    assert (got.server, got.token) == ("http://127.0.0.1:7070", "from-file")


def test_the_environment_comes_before_the_file(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "t").write_text("from-token-file\n")
    env |= {"COPPICE_SERVER": "https://a.example", "COPPICE_TOKEN_FILE": str(tmp_path / "t")}
    assert resolve(None, None, None, env).token == "from-token-file"
    env["COPPICE_TOKEN"] = "from-env"
    assert resolve(None, None, None, env).token == "from-env"
    assert resolve("http://b.example", "argument", None, env).token == "argument"


def test_a_key_of_the_file_goes_to_no_other_server(env: dict[str, str]) -> None:
    assert resolve("http://other.example", None, None, env).token == ""


def test_no_server() -> None:
    with pytest.raises(ConfigurationError, match="coppice dev"):
        resolve(None, None, None, {})


@pytest.mark.parametrize("text", ["", "[]", "{}", "no", '{"server": "http://x"', "null", "5"])
def test_a_broken_file(env: dict[str, str], text: str) -> None:
    (Path(env["XDG_CONFIG_HOME"]) / "coppice/connection.json").write_text(text)
    with pytest.raises(ConfigurationError):
        resolve(None, None, None, env)


@pytest.mark.parametrize(
    "server",
    ["example.com", "ftp://x", "http://", "http://user:word@x", "http://x?y", "unix://relative", "http://x:port", "http://[", "file:///x"],
)
def test_a_wrong_address_is_not_shown(server: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        resolve(server, "t", None, {})
    assert "word" not in str(caught.value)


@pytest.mark.parametrize("token", ["a\nb", "a\r\nx-header: y", "ü"])
def test_a_token_that_is_no_header(token: str) -> None:
    with pytest.raises(ConfigurationError):
        resolve("http://x", token, None, {})


def test_a_unix_socket() -> None:
    got = resolve("unix:///run/coppice/api.sock", "t", None, {})
    assert (got.socket, got.base) == ("/run/coppice/api.sock", "http://coppice")

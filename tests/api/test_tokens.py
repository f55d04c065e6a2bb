"""Tokens, which the SDK and its command line get in exchange for keys."""

from __future__ import annotations

import base64
import hmac
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import jwt
import pytest
import tinker
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from tests.api.conftest import BASE, Running
from tests.api.test_futures import calls_of
from tests.compat.cli import Cli
from tinker.cli.__main__ import main_cli

from tinkerflow.api.identity import REMEMBERED_SECONDS
from tinkerflow.api.tokens import TOKEN_LIFETIME, BadTokenError, Claims, read_token, sign_token
from tinkerflow.backend.core.errors import NotFoundError

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SECRET = bytes(range(32))
CLAIMS = Claims("key-1", "team", "laptop", NOW + TOKEN_LIFETIME)


def test_token_returns_its_signed_claims_until_it_expires() -> None:
    token = sign_token(CLAIMS, SECRET, NOW)
    assert token.startswith("eyJ")
    assert read_token(token, SECRET, NOW + timedelta(minutes=59, seconds=59)) == CLAIMS
    with pytest.raises(BadTokenError, match="expired"):
        read_token(token, SECRET, CLAIMS.expires)
    with pytest.raises(BadTokenError, match="signature"):
        read_token(token, bytes(32), NOW)


@given(st.data())
def test_changed_tokens_are_refused(data: Any) -> None:
    token = sign_token(CLAIMS, SECRET, NOW)
    at = data.draw(st.integers(0, len(token) - 1))
    other = data.draw(st.sampled_from("ABCabc012_-.").filter(lambda c: c != token[at]))
    with pytest.raises(BadTokenError):
        read_token(token[:at] + other + token[at + 1 :], SECRET, NOW)


@given(st.text(max_size=60))
def test_arbitrary_tokens_are_refused(text: str) -> None:
    with pytest.raises(BadTokenError):
        read_token("eyJ" + text, SECRET, NOW)


@pytest.mark.filterwarnings("ignore::jwt.warnings.InsecureKeyLengthWarning")
def test_other_signature_algorithms_are_refused() -> None:
    said = jwt.decode(sign_token(CLAIMS, SECRET, NOW), SECRET, ["HS256"], options={"verify_exp": False})
    unsigned = jwt.encode(said, None, "none")
    header, body, _ = unsigned.split(".")
    of_ours = base64.urlsafe_b64encode(hmac.digest(SECRET, f"{header}.{body}".encode(), "sha256")).decode().rstrip("=")
    for token in (unsigned, f"{header}.{body}.{of_ours}", jwt.encode(said, SECRET, "HS512")):
        with pytest.raises(BadTokenError):
            read_token(token, SECRET, NOW)


def test_tokens_signed_before_pyjwt_was_used_are_valid() -> None:
    header, signature = "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9", "PSE3PWX1zmznyUth5XYbgrV8Qi4wDpX9yyFXXzaY4eM"
    body = (
        "eyJpc3MiOiJ0aW5rZXJmbG93Iiwic3ViIjoidG1sOnVzZXI6a2V5LTEiLCJrZXlfaWQiOiJrZXktMSIsIm9yZ19pZC"
        "I6InRlYW0iLCJlbWFpbCI6ImxhcHRvcCIsImlhdCI6MTc2NzIyNTYwMCwiZXhwIjoxNzY3MjI5MjAwfQ"
    )
    assert read_token(f"{header}.{body}.{signature}", SECRET, NOW) == CLAIMS


def exchanged(server: Running, key: str) -> str:
    return str(server.post("auth/token", {}, key).json()["jwt"])


def test_token_opens_the_project_of_its_key_until_it_expires(server: Running, journal: Any) -> None:
    _, secret = journal.keys.create("laptop", "team")
    server.clock.advance(1.0)
    token = exchanged(server, secret)
    session = server.session(token)
    assert journal.sessions.get(session, "team").owner == "team"
    with pytest.raises(NotFoundError):
        journal.sessions.get(session, "other")
    server.clock.advance(1800)
    later = exchanged(server, token)  # renewal works, but does not extend the lifetime
    server.clock.advance(1800)
    for one in (token, later):
        refused = server.get("sessions", one)
        assert refused.status_code == 401
        assert 'error="invalid_token"' in refused.headers["WWW-Authenticate"]
    assert "WWW-Authenticate" not in server.get("sessions", "tml-wrong").headers
    assert server.get("sessions", secret).status_code == 200


def test_tokens_end_with_their_revoked_key(server: Running, journal: Any) -> None:
    key, secret = journal.keys.create("laptop", "team")
    server.clock.advance(1.0)
    token = exchanged(server, secret)
    assert server.get("sessions", token).status_code == 200
    journal.keys.revoke(key.id)
    server.clock.advance(REMEMBERED_SECONDS)
    refused = server.get("sessions", token)
    assert (refused.status_code, "revoked" in refused.json()["detail"]) == (401, True)
    assert "invalid_token" in refused.headers["WWW-Authenticate"]


def test_key_may_revoke_itself(server: Running, journal: Any) -> None:
    assert server.http.delete(f"{server.url}/api/v1/auth/apikey/me", headers={"X-API-Key": "tml-x"}).status_code == 400
    _, secret = journal.keys.create("laptop", "team")
    _, other = journal.keys.create("other", "team")
    server.clock.advance(1.0)
    token = exchanged(server, secret)
    me = server.get("auth/apikey/me", secret).json()
    assert me["key_id"] == server.get("auth/apikey/me", token).json()["key_id"] > 0
    details = {"org_details": {"name": "team"}, "user_details": {"email": "laptop"}}
    assert me == {"key_id": me["key_id"], "name": "laptop", "note": "", "details": details}
    assert server.http.delete(f"{server.url}/api/v1/auth/apikey/me", headers={"X-API-Key": secret}).is_success
    assert [server.get("sessions", one).status_code for one in (secret, token, other)] == [401, 401, 200]


def test_tokens_of_an_open_server_end_when_a_key_is_created(server: Running, journal: Any) -> None:
    token = exchanged(server, "tml-any")
    assert server.get("sessions", token).status_code == 200
    journal.keys.create("first", "team")
    server.clock.advance(1.0)
    assert server.get("sessions", token).status_code == 401


def test_sdk_exchanges_its_key_again_after_a_refused_token(server: Running, engine: Any, journal: Any) -> None:
    _, secret = journal.keys.create("laptop", "team")
    server.clock.advance(1.0)
    seen = calls_of(server)
    with tinker.ServiceClient(base_url=server.url, api_key=secret) as service:
        training = service.create_lora_training_client(BASE, rank=4).result()
        training.optim_step(tinker.AdamParams()).result()
        before = seen.count("auth/token")
        server.clock.advance(7200)  # the server's clock is ahead, so tokens expire before the SDK renews them
        training.optim_step(tinker.AdamParams()).result()
        assert seen.count("auth/token") == before + 1
    assert before <= 2  # one token for each of the SDK's two connection holders


@pytest.mark.parametrize(("name", "project"), [("local", "local"), ("laptop", "team")])
def test_cli_logs_in_and_shows_its_identity(
    server: Running, journal: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, project: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TINKER_BASE_URL", server.url)
    monkeypatch.delenv("TINKER_API_KEY")
    run, secret = CliRunner().invoke, "tml-any"
    if name != "local":
        _, secret = journal.keys.create(name, project)
        server.clock.advance(1.0)
        assert run(main_cli, ["auth", "login"], input="tml-wrong\n").exit_code != 0
    login = run(main_cli, ["auth", "login"], input=f"{secret}\n")
    assert f"Logged in as {name} ({project})" in login.output, login.output
    assert "Tinker accessible: yes" in run(main_cli, ["auth", "status"]).output
    # In a process of its own: the SDK keeps one connection, with its token, for all RestClients of a process.
    whoami = Cli(server.url, tmp_path, key="", own_process=True).json("auth", "whoami")
    assert (whoami["org_urn"], whoami["email"]) == (f"tml:organization:{project}", name)
    assert "Removed credential" in run(main_cli, ["auth", "logout"]).output

"""The Host check of all routes. Links and redirects never depend on headers of strangers."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from starlette.datastructures import Headers
from tests.api.conftest import KEY, Running

from tinkerflow.api.hosts import same_site
from tinkerflow.backend.core.hosts import host_name, is_loopback
from tinkerflow.backend.journal import Journal

FOREIGN = [
    "evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "10.0.0.7", "0.0.0.0",
    "[2001:db8::1]", "user@localhost", "localhost/..", "local host", "a,localhost", "",
]  # fmt: skip
OWN = ["localhost", "LOCALHOST:1", "localhost.", "127.0.0.1", "127.9.9.9:80", "[::1]:8000"]
PATHS = ["/", "/openapi.json", "/api/v1/healthz", "/api/v1/sessions", "/v1/models", "/keys", "/console/console.css"]


def get(server: Running, path: str, host: str, **headers: str) -> Any:
    sent = {"Host": host, "X-API-Key": KEY, **{name.replace("_", "-"): value for name, value in headers.items()}}
    return server.http.get(f"{server.url}{path}", headers=sent)


@pytest.mark.parametrize("path", PATHS)
def test_server_without_keys_answers_only_to_host_names_of_its_machine(server: Running, path: str) -> None:
    for host in FOREIGN:
        answer = get(server, path, host)
        assert answer.status_code in (400, 403), (host, answer.status_code)
        assert "base_model" not in answer.text
    for host in OWN:
        assert get(server, path, host).status_code == 200, host
    assert get(server, path, "localhost", X_Forwarded_Host="evil.example").status_code == 200
    for hosts in ("", "Host: localhost\r\nHost: evil.example\r\n"):
        with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as connection:
            connection.sendall(f"GET {path} HTTP/1.1\r\n{hosts}X-API-Key: {KEY}\r\n\r\n".encode())
            assert connection.recv(2**16).split()[1] in (b"400", b"403")


def test_allowed_hosts_and_public_url_name_further_hosts(start: Any, journal: Journal) -> None:
    server = start(public_url="https://tune.example/base", allowed_hosts=("gpu-box", "Other.Example."))
    for host in ("tune.example", "gpu-box:8000", "other.example", "localhost"):
        assert get(server, "/api/v1/sessions", host).status_code == 200
    assert get(server, "/api/v1/sessions", "evil.example").status_code == 403
    journal.keys.create("someone", "ann")
    server.clock.advance(2)
    assert get(server, "/api/v1/healthz", "10.0.0.7").status_code == 200, "an address has no name to rebind"
    assert get(server, "/api/v1/healthz", "evil.example").status_code == 403, "allowed_hosts hold with keys, too"
    assert get(start(allowed_hosts=("*",)), "/api/v1/healthz", "any.example").status_code == 200


def test_server_with_keys_answers_to_all_host_names(start: Any, journal: Journal) -> None:
    _, key = journal.keys.create("someone", "ann")
    server = start()
    assert get(server, "/v1/models", "gpu-box:8000", X_API_Key=key).status_code == 200
    assert get(server, "/v1/models", "gpu-box:8000").status_code == 401


def test_redirects_and_links_ignore_forwarded_headers(start: Any, journal: Journal) -> None:
    _, key = journal.keys.create("someone", "ann")
    server = start()
    evil = {"X_API_Key": key, "X_Forwarded_Host": "evil.example", "Forwarded": "host=evil.example"}
    for path in ("/api/v1/healthz/?a=b", "//evil.example/"):
        answer = get(server, path, "evil.example", **evil)
        assert answer.status_code in (307, 404)
        assert "evil" not in answer.headers.get("location", "")
    assert get(server, "/api/v1/healthz/?a=b", "localhost").headers["location"] == "/api/v1/healthz?a=b"
    session = server.session(key)
    path = f"/api/v1/sessions/{session}/trace_export"
    assert "evil" not in get(server, path, "localhost:80", **evil).text
    public = start(public_url="https://tune.example/base")
    assert get(public, path, "evil.example", **evil).json()["url"].startswith("https://tune.example/base/api/v1/")
    assert get(public, "/api/v1/healthz/", "a").headers["location"] == "/base/api/v1/healthz"


@pytest.mark.parametrize(
    "headers", [{"Origin": "https://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}]
)
def test_cross_site_pages_change_nothing_on_a_server_without_keys(server: Running, headers: dict[str, str]) -> None:
    sent = {"X-API-Key": KEY, **headers}
    for path in ("/api/v1/create_session", "/v1/chat/completions", "/sign-out", "/sign-in", "/keys"):
        answer = server.http.post(f"{server.url}{path}", content=b"{}", headers=sent)
        assert answer.status_code == 403 and "another site" in answer.text
    assert server.get("sessions").json()["sessions"] == []
    own = {"X-API-Key": KEY, "Origin": server.url, "Sec-Fetch-Site": "same-origin"}
    created = server.http.post(f"{server.url}/api/v1/create_session", content=b'{"sdk_version": "0"}', headers=own)
    assert created.status_code == 200


def test_names_in_headers() -> None:
    assert host_name("Box.:80") == "box" and host_name("[::1]") == "::1"
    assert host_name("a b") == host_name("user@box") == host_name("") == ""
    hosts = ("127.0.0.1", "::1", "localhost", "0.0.0.0", "10.0.0.1", "box", "")
    assert [is_loopback(host) for host in hosts] == [True] * 3 + [False] * 4
    assert same_site(Headers({"host": "a:1", "origin": "http://a:1"}), "") and same_site(Headers({}), "")
    for origin in ("http://a:2", "http://[a:1", "null", ""):
        assert not same_site(Headers({"host": "a:1", "origin": origin}), "")

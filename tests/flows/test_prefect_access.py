"""The embedded Prefect server refuses requests without its credential, and foreign host names and origins."""

from __future__ import annotations

import base64
import json
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefect.client.orchestration import get_client
from prefect.events import Event, Resource
from prefect.events.clients import PrefectEventsClient
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_API_URL,
    PREFECT_CLOUD_API_URL,
    PREFECT_UI_URL,
    temporary_settings,
)
from prefect_server import prefect_http
from starlette.routing import WebSocketRoute
from websockets.asyncio.client import connect as websocket
from websockets.exceptions import ConnectionClosed, InvalidStatus

from tinkerflow.backend.core.prefect_access import (
    LINK_SECONDS,
    SIGN_IN_PATH,
    PrefectAccess,
    find_server,
    forget_server,
    is_valid_ticket,
    last_port,
    make_credential,
    record_port,
    record_server,
    server_for_clients,
)
from tinkerflow.flows.prefect.guard import GuardedApp
from tinkerflow.flows.prefect.server import PrefectServer, listen

pytestmark = [
    pytest.mark.usefixtures("collected_connections"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

FOREIGN_HOSTS = (
    "evil.example",
    "evil.example:4200",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "10.0.0.1",
    "",
)
FOREIGN_ORIGINS = (
    "http://evil.example",
    "https://evil.example:4200",
    "http://localhost:1",
    "null",
    "file://",
    "http://[",
)
OPEN_PATHS = {"/health", "/ready"}  # probes, which only answer `true`


def rest_operations() -> list[tuple[str, str]]:
    """Every method and path of Prefect's REST API."""
    from prefect.server.api.server import create_api_app  # here, because the import takes seconds

    paths = create_api_app().openapi()["paths"]
    return [(method, path) for path, methods in paths.items() for method in methods]


def websocket_paths() -> list[str]:
    from prefect.server.api.server import create_api_app

    def of(routes: Any) -> Iterator[str]:
        for route in routes:
            if isinstance(route, WebSocketRoute):
                yield route.path
            elif (router := getattr(route, "original_router", None)) is not None:
                yield from of(router.routes)

    return sorted(set(of(create_api_app().routes)))


async def test_operations_require_the_credential(server: PrefectServer) -> None:
    operations = rest_operations()
    assert len(operations) > 150
    wrong = ("", "tinkerflow:wrong", "tinkerflow:", "x:y")
    async with prefect_http(server.access.api_url, "") as http:
        answers = {
            (method, path, credential): await http.request(
                method,
                path,
                json={} if method in ("post", "put", "patch") else None,
                headers={"Authorization": f"Basic {base64.b64encode(credential.encode()).decode()}"}
                if credential
                else {},
            )
            for method, path in operations
            if path not in OPEN_PATHS
            for credential in (wrong if path == "/flows/filter" else wrong[:1])
        }
        assert {key: answer.status_code for key, answer in answers.items() if answer.status_code != 401} == {}
        for path in OPEN_PATHS:
            assert (await http.get(path)).json() in (True, {"message": "OK"})


@pytest.mark.parametrize("path", ["/api/flows/filter", "/api/health", "/", "/runs", "/ui-settings", SIGN_IN_PATH])
async def test_foreign_host_names_and_origins_are_refused(server: PrefectServer, path: str) -> None:
    headers = [{"Host": host} for host in FOREIGN_HOSTS] + [{"Origin": origin} for origin in FOREIGN_ORIGINS]
    async with prefect_http(server.access.api_url.removesuffix("/api"), server.access.credential) as http:
        for foreign in headers:
            for method in ("GET", "POST", "OPTIONS"):
                answer = await http.request(method, path, headers=foreign)
                assert (answer.status_code, "server" in answer.text) == (403, True), (foreign, method)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:9", "[::1]:4200", "LOCALHOST:80"])
async def test_host_names_of_this_machine_are_accepted_through_a_tunnel(server: PrefectServer, host: str) -> None:
    async with prefect_http(server.access.api_url, server.access.credential) as http:
        answer = await http.post("/flows/filter", json={}, headers={"Host": host, "Origin": f"http://{host.lower()}"})
    assert answer.status_code == 200
    assert answer.headers["x-frame-options"] == "SAMEORIGIN"
    assert answer.headers["content-security-policy"] == "frame-ancestors 'self'"


async def test_websockets_need_the_credential_and_the_same_origin(server: PrefectServer) -> None:
    paths = websocket_paths()
    assert {"/events/in", "/events/out", "/logs/out"} <= set(paths)
    base = server.access.api_url.replace("http://", "ws://")
    for path in paths:
        for foreign in ({"origin": "http://evil.example"}, {"additional_headers": {"Host": "evil.example"}}):
            with pytest.raises(InvalidStatus, match="403"):
                async with websocket(base + path, **foreign):  # type: ignore[arg-type]
                    pass
        for auth in ({}, {"token": None}, {"token": "tinkerflow:wrong"}):
            with pytest.raises((ConnectionClosed, InvalidStatus)):
                async with websocket(base + path, subprotocols=["prefect"]) as channel:  # type: ignore[list-item]
                    await channel.send(json.dumps({"type": "auth", **auth}))
                    while "auth_success" not in str(await channel.recv()):
                        pass
                    pytest.fail(f"{path} accepted {auth}")
        with pytest.raises((ConnectionClosed, InvalidStatus)):
            async with websocket(base + path) as channel:  # old versions of clients send no credential
                await channel.recv()


async def test_prefect_clients_read_the_credential_from_their_settings(server: PrefectServer) -> None:
    with temporary_settings(
        {PREFECT_API_URL: server.access.api_url, PREFECT_API_AUTH_STRING: server.access.credential}
    ):
        async with get_client() as client:
            assert isinstance(await client.read_flows(), list)
            settings = await client.request("GET", "/admin/settings")
        resource = Resource({"prefect.resource.id": "tinkerflow.test"})
        async with PrefectEventsClient() as events:
            await events.emit(Event(event="tinkerflow.test", resource=resource))
    assert server.access.credential.partition(":")[2] not in settings.text


async def test_a_ticket_is_exchanged_for_the_credential_until_it_expires(server: PrefectServer) -> None:
    access = find_server(server.data_dir)
    assert access is not None and access.api_url == server.access.api_url
    link, _, ticket = access.link("/runs/flow-run/1", time.time()).partition("#")
    assert link == f"{access.pages_url}{SIGN_IN_PATH}?to=/runs/flow-run/1"
    async with prefect_http(access.pages_url, "") as http:
        page = await http.get(SIGN_IN_PATH)
        assert page.status_code == 200 and server.access.credential not in page.text
        assert page.headers["cache-control"] == "no-store" and page.headers["referrer-policy"] == "no-referrer"
        answer = await http.post(SIGN_IN_PATH, content=ticket)
        assert base64.b64decode(answer.text).decode() == server.access.credential
        late = access.link("/", time.time() - LINK_SECONDS).partition("#")[2]
        forged = PrefectAccess("", "tinkerflow:other", "").link("/", time.time()).partition("#")[2]
        later = f"{int(ticket.partition('.')[0]) + 1}.{ticket.partition('.')[2]}"
        for wrong in ("", ".", "x", late, forged, later, f"{ticket}0", f"é{ticket}", "9" * 500, f"{ticket}\n"):
            answer = await http.post(SIGN_IN_PATH, content=wrong.encode())
            assert answer.status_code == 403 and server.access.credential not in answer.text


def test_a_ticket_holds_for_an_hour() -> None:
    ticket = PrefectAccess("", "tinkerflow:a", "").link("/", 1000.0).partition("#")[2]
    assert is_valid_ticket("tinkerflow:a", ticket, 1000.0) and is_valid_ticket("tinkerflow:a", ticket, 4599.0)
    assert not is_valid_ticket("tinkerflow:a", ticket, 4600.0) and not is_valid_ticket("tinkerflow:b", ticket, 1000.0)


def test_files_of_the_prefect_server_are_private_to_its_owner(server: PrefectServer) -> None:
    folder = server.data_dir / "prefect"
    files = [file for file in folder.rglob("*") if (folder / "ui") not in file.parents and file != folder / "ui"]
    assert {"credential", "server.json", "prefect.db"} <= {file.name for file in files}
    assert {file: mode for file in (folder, *files) if (mode := stat.S_IMODE(file.stat().st_mode)) & 0o077} == {}
    arguments = Path(f"/proc/{server.process.pid}/cmdline").read_bytes().decode()
    assert server.access.credential.partition(":")[2] not in arguments


def test_the_credential_is_made_once(tmp_path: Path) -> None:
    credential = make_credential(tmp_path)
    assert make_credential(tmp_path) == credential
    assert len(credential.partition(":")[2]) >= 40 and make_credential(tmp_path / "other") != credential
    assert [file.name for file in (tmp_path / "prefect").iterdir()] == ["credential"]


def test_clients_send_the_credential_only_to_the_server_of_their_data_dir(tmp_path: Path) -> None:
    make_credential(tmp_path)
    assert find_server(tmp_path) is None and server_for_clients(tmp_path, {}) is None
    record_server(tmp_path, 4200, os.getpid(), "https://prefect.example/")
    access = find_server(tmp_path)
    assert access is not None and access.api_url == "http://127.0.0.1:4200/api"
    assert access.link("/", 0).startswith(f"https://prefect.example{SIGN_IN_PATH}#")
    assert server_for_clients(tmp_path, {}) == access
    for url in ("http://127.0.0.1:4200/api", "http://localhost:4200/api/"):
        assert server_for_clients(tmp_path, {"PREFECT_API_URL": url}) == access
    for url in ("http://127.0.0.1:4201/api", "http://evil.example:4200/api", "https://app.prefect.cloud/api"):
        for its_own in ({}, {"PREFECT_API_AUTH_STRING": "its:own"}):
            other = server_for_clients(tmp_path, {"PREFECT_API_URL": url} | its_own)
            pages = url.removesuffix("/api")
            assert other is not None
            assert other.environment == {"PREFECT_API_URL": url, "PREFECT_UI_URL": pages} | its_own
            assert other.link("/runs", 0) == f"{url.removesuffix('/api')}/runs"
            assert bool(other.headers) is bool(its_own)
    forget_server(tmp_path, os.getpid() + 1)  # an earlier server ends late
    assert find_server(tmp_path) is not None
    forget_server(tmp_path, os.getpid())
    assert find_server(tmp_path) is None


@pytest.mark.parametrize(
    "api",
    [
        *("https://api.prefect.cloud/api/accounts/a/workspaces/w", "https://prefect.example/api/"),
        *("https://api.stg.prefect.dev/api/accounts/a/workspaces/w", "http://prefect:4200/below/api"),
    ],
)
def test_pages_of_a_server_are_those_that_prefect_derives(tmp_path: Path, api: str) -> None:
    server = server_for_clients(tmp_path, {"PREFECT_API_URL": api})
    cloud = f"https://api.{'stg.prefect.dev' if 'stg' in api else 'prefect.cloud'}/api"
    with temporary_settings({PREFECT_API_URL: api, PREFECT_CLOUD_API_URL: cloud}):
        assert server is not None and server.pages_url == str(PREFECT_UI_URL.value()).rstrip("/")
    named = server_for_clients(tmp_path, {"PREFECT_API_URL": api, "PREFECT_UI_URL": "https://pages.example/"})
    assert named is not None and named.link("/runs", 0) == "https://pages.example/runs"


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"port": 1}', '{"port": 1, "process": "{}", "public_url": ""}'])
def test_server_record_of_a_dead_process_is_ignored(tmp_path: Path, content: str) -> None:
    make_credential(tmp_path)
    (tmp_path / "prefect" / "server.json").write_text(content)
    assert find_server(tmp_path) is None
    record_server(tmp_path, 4200, os.getpid())
    noted = (tmp_path / "prefect" / "server.json").read_text()
    (tmp_path / "prefect" / "server.json").write_text(noted.replace(r"\"birth\": \"", r"\"birth\": \"9"))
    assert find_server(tmp_path) is None


async def test_occupied_port_is_left_to_its_program(caplog: pytest.LogCaptureFixture) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as other, closing(await listen(other.getsockname()[1])) as own:
        taken, free = (listener.getsockname()[1] for listener in (other, own))
    assert free != taken
    assert f"port {taken} is in use: the Prefect server listens on port {free}" in caplog.text


async def test_next_start_reuses_the_last_port_by_default(tmp_path: Path) -> None:
    make_credential(tmp_path)
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        wanted = other.getsockname()[1]
        assert last_port(tmp_path, wanted) == wanted
        with closing(await listen(last_port(tmp_path, wanted), wanted)) as first:
            record_port(tmp_path, wanted, last := first.getsockname()[1])
        with closing(await listen(last_port(tmp_path, wanted), wanted)) as second:
            assert second.getsockname()[1] == last != wanted
    assert last_port(tmp_path, wanted + 1) == wanted + 1
    (tmp_path / "prefect" / "port.json").write_text("[]")
    assert last_port(tmp_path, wanted) == wanted


async def test_configured_proxy_host_and_origin_are_accepted() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"prefect"})

    guarded = GuardedApp(app, "a:b", "https://prefect.example")
    transport = httpx.ASGITransport(guarded)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://prefect.example") as http:
        for headers, status in (
            ({}, 200),
            ({"Origin": "https://prefect.example"}, 200),
            ({"Host": "127.0.0.1:4200", "Origin": "https://prefect.example"}, 200),
            ({"Origin": "https://other.example"}, 403),
            ({"Host": "other.example"}, 403),
        ):
            assert (await http.get("/", headers=headers)).status_code == status, headers

"""Connections without an accepted key: limits on their time, size and number."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.client import HTTPResponse
from typing import Any

import pytest
from tests.api.conftest import KEY, Running

from tinkerflow.api import connections
from tinkerflow.api.connections import address_group
from tinkerflow.api.identity import Authenticator

HEAD = f"POST /api/v1/create_session HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {KEY}\r\n"
Connect = Callable[..., socket.socket]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timeouts and limits that are small enough for a test."""
    monkeypatch.setattr(connections, "_SECOND", 0.05)
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.2)
    monkeypatch.setattr(connections, "BODY_SECONDS", 0.2)
    monkeypatch.setattr(connections, "STRANGERS", 5)


@pytest.fixture
def connect(quick: None, server: Running) -> Iterator[Connect]:
    """Opens a connection to the server and sends the given text."""
    with contextlib.ExitStack() as stack:

        def begin(text: str = "") -> socket.socket:
            port = int(server.url.rsplit(":", 1)[1])
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
            connection.sendall(text.encode())
            return connection

        yield begin


def answer_of(connection: socket.socket) -> bytes:
    """Read one answer to its end, because its body may arrive after its head, and return its status."""
    answer = HTTPResponse(connection)
    answer.begin()
    answer.read()
    return f"{answer.status} {answer.reason}".encode()


def end_of(connection: socket.socket) -> bytes:
    """Everything that the server sends until it closes the connection."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(2**16):
            received += part
    return received


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        ("", b""),
        ("GET / HTTP/1.1\r\nHost: a", b"408"),
        (HEAD, b"408"),
        (HEAD + "Content-Length: 100\r\n\r\nhalf", b"408"),
        (HEAD + "Transfer-Encoding: chunked\r\n\r\n5\r\nhalf.\r\n", b"408"),
        ("GET / HTTP/1.1\r\nX: " + "x" * 2**17, b"431"),
        ("GET / HTTP/1.1\r\nHost: localhost\r\nX: " + "x" * 2**16 + "\r\n\r\n", b"431"),
        ("x", b""),
    ],
    ids=[
        "nothing",
        "half a line",
        "half the headers",
        "half a body",
        "a chunk",
        "long headers",
        "all of it",
        "no HTTP",
    ],
)
def test_unfinished_request_times_out(connect: Connect, sent: str, answer: bytes) -> None:
    assert answer in end_of(connect(sent)).split(b"\r\n")[0]


def test_empty_lines_between_requests_are_limited(connect: Connect) -> None:
    client = connect("GET /api/v1/healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert b"200 OK" in answer_of(client)
    client.sendall(b"\r\n" * 2**16)
    assert end_of(client) == b""


def test_answered_request_ends_although_its_body_goes_on(connect: Connect) -> None:
    refused = HEAD.replace(KEY, "wrong") + "Content-Length: 100\r\n\r\nhalf"
    assert end_of(connect(refused)).count(b"HTTP/1.1") == 1


def test_idle_connections_without_a_key_are_closed_sooner(connect: Connect) -> None:
    stranger, client = connect("GET /api/v1/healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"), connect()
    ask = f"GET /api/v1/sessions HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {KEY}\r\n\r\n".encode()
    client.sendall(ask)
    assert b"200 OK" in answer_of(client)
    assert b"200 OK" in end_of(stranger)
    client.sendall(ask)
    assert b"200 OK" in answer_of(client), "its connection outlived the stranger's"


def test_oldest_connections_without_a_key_are_closed_first(
    connect: Connect, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEADER_SECONDS", 60)
    opened = [connect(HEAD) for _ in range(20)]
    for connection in opened[:15]:
        assert end_of(connection) == b""
    for connection in opened[15:]:
        connection.sendall(b"Content-Length: 19\r\n\r\n" + b'{"sdk_version":"0"}')
        assert b"200 OK" in answer_of(connection)
    assert server.session()


def test_connections_with_a_key_check_in_progress_are_kept(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADER_SECONDS", 60)
    begun, checked, identity = threading.Semaphore(0), threading.Event(), Authenticator.identity

    async def slow_identity(*args: Any) -> Any:
        begun.release()
        await asyncio.to_thread(checked.wait)
        return await identity(*args)

    monkeypatch.setattr(Authenticator, "identity", slow_identity)
    working = []
    for _ in range(20):
        working.append(connect(HEAD + "Content-Length: 19\r\n\r\n" + '{"sdk_version":"0"}'))
        assert begun.acquire(timeout=30), "its key is being checked before the next one comes"
    excess = [connect(HEAD) for _ in range(6)]
    assert end_of(excess[0]) == b"", "the bound was applied"
    checked.set()
    assert all(b"200 OK" in answer_of(connection) for connection in working)


def test_a_client_that_does_not_read_its_answer_is_cut_off(
    connect: Connect, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "WRITE_SECONDS", 0.2)
    connection = connect()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**12)
    many = "GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 400
    connection.sendall(many.encode())
    deadline = time.monotonic() + 30
    serving: Any = server
    while time.monotonic() < deadline:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            connection.send(b"x", socket.MSG_DONTWAIT)
            time.sleep(0.05)
            continue
        break
    assert time.monotonic() < deadline and serving.session()


def test_connection_bounds_cover_the_network_of_an_ipv6_address() -> None:
    assert address_group("2001:db8::1") == address_group("2001:db8::ffff:1") == "2001:db8::/64"
    assert address_group("::ffff:10.1.2.3") == address_group("10.1.2.3") == "10.1.2.3"
    assert address_group("testclient") == "testclient"

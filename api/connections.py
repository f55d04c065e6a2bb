"""HTTP connections, with limits on slow clients and on clients without an accepted key.

`Connection` is uvicorn's protocol with clocks. A client must send the headers of a request within HEADER_SECONDS, and
its body at an average of BODY_RATE. Only the time in which the server waits for the client counts. A client that does
not read its answer is disconnected after WRITE_SECONDS. A connection without an accepted key belongs to a stranger and
may not be idle for long. An address may hold STRANGERS such connections; beyond that, the oldest ones are closed.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, cast

from fastapi import Request
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

log = logging.getLogger(__name__)

HEADER_SECONDS = 10
HEADER_BYTES = 2**16
BODY_SECONDS = 30  # extra time for a body of any size, in addition to its bytes at BODY_RATE
BODY_RATE = 2**13  # bytes per second
WRITE_SECONDS = 120
STRANGERS = 256
_UNREAD_BYTES = 2**30  # bytes of a body that arrive after its answer; beyond them, the connection is closed
_SECOND = 1.0
_KEY = "tinkerflow.connection"  # in a request's scope


class Connection(HttpToolsProtocol):
    """One connection of a client. `watch` advances its clocks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Start the clocks. args, kwargs: arguments of uvicorn's protocol."""
        super().__init__(*args, **kwargs)
        self.accepted = False  # whether a key was accepted on this connection
        self.address = ""
        self.born = self.loop.time()
        self._in_headers = True  # whether headers are awaited: the first ones, or those of a request that has begun
        self._in_body = False
        self._size = 0  # bytes of the current headers or body
        self._waited = 0.0  # seconds spent waiting for the client's bytes
        self._unsent = 0.0  # seconds since the client last read the answer

    # ------------------------------------------------------------ called by uvicorn and the parser
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Store the address of the client."""
        super().connection_made(transport)
        self.address = address_group(self.client[0]) if self.client else ""

    def data_received(self, data: bytes) -> None:
        """Count the bytes, and close the connection if the headers or an unread body are too long.

        The parser gets headers in pieces of at most HEADER_BYTES + 1, so that it cannot complete longer ones.
        """
        while data and not self.transport.is_closing():
            room = len(data) if self._in_body else HEADER_BYTES + 1 - self._size
            piece, data = data[:room], data[room:]
            self._size += len(piece)
            super().data_received(piece)
            if not self._in_body and self._size > HEADER_BYTES:  # headers, or empty lines before them
                self._refuse(431, "the request's headers are too long")
            elif self._in_body and self._size > _UNREAD_BYTES and self.cycle.response_complete:
                self.transport.close()

    def on_message_begin(self) -> None:
        """Start waiting for headers."""
        super().on_message_begin()
        cast("dict[str, object]", self.scope)[_KEY] = self
        self._in_headers, self._in_body, self._waited = True, False, 0.0

    def on_headers_complete(self) -> None:
        """Start waiting for the body."""
        self._in_headers, self._in_body, self._size, self._waited = False, True, 0, 0.0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Stop waiting."""
        super().on_message_complete()
        self._in_body, self._size, self._waited = False, 0, 0.0

    # ------------------------------------------------------------ clocks
    @property
    def unfinished(self) -> bool:
        """Whether the server waits for the client to finish a request or to send its first one."""
        return self._in_headers or self._in_body

    @property
    def unclaimed(self) -> bool:
        """Whether no key was accepted on the connection, and no request of it is being processed."""
        return not self.accepted and (self._in_headers or self._answered)

    @property
    def idle(self) -> bool:
        """Whether no request is in progress: the last one was answered, and no new one has begun."""
        return not self.unfinished and self._answered

    @property
    def _answered(self) -> bool:
        """Whether the last request, if there was one, was answered completely."""
        return self.cycle is None or self.cycle.response_complete

    def pass_time(self, seconds: float) -> None:
        """Advance the clocks by `seconds`, and close the connection if one of them has run out."""
        self._unsent = self._unsent + seconds if self.flow.write_paused else 0.0
        if self._unsent > WRITE_SECONDS:
            self.transport.abort()
        elif (self.unfinished and not self.flow.read_paused) or (self.idle and not self.accepted):
            self._waited += seconds
            if self._in_body:
                if self._waited > BODY_SECONDS + self._size / BODY_RATE:
                    self._refuse(408, "the request's body arrives too slowly")
            elif self._waited > HEADER_SECONDS:
                self._refuse(408, "the request's headers did not arrive in time")

    def _refuse(self, status: int, reason: str) -> None:
        """Send an error, unless another answer has begun, and close the connection."""
        if self.transport.is_closing():
            return
        answers = not self.idle and (self.cycle is None or not self.cycle.response_started)
        if self._in_headers:  # a client that has sent nothing expects no answer
            answers = self._size > 0 and self._answered
        if answers:
            body = reason.encode()
            head = b"content-type: text/plain\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()


async def watch(connections: Iterable[object]) -> None:
    """Advance the clocks of the connections every second until cancelled."""
    while True:
        await asyncio.sleep(_SECOND)
        current = [one for one in list(connections) if isinstance(one, Connection)]
        for connection in current:
            connection.pass_time(_SECOND)
        close_excess(current)


def close_excess(connections: Iterable[Connection]) -> None:
    """Close the oldest connections of strangers beyond STRANGERS for each address."""
    strangers: dict[str, list[Connection]] = defaultdict(list)
    for connection in connections:
        if connection.unclaimed:
            strangers[connection.address].append(connection)
    for address, theirs in strangers.items():
        if excess := sorted(theirs, key=lambda one: one.born)[:-STRANGERS]:
            log.warning("closing %d of %d connections from %s that presented no key", len(excess), len(theirs), address)
            for connection in excess:
                connection.transport.abort()


def address_group(host: str) -> str:
    """The address that limits apply to: an IPv4 address, or the /64 network of an IPv6 address."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # a Unix socket, or a test client's name
        return host
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)


def peer_of(request: Request) -> str:
    """The address of a request's connection. Headers that claim another address are ignored."""
    connection = request.scope.get(_KEY)
    if isinstance(connection, Connection):
        return connection.address
    return address_group(request.client.host) if request.client else ""


def accept(request: Request) -> None:
    """Mark the request's connection as one on which a key was accepted."""
    connection = request.scope.get(_KEY)
    if isinstance(connection, Connection):
        connection.accepted = True

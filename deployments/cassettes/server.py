"""An HTTP server in a thread, and helpers that the recorder and the replay share."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from pathlib import Path

import uvicorn
import zstandard
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tinkerflow.backend.core.errors import UserError

API_KEY = "tml-cassette"  # a key for clients of a replay, which checks no key
HERE = "http://cassette.invalid"  # stands in a cassette for the URL of the server that answers
RECORDING = "CASSETTE_RECORDING"  # the variable that names the cassette that is being recorded
_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"]

Handler = Callable[[Request], Awaitable[Response]]


def application(
    handler: Handler, lifespan: Callable[[Starlette], AbstractAsyncContextManager[None]] | None = None
) -> Starlette:
    """An application in which one function answers all requests. lifespan: surrounds the life of the server."""
    return Starlette(routes=[Route("/{path:path}", handler, methods=_METHODS)], lifespan=lifespan)


@contextmanager
def serving(app: Starlette, port: int = 0) -> Iterator[str]:
    """Serve `app` on loopback in a thread until the block ends. Yields the URL. port: 0 = a free port.

    UserError: the port is taken.
    """
    # Nagle's algorithm would delay small answers by 40 ms. asyncio turns it off only if a socket names its protocol.
    with socket.socket(proto=socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            raise UserError(f"port {port} on 127.0.0.1 cannot be used: {error.strerror}") from error
        listener.listen(2048)
        config = uvicorn.Config(
            app, log_config=None, log_level="warning", access_log=False, ws="none", timeout_graceful_shutdown=1
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],), name="cassette", daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


async def plain_body(request: Request) -> bytes:
    """The body of a request, decompressed. A body that does not match its headers is returned unchanged."""
    body = await request.body()
    if request.headers.get("content-encoding") == "zstd":
        with suppress(zstandard.ZstdError):
            return zstandard.ZstdDecompressor().decompressobj().decompress(body)
    return body


def target_of(request: Request) -> str:
    """The path of a request with its query."""
    path, query = str(request.scope["path"]), request.url.query
    return f"{path}?{query}" if query else path


def secrets_of(request: Request) -> set[bytes]:
    """The keys and tokens in the headers of a request."""
    shown = (request.headers.get("x-api-key", ""), request.headers.get("authorization", "").partition(" ")[2])
    return {secret.strip().encode() for secret in shown if len(secret.strip()) >= 8}


def is_recorded_now(path: Path) -> bool:
    """Whether this process runs under a `tinkerflow cassette record` that writes this cassette."""
    recorded = os.environ.get(RECORDING)
    return recorded is not None and Path(recorded) == path.resolve()

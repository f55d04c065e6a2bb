"""A server that reports good health, like the API's and Prefect's servers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread


class Healthy(BaseHTTPRequestHandler):
    """Answers every GET with 200."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"status": "ok"}')

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def health_server(handler: type[Healthy] = Healthy) -> Iterator[int]:
    """Run the server for the block, and yield its port. handler: answers its requests."""
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server.server_port
        finally:
            server.shutdown()

"""A fake of the Hugging Face hub's HTTP API, for the uploads of a few small files by `tinker checkpoint push-hf`."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Hub:
    """A hub with one user, "somebody", and the uploaded files."""

    url: str
    repositories: list[str] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)  # by path in the repository

    def environment(self) -> dict[str, str]:
        """Environment variables that select this hub. Without xet, files are sent in the commit."""
        return {"HF_ENDPOINT": self.url, "HF_TOKEN": "hf_secret", "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}

    def answer(self, method: str, path: str, body: bytes) -> Any:
        """The answer's JSON, or None for a 404."""
        if (method, path) == ("GET", "/api/whoami-v2"):
            return {"type": "user", "name": "somebody", "orgs": []}
        if (method, path) == ("POST", "/api/repos/create"):
            name = f"somebody/{json.loads(body)['name']}"
            self.repositories.append(name)
            return {"url": f"{self.url}/{name}", "name": name, "id": name}
        if (method, path) == ("POST", "/api/validate-yaml"):
            return {"errors": [], "warnings": []}
        if method == "POST" and "/preupload/" in path:
            asked = [file["path"] for file in json.loads(body)["files"]]
            return {"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in asked]}
        if method == "POST" and "/commit/" in path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            commit = "0" * 40
            return {"commitUrl": f"{self.url}/{self.repositories[-1]}/commit/{commit}", "commitOid": commit}
        return None  # such as the README of an earlier upload


@contextmanager
def hub() -> Iterator[Hub]:
    """Run a hub on a free port."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            found = running.answer(self.command, self.path.split("?")[0], body)
            said = json.dumps(found).encode()
            self.send_response(404 if found is None else 200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(said)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(said)

        do_GET = do_POST = do_HEAD = _answer

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running = Hub(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield running
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

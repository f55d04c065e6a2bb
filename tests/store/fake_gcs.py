"""A fake of Google Cloud Storage's JSON API over real HTTP: objects with generations and preconditions, in memory.

It supports uploads (media, resumable), reads of ranges, metadata, paged listings, and deletions. `faults` is the
list of failures of later requests. See https://cloud.google.com/storage/docs/json_api/v1/objects
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import time
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit


@dataclass(frozen=True)
class Fault:
    """A failure of the next `times` requests of `method` whose URL contains `where`.

    status: the answer, without executing the request. before / after: the connection breaks before / after the
    execution. delay: seconds before the execution. cut: number of missing bytes at the end of the answer's body.
    """

    method: str
    where: str = ""
    status: int = 0
    before: bool = False
    after: bool = False
    delay: float = 0.0
    cut: int = 0
    times: int = 1


@dataclass
class Object:
    data: bytes
    generation: int
    updated: str


@dataclass
class Session:
    name: str
    match: str | None
    data: bytearray = field(default_factory=bytearray)
    about: dict[str, Any] | None = None


class FakeGcs:
    """The service, which runs while entered. page: the most entries on a page of a listing."""

    def __init__(self, page: int = 3) -> None:
        self.page = page
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        self.objects: dict[str, Object] = {}
        self.sessions: dict[str, Session] = {}
        self.lock = threading.RLock()
        self._generation = 0

    def __enter__(self) -> Self:
        fake = self

        class Handler(_Handler):
            gcs = fake

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def fault_of(self, method: str, url: str) -> Fault | None:
        with self.lock:
            self.requests.append(f"{method} {url}")
            for i, fault in enumerate(self.faults):
                if fault.method == method and fault.where in url:
                    self.faults[i : i + 1] = [Fault(**{**vars(fault), "times": fault.times - 1})] * (fault.times > 1)
                    return fault
            return None

    def matches(self, name: str, match: str | None) -> bool:
        there = self.objects.get(name)
        return match is None or int(match) == (there.generation if there else 0)

    def write(self, name: str, data: bytes, match: str | None) -> dict[str, Any] | None:
        """Store an object. Returns its description, or None if the precondition fails."""
        with self.lock:
            if not self.matches(name, match):
                return None
            self._generation += 1
            self.objects[name] = Object(data, self._generation, datetime.now(UTC).isoformat().replace("+00:00", "Z"))
            return self.about(name)

    def about(self, name: str) -> dict[str, Any]:
        found = self.objects[name]
        md5 = base64.b64encode(hashlib.md5(found.data).digest()).decode()
        times = {"updated": found.updated, "timeCreated": found.updated}
        where = {"kind": "storage#object", "bucket": "bucket", "name": name, "generation": str(found.generation)}
        return {**where, "metageneration": "1", "size": str(len(found.data)), "md5Hash": md5, **times}

    def listing(self, prefix: str, delimiter: str, token: str) -> dict[str, Any]:
        with self.lock:
            names, folders = [], set()
            for name in sorted(self.objects):
                if not name.startswith(prefix):
                    continue
                rest = name[len(prefix) :]
                if delimiter and delimiter in rest:
                    folders.add(prefix + rest.partition(delimiter)[0] + delimiter)
                else:
                    names.append(name)
            entries = sorted([*names, *folders])
            start = int(token or 0)
            chosen = entries[start : start + self.page]
            more = {"nextPageToken": str(start + self.page)} if start + self.page < len(entries) else {}
            items = [self.about(name) for name in chosen if name not in folders]
            return {"kind": "storage#objects", "items": items, "prefixes": [n for n in chosen if n in folders], **more}


class _Handler(BaseHTTPRequestHandler):
    gcs: FakeGcs
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    _cut = 0

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        self._serve("GET")

    def do_POST(self) -> None:
        self._serve("POST")

    def do_PUT(self) -> None:
        self._serve("PUT")

    def do_DELETE(self) -> None:
        self._serve("DELETE")

    def _serve(self, method: str) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.gcs.fault_of(method, unquote(self.path)) or Fault(method)
        time.sleep(fault.delay)
        if fault.before:
            return self._drop()
        if fault.status:
            return self._answer(fault.status, {"error": {"code": fault.status, "message": "injected"}})
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        status, headers, data = self._do(method, url.path, query, body)
        if fault.after:
            return self._drop()
        self._cut = fault.cut
        return self._answer(status, data, headers)

    def _do(
        self, method: str, path: str, query: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes | dict[str, Any]]:
        gcs, match = self.gcs, query.get("ifGenerationMatch")
        if path.startswith("/upload/"):
            return self._upload(query, match, body)
        name = unquote(found[1]) if (found := re.search(r"/o/(.+)$", path)) else ""
        if not name:
            prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
            return 200, {}, gcs.listing(prefix, delimiter, query.get("pageToken", ""))
        with gcs.lock:
            there = gcs.objects.get(name)
            if there is None:
                return 404, {}, {"error": {"code": 404, "message": f"No such object: {name}"}}
            if not gcs.matches(name, match):
                return self._refused()
            if method == "DELETE":
                del gcs.objects[name]
                return 204, {}, b""
            if query.get("alt") != "media":
                return 200, {}, gcs.about(name)
        headers = {"X-Goog-Generation": str(there.generation), "Content-Type": "application/octet-stream"}
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            start, end = int(wanted[1]), int(wanted[2] or len(there.data) - 1)
            if start >= len(there.data):
                return 416, {}, {"error": {"code": 416, "message": "Requested range not satisfiable"}}
            return 206, headers, there.data[start : end + 1]
        return 200, headers, there.data

    def _upload(
        self, query: dict[str, str], match: str | None, body: bytes
    ) -> tuple[int, dict[str, str], bytes | dict[str, Any]]:
        gcs = self.gcs
        if upload := query.get("upload_id"):
            return self._resume(gcs.sessions[upload], body)
        if query["uploadType"] == "resumable":
            if not gcs.matches(query["name"], match):
                return self._refused()
            upload = uuid.uuid4().hex
            gcs.sessions[upload] = Session(query["name"], match)
            return 200, {"Location": f"{gcs.url}/upload/storage/v1/b/bucket/o?upload_id={upload}"}, {}
        about = gcs.write(query["name"], body, match)
        return self._refused() if about is None else (200, {}, about)

    def _resume(self, session: Session, body: bytes) -> tuple[int, dict[str, str], bytes | dict[str, Any]]:
        if session.about is not None:  # the request was sent again after a lost answer
            return 200, {}, session.about
        if (found := re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", self.headers.get("Content-Range") or "")) is None:
            return 499, {}, {}  # DELETE
        start, total = int(found[1]), found[3]
        session.data[start:] = body  # the stored beginning is sent again
        if total == "*" or len(session.data) < int(total):
            return 308, {"Range": f"bytes=0-{len(session.data) - 1}"}, b""
        session.about = self.gcs.write(session.name, bytes(session.data), session.match)
        return self._refused() if session.about is None else (200, {}, session.about)

    def _refused(self) -> tuple[int, dict[str, str], dict[str, Any]]:
        return 412, {}, {"error": {"code": 412, "message": "conditionNotMet"}}

    def _answer(self, status: int, data: bytes | dict[str, Any], headers: dict[str, str] | None = None) -> None:
        body = data if isinstance(data, bytes) else json.dumps(data).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) - self._cut])
        if self._cut:
            self._drop()

    def _drop(self) -> None:
        self.close_connection = True
        self.wfile.flush()
        self.connection.shutdown(2)

"""A fake of the part of a cluster's API that the launcher uses. Server-side apply only merges here."""

from __future__ import annotations

import json
import re
import ssl
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import kubernetes_validate

VERSION = "1.37"
TOKEN = "token-of-the-service-account"
_URL = re.compile(r"/(?:api|apis/(?P<group>\w+))/v1/namespaces/tinkerflow/(?P<resource>\w+)(?:/(?P<name>\w+))?")

Json = dict[str, Any]


@dataclass
class FakeKubernetes:
    """A cluster with one StatefulSet, or None, in the namespace tinkerflow.

    rules: of the service account's Role. applied: the number of applies. outage: the response or error of any request.
    """

    stateful_set: Json | None
    rules: Sequence[Json]
    pods: list[Json] = field(default_factory=list)
    events: list[Json] = field(default_factory=list)
    applied: int = 0
    outage: httpx2.Response | Exception | None = None

    @property
    def replicas(self) -> int:
        assert self.stateful_set is not None
        return int(self.stateful_set["spec"].get("replicas", 1))

    def respond(self, request: httpx2.Request) -> httpx2.Response:
        if isinstance(self.outage, Exception):
            raise self.outage
        found = _URL.fullmatch(request.url.path)
        assert found, request.url
        group, resource, name = found["group"] or "", found["resource"], found["name"]
        verb = "list" if name is None else request.method.lower()
        allowed = any(
            group in rule["apiGroups"]
            and resource in rule["resources"]
            and verb in rule["verbs"]
            and name in rule.get("resourceNames", [name])
            for rule in self.rules
        )
        match verb, resource:
            case _ if self.outage is not None:
                return self.outage
            case _ if request.headers["Authorization"] != f"Bearer {TOKEN}":
                return _refused(401, "Unauthorized")
            case _ if not allowed:
                return _refused(403, f'{resource} "{name}" is forbidden: cannot {verb} resource "{resource}"')
            case "list", "pods":
                assert request.url.params["labelSelector"] == "app.kubernetes.io/name=worker"
                return httpx2.Response(200, json={"metadata": {}, "items": self.pods})
            case "list", "events":
                about = "involvedObject.kind=StatefulSet,involvedObject.name=worker,type=Warning"
                assert request.url.params["fieldSelector"] == about
                return httpx2.Response(200, json={"metadata": {}, "items": self.events})
            case _ if self.stateful_set is None:
                return _refused(404, f'statefulsets.apps "{name}" not found')
            case "patch", _:
                assert request.headers["Content-Type"] == "application/apply-patch+yaml"
                assert dict(request.url.params) == {"fieldManager": "tinkerflow", "force": "true"}
                self.stateful_set = _merged(self.stateful_set, json.loads(request.content))
                kubernetes_validate.validate(self.stateful_set, VERSION, strict=True)
                self.applied += 1
        return httpx2.Response(200, json=self.stateful_set)


@contextmanager
def served(fake: FakeKubernetes, address: str, account: Path) -> Iterator[int]:
    """Serve the API at this address; yield the port. account: gets the files of a pod's service account."""
    key, certificate = account.parent / "key.pem", account / "ca.crt"
    account.mkdir(parents=True)
    (account / "token").write_text(TOKEN)
    (account / "namespace").write_text("tinkerflow")
    words = ("-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=kubernetes", "-addext")
    command = ("openssl", "req", *words, f"subjectAltName=IP:{address}", "-keyout", key, "-out", certificate)
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            url, headers = f"https://{address}{self.path}", dict(self.headers)
            answer = fake.respond(httpx2.Request(self.command, url, headers=headers, content=content))
            self.send_response(answer.status_code)
            self.send_header("Content-Type", answer.headers["Content-Type"])
            self.end_headers()
            self.wfile.write(answer.content)

        do_PATCH = do_GET

        def log_request(self, code: object = "-", size: object = "-") -> None:
            """Log nothing."""

    with ThreadingHTTPServer((address, 0), Handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def _refused(code: int, message: str) -> httpx2.Response:
    return httpx2.Response(code, json={"kind": "Status", "status": "Failure", "message": message, "code": code})


def _merged(old: Any, new: Any) -> Any:
    """Merge maps, and lists whose items have names."""
    if isinstance(old, dict) and isinstance(new, dict):
        return old | {key: _merged(old.get(key), value) for key, value in new.items()}
    if isinstance(old, list) and isinstance(new, list) and all("name" in item for item in (*old, *new)):
        named = {item["name"]: item for item in new}
        return [*(_merged(item, named.pop(item["name"], {})) for item in old), *named.values()]
    return new

"""What the launcher needs of a cluster's API, with the API's own words where it refuses.

Server-side apply only merges here: a field that is no longer applied stays.
"""

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

import httpx
import kubernetes_validate

VERSION = "1.37"
TOKEN = "token-of-the-service-account"
_URL = re.compile(r"/(?:api|apis/(?P<group>\w+))/v1/namespaces/tinkerflow/(?P<resource>\w+)(?:/(?P<name>\w+))?")

Json = dict[str, Any]


@dataclass
class FakeKubernetes:
    """The API of a cluster with one StatefulSet, in the namespace tinkerflow.

    stateful_set: None = there is none. rules: of the service account's Role. applied: how often something was.
    """

    stateful_set: Json | None
    rules: Sequence[Json]
    pods: list[Json] = field(default_factory=list)
    events: list[Json] = field(default_factory=list)
    applied: int = 0

    @property
    def replicas(self) -> int:
        assert self.stateful_set is not None
        return int(self.stateful_set["spec"].get("replicas", 1))

    def answer(self, request: httpx.Request) -> httpx.Response:
        """The response to a request."""
        asked = _URL.fullmatch(request.url.path)
        assert asked, request.url
        group, resource, name = asked["group"] or "", asked["resource"], asked["name"]
        verb = "list" if name is None else request.method.lower()
        if request.headers["Authorization"] != f"Bearer {TOKEN}":
            return _refused(401, "Unauthorized")
        if not any(
            group in rule["apiGroups"]
            and resource in rule["resources"]
            and verb in rule["verbs"]
            and name in rule.get("resourceNames", [name])
            for rule in self.rules
        ):
            what = f'{resource}.{group} "{name}"' if name else resource
            who = 'User "system:serviceaccount:tinkerflow:tinkerflow"'
            where = f'in API group "{group}" in the namespace "tinkerflow"'
            return _refused(403, f'{what} is forbidden: {who} cannot {verb} resource "{resource}" {where}')
        match verb, resource:
            case "list", "pods":
                assert request.url.params["labelSelector"] == "app.kubernetes.io/name=worker"
                return httpx.Response(200, json={"items": self.pods})
            case "list", "events":
                about = "involvedObject.kind=StatefulSet,involvedObject.name=worker,type=Warning"
                assert request.url.params["fieldSelector"] == about
                return httpx.Response(200, json={"items": self.events})
        if self.stateful_set is None or self.stateful_set["metadata"]["name"] != name:
            return _refused(404, f'statefulsets.apps "{name}" not found')
        if verb == "patch":
            assert request.headers["Content-Type"] == "application/apply-patch+yaml"
            assert dict(request.url.params) == {"fieldManager": "tinkerflow", "force": "true"}
            merged = _merged(self.stateful_set, json.loads(request.content))
            try:
                kubernetes_validate.validate(merged, VERSION, strict=True)
            except kubernetes_validate.ValidationError as error:
                return _refused(422, f'StatefulSet.apps "{name}" is invalid: {error}')
            self.stateful_set = merged
            self.applied += 1
        return httpx.Response(200, json=self.stateful_set)


@contextmanager
def served(fake: FakeKubernetes, address: str, account: Path) -> Iterator[int]:
    """Serve the API at an address of this machine: the port. account: gets what a pod finds of its service account."""
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
            answer = fake.answer(httpx.Request(self.command, url, headers=headers, content=content))
            self.send_response(answer.status_code)
            self.end_headers()
            self.wfile.write(answer.content)

        do_PATCH = do_GET

        def log_request(self, code: object = "-", size: object = "-") -> None:
            """Nobody reads it."""

    with ThreadingHTTPServer((address, 0), Handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def _refused(code: int, message: str) -> httpx.Response:
    return httpx.Response(code, json={"kind": "Status", "status": "Failure", "message": message, "code": code})


def _merged(old: Any, new: Any) -> Any:
    """Maps are merged, and lists of what has a name."""
    if isinstance(old, dict) and isinstance(new, dict):
        return old | {key: _merged(old.get(key), value) for key, value in new.items()}
    if isinstance(old, list) and isinstance(new, list) and all("name" in one for one in (*old, *new)):
        named = {one["name"]: one for one in new}
        known = [_merged(one, named.pop(one["name"], {})) for one in old]
        return [*known, *named.values()]
    return new

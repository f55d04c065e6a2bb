"""The replay: answers a program from a recording, and names the first request that differs.

A submit that differs is accepted and its future fails with the text, because a refused submit can hang the client
(docs/protocol.md). Requests without a future are refused (400).
"""

from __future__ import annotations

import base64
import tempfile
import time
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from tinkerflow.deployments.cassettes import requests
from tinkerflow.deployments.cassettes.file import Exchange, Recording
from tinkerflow.deployments.cassettes.matching import Script
from tinkerflow.deployments.cassettes.requests import ClientRequest, asked, future_of, name_of
from tinkerflow.deployments.cassettes.server import HERE, application, plain_body, secrets_of, target_of

_JSON = "application/json"
_TOKEN_SECONDS = 3600
# A sample's answer exists when it is submitted, so each sample is polled alone. The SDK's poller of whole samplers may
# lose its cancellation when a client ends after a failure, and then the client hangs (docs/protocol.md).
_FLAGS = {"sample_use_retrieve_futures": False}


class Replay:
    """Answers a program from a recording."""

    def __init__(self, recording: Recording, ignore: Collection[str] = ()) -> None:
        """ignore: dotted paths of fields that are not compared, such as `user_metadata.started`."""
        self.recording = recording
        self.script = Script(recording, ignore)
        self._results = {name: (one.media, one.body) for name, one in recording.results.items()}
        self._configuration = {name_of(one.target): one for one in recording.exchanges if not one.number}
        self._folders: dict[str, str] = {}  # folders of tokenizers: recorded path -> path on this machine
        for entry in self.script.entries:
            if entry.asked.is_future and (request_id := future_of(entry.exchange.answer)):
                text = f"{self.script.named(entry)} has no result in the recording: the program ended before it arrived"
                self._results.setdefault(request_id, (_JSON, _failure(text)))

    def app(self) -> Starlette:
        """The replay as an application."""
        return application(self._handle, self._unpacked)

    @asynccontextmanager
    async def _unpacked(self, app: Starlette) -> AsyncIterator[None]:
        """Unpack the recorded tokenizers that this machine lacks, for the lifetime of the server."""
        with tempfile.TemporaryDirectory(prefix="cassette-") as scratch:
            for number, tokenizer in enumerate(self.recording.tokenizers):
                if Path(tokenizer.folder).is_dir():
                    continue
                folder = Path(scratch, str(number))
                folder.mkdir()
                for name, content in tokenizer.files.items():
                    (folder / Path(name).name).write_bytes(content)
                self._folders[tokenizer.folder] = str(folder)
            yield

    async def _handle(self, request: Request) -> Response:
        target, body = target_of(request), await plain_body(request)
        name, own = name_of(target), str(request.base_url).rstrip("/")
        if requests.is_unrecorded(name):
            return self._aside(name, body)
        if name in requests.CONFIGURATION:
            flags = self._configuration.get(name)
            values = msgspec.json.decode(flags.answer) if flags else {}
            return Response(msgspec.json.encode(values | _FLAGS), media_type=_JSON)
        if not requests.is_binary(request.headers.get("content-type", "")):
            body = requests.without_secrets(body.replace(own.encode(), HERE.encode()), secrets_of(request))
        try:
            now = asked(request.method, target, body, request.headers.get("range", ""))
            if not self.script.has_place(now):  # the recording has everything, or is of a release without ranges
                now = asked(request.method, target, body)
        except ValueError as error:
            return self._differs(str(error), name, None)
        found = self.script.find(now)
        if isinstance(found, str):
            return self._differs(found, name, now)
        return self._recorded(found.exchange, own)

    def _recorded(self, found: Exchange, own: str) -> Response:
        answer = found.answer.replace(HERE.encode(), own.encode())
        if name_of(found.target) == "get_info" and self._folders:
            answer = self._with_tokenizer(answer)
        location = found.location.replace(HERE, own)
        named = {"location": location, "content-type": found.media, "content-range": found.content_range}
        return Response(answer, found.status, {name: value for name, value in named.items() if value})

    def _with_tokenizer(self, answer: bytes) -> bytes:
        """The answer to get_info, with the folder of the model's tokenizer on this machine."""
        values = msgspec.json.decode(answer)
        data = values.get("model_data", {})
        if data.get("tokenizer_id") in self._folders:
            data["tokenizer_id"] = self._folders[data["tokenizer_id"]]
        return msgspec.json.encode(values)

    def _differs(self, text: str, name: str, now: ClientRequest | None) -> Response:
        """Note a difference and answer the request. name: the endpoint's name. now: the request, None if unreadable."""
        self.script.differs(text)
        if name not in requests.FUTURES:
            return Response(msgspec.json.encode({"detail": text}), 400, media_type=_JSON)
        request_id = f"differs-{len(self._results)}"
        self._results[request_id] = (_JSON, _failure(text))
        answer: dict[str, Any] = {"request_id": request_id}
        if name == "asample" and now is not None:
            count = (now.content or {}).get("num_samples", 1)
            answer["sample_sequence_ids"] = [f"{request_id}-{i}" for i in range(count)]
        return Response(msgspec.json.encode(answer), media_type=_JSON)

    def _aside(self, name: str, body: bytes) -> Response:
        """The answer to a request that is never recorded."""
        match name:
            case "retrieve_future":
                request_id = msgspec.json.decode(body)["request_id"]
                unknown = _JSON, _failure(f"request_id is {request_id!r}: must be one of the recording")
                media, content = self._results.get(request_id, unknown)
                return Response(content, media_type=media)
            case "retrieve_futures":
                text = "retrieve_futures: a replay does not support this poll; client/config turns it off"
                return Response(msgspec.json.encode({"detail": text}), 400, media_type=_JSON)
            case "auth/token":
                return Response(msgspec.json.encode({"jwt": _token()}), media_type=_JSON)
            case "session_heartbeat":
                return Response(b'{"type": "session_heartbeat"}', media_type=_JSON)
            case "telemetry":
                return Response(b'{"status": "accepted"}', media_type=_JSON)
            case "healthz":
                return Response(b'{"status": "ok"}', media_type=_JSON)
        return Response(b"{}", media_type=_JSON)


def _failure(text: str) -> bytes:
    """The result of a future that failed."""
    return msgspec.json.encode({"error": text, "category": "user"})


def _token() -> str:
    """A token in the form of a JWT. It grants nothing, because the replay checks no key."""
    now = int(time.time())
    parts: Iterable[bytes] = (
        msgspec.json.encode({"alg": "none", "typ": "JWT"}),
        msgspec.json.encode({"iat": now, "exp": now + _TOKEN_SECONDS}),
        b"cassette",
    )
    return ".".join(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in parts)

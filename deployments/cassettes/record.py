"""The recorder: a proxy in front of a service that writes each request with its answer into a cassette.

It depends on no more of the protocol than requests.py does. Requests and answers pass unchanged, except that the
proxy's URL replaces the service's URL in headers and JSON answers, so that links lead through the proxy.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from tinkerflow.deployments.cassettes.file import CassetteWriter, Exchange, FutureResult, TokenizerFiles
from tinkerflow.deployments.cassettes.requests import (
    CONFIGURATION,
    asked,
    future_of,
    is_binary,
    is_unrecorded,
    name_of,
    without_secrets,
)
from tinkerflow.deployments.cassettes.server import HERE, application, plain_body, secrets_of, target_of

# Headers that belong to one connection. The service must not compress, because answers are read here.
_OF_A_CONNECTION = {"host", "connection", "content-length", "transfer-encoding", "keep-alive", "accept-encoding"}
_KEPT_HEADERS = ("content-type", "content-range", "location", "retry-after", "www-authenticate")
_PASSING = {401, 408, 409, 425, 429}  # statuses that are not recorded: clients retry, or their key was wrong
_OF_A_RANGE = (206, 416)  # statuses of answers to a Range
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja"),
)


class Recorder:
    """Answers requests with those of a service, and records both."""

    def __init__(self, upstream: str, writer: CassetteWriter) -> None:
        """upstream: the URL of the service. writer: receives the recording."""
        self._upstream = upstream.rstrip("/")
        self._writer = writer
        self._seen: set[tuple[str, int]] = set()  # places and numbers of recorded requests
        self._waiting: set[str] = set()  # ids of recorded requests without a result
        self._configured: set[str] = set()
        self._folders: set[str] = set()
        self.requests = 0  # number of requests that a replay compares

    def app(self) -> Starlette:
        """The proxy as an application."""
        return application(self._handle, self._connected)

    @property
    def unanswered(self) -> int:
        """How many recorded requests have no result yet."""
        return len(self._waiting)

    @asynccontextmanager
    async def _connected(self, app: Starlette) -> AsyncIterator[None]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(timeout=None, limits=limits, trust_env=False) as self._client:
            yield

    async def _handle(self, request: Request) -> Response:
        target, raw = target_of(request), await request.body()
        headers = [(key, value) for key, value in request.headers.items() if key not in _OF_A_CONNECTION]
        headers.append(("accept-encoding", "identity"))
        asking = self._client.request(request.method, self._upstream + target, content=raw, headers=headers)
        try:
            answer = await (_unless_gone(request, asking) if is_unrecorded(name_of(target)) else asking)
        except _GoneError:
            return Response(status_code=499)
        except httpx.TransportError as error:
            text = f"the service at {self._upstream} does not answer: {error or type(error).__name__}"
            return Response(msgspec.json.encode({"detail": text}), 502, media_type="application/json")
        own = str(request.base_url).rstrip("/")
        self._record(request, target, await plain_body(request), answer, own)
        named = [name for name in _KEPT_HEADERS if name in answer.headers]
        kept = {name: answer.headers[name].replace(self._upstream, own) for name in named}
        return Response(self._readdressed(answer, own), answer.status_code, kept)

    def _readdressed(self, answer: httpx.Response, own: str) -> bytes:
        """The body of an answer. In JSON, `own` replaces the service's URL."""
        if "json" not in answer.headers.get("content-type", ""):
            return answer.content
        return answer.content.replace(self._upstream.encode(), own.encode())

    # ------------------------------------------------------------------ recording
    def _record(self, request: Request, target: str, body: bytes, answer: httpx.Response, own: str) -> None:
        name, secrets = name_of(target), secrets_of(request)
        if name == "retrieve_future":
            self._record_result(body, answer, secrets)
        if is_unrecorded(name) or answer.status_code in _PASSING or answer.status_code >= 500:
            return
        if not is_binary(request.headers.get("content-type", "")):
            body = without_secrets(body.replace(own.encode(), HERE.encode()), secrets)
        content = self._readdressed(answer, HERE)
        media = answer.headers.get("content-type", "")
        if not is_binary(media):
            content = without_secrets(content, secrets)
        location = answer.headers.get("location", "").replace(self._upstream, HERE)
        # A service that ignores the Range sends everything, which is also the answer to other ranges.
        part = request.headers.get("range", "") if answer.status_code in _OF_A_RANGE else ""
        sent = answer.headers.get("content-range", "")
        exchange = Exchange(0, request.method, target, body, answer.status_code, media, content, location, part, sent)
        if name in CONFIGURATION:
            if name not in self._configured:
                self._configured.add(name)
                self._writer.write(exchange)
            return
        try:
            meaning = asked(request.method, target, body, part)
        except ValueError:
            return  # the service refused the request, and no replay could recognize it
        if meaning.number is not None:
            if (meaning.place, meaning.number) in self._seen:
                return  # the client retried
            self._seen.add((meaning.place, meaning.number))
        self.requests += 1
        exchange.number = self.requests
        self._writer.write(exchange)
        if meaning.is_future and (request_id := future_of(content)):
            self._waiting.add(request_id)
        if name == "get_info":
            self._record_tokenizer(content)

    def _record_result(self, body: bytes, answer: httpx.Response, secrets: set[bytes]) -> None:
        request_id = future_of(body)
        if answer.status_code != 200 or request_id not in self._waiting:
            return
        media, content = answer.headers.get("content-type", ""), answer.content
        if not is_binary(media):
            values = msgspec.json.decode(content)
            if values.get("type") == "try_again" or values.get("status") == "complete_metadata":
                return
            content = without_secrets(content, secrets)
        self._waiting.discard(request_id)
        self._writer.write(FutureResult(request_id, media, content))

    def _record_tokenizer(self, content: bytes) -> None:
        if (files := tokenizer_of(content, self._folders)) is not None:
            self._writer.write(files)


def tokenizer_of(info: bytes, folders: set[str]) -> TokenizerFiles | None:
    """The files of a model's tokenizer if it is a folder on this machine, which other machines lack; else None.

    info: the answer to get_info. folders: folders of earlier calls, which are not read again; the new one is added.
    """
    folder = str(msgspec.json.decode(info).get("model_data", {}).get("tokenizer_id", ""))
    if folder in folders or not Path(folder).is_absolute():
        return None
    folders.add(folder)
    files = {name: Path(folder, name).read_bytes() for name in _TOKENIZER_FILES if Path(folder, name).is_file()}
    return TokenizerFiles(folder, files) if files else None


class _GoneError(Exception):
    """The client has closed its connection."""


async def _unless_gone(request: Request, asking: Coroutine[Any, Any, httpx.Response]) -> httpx.Response:
    """Await the answer, or cancel a long poll that no one reads. _GoneError: the client disconnected first."""
    answer, gone = asyncio.ensure_future(asking), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise _GoneError
        return answer.result()
    finally:
        answer.cancel()
        gone.cancel()


async def answers(url: str) -> bool:
    try:
        async with httpx.AsyncClient(timeout=10, trust_env=False) as client:
            return (await client.get(f"{url.rstrip('/')}/api/v1/healthz")).status_code < 500
    except (httpx.HTTPError, httpx.InvalidURL):
        return False


def is_http(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme in ("http", "https") and bool(parts.netloc)

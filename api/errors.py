"""Converts the error tree to HTTP responses, in the format of each API.

Bodies are JSON with a Content-Length, because the SDK mistakes an empty 400 for a proxy's response. User errors are
never 408, 409, 425 or 5xx, because the SDK retries most of these for minutes. Requests that may succeed a moment later
get 429. OpenAI's and Anthropic's clients expect formats of their own (`FORMS`). While the database is unavailable,
errors are sent after a pause, because the SDK repeats a poll immediately after a 5xx.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exception_handlers import http_exception_handler
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from tinkerflow.api.schemas import OPEN_API
from tinkerflow.backend.core.errors import (
    BodyTooLargeError,
    ConflictError,
    ContextExceededError,
    NotFoundError,
    StoreAwayError,
    StoreError,
    TinkerflowError,
    TooManyError,
    UserError,
)
from tinkerflow.backend.journal import AWAY
from tinkerflow.backend.wire.request_errors import parameter_error

log = logging.getLogger(__name__)

_AWAY_SECONDS = 1.0

_STATUS: tuple[tuple[type[TinkerflowError], int], ...] = (
    (NotFoundError, 404),
    (ConflictError, 422),
    (BodyTooLargeError, 413),
    (TooManyError, 429),
    (UserError, 400),
    (StoreAwayError, 503),
    (StoreError, 500),  # the store is damaged, so retrying does not help
)
# The beginning of our messages. No backtracking, because a client's field name may have a million characters.
_FIELD = re.compile(r"([a-z_]++)[\w.\[\]']*+(?: '[^']*+')?(?:: | (?:is|has|have|must|does)\b)")


@contextmanager
def naming(names: Mapping[str, str]) -> Iterator[None]:
    """Within this context, UserErrors use the client's names of fields. names: the client's name for each of ours."""
    try:
        yield
    except UserError as error:
        error.args = (renamed(error.message, names),)
        raise


def renamed(message: str, names: Mapping[str, str]) -> str:
    """Replace our field names with the client's, at the beginning of a message and after "up to".

    names: the client's field for the beginning of each of our fields. The longest matching beginning is used.
    """
    if not names:
        return message
    ours = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    return re.sub(rf"(^| up to )({ours})", lambda found: found[1] + names[found[2]], message)


def openai_error(status: int, message: str, error: Exception | None = None) -> dict[str, Any]:
    """An error in OpenAI's format. `param` is the field at the beginning of the message.

    Agents and libraries detect an exceeded context by the code, or by OpenAI's sentence.
    """
    kind, code = _OPENAI.get(status, ("server_error" if status >= 500 else "invalid_request_error", None))
    named = _FIELD.match(message)
    param = named[1] if named is not None and status < 500 else None
    if isinstance(error, ContextExceededError):
        code = "context_length_exceeded"
        message += f". This model's maximum context length is {error.context} tokens."
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def anthropic_error(status: int, message: str, error: Exception | None = None) -> dict[str, Any]:
    """An error in Anthropic's format. Clients detect an exceeded context by Anthropic's sentence."""
    if isinstance(error, ContextExceededError):
        message = f"prompt is too long: {error.size} > {error.most} maximum"
    kind = _ANTHROPIC.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


_OPENAI: dict[int, tuple[str, str | None]] = {
    401: ("authentication_error", "invalid_api_key"),
    404: ("not_found_error", "not_found"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    503: ("server_error", "unavailable"),
}
_ANTHROPIC = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
# The formats by the beginning of the path; the first match is used. Errors of other paths are in FastAPI's format.
FORMS: tuple[tuple[str, Callable[[int, str, Exception | None], dict[str, Any]]], ...] = (
    (f"{OPEN_API}/messages", anthropic_error),
    (f"{OPEN_API}/", openai_error),
)


def install(app: FastAPI) -> None:
    """Install handlers that answer errors in the format of the request's API."""
    app.add_exception_handler(TinkerflowError, _ours)
    for kind in AWAY:
        app.add_exception_handler(kind, _away)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(Exception, _unknown)


def status_of(error: Exception) -> int:
    return next((code for kind, code in _STATUS if isinstance(error, kind)), 503)


def error_body(path: str, status: int, message: str, error: Exception | None = None) -> dict[str, Any]:
    """The body of an error, in the format of the path. error: the exception, because some formats show its details."""
    forms = (form(status, message, error) for start, form in FORMS if path.startswith(start))
    return next(forms, {"detail": message})


def error_response(
    path: str,
    status: int,
    message: str,
    headers: Mapping[str, str] | None = None,
    error: Exception | None = None,
) -> JSONResponse:
    """The response to a request for `path` that failed. error: the exception."""
    return JSONResponse(error_body(path, status, message, error), status, headers)


def _ours(request: Request, error: Exception) -> JSONResponse:
    status = status_of(error)
    if status == 503:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    headers = {"Retry-After": "1"} if status == 429 else None
    return error_response(request.url.path, status, str(error), headers, error)


def message_of(error: Exception) -> str:
    """The message for clients of one of our errors or one of AWAY. The driver's own texts name hosts and statements."""
    return str(error) if isinstance(error, TinkerflowError) else "the service's database is unavailable: try again"


def cause_of(error: Exception) -> BaseException:
    """The driver's own error, for logs. error: one of our errors or one of AWAY."""
    cause: BaseException = getattr(error, "orig", error)
    return cause


def log_failure(request: Request, error: Exception) -> None:
    """Log that the request failed because the database is unavailable. error: one of AWAY."""
    log.error("%s %s failed: %s", request.method, request.url.path, cause_of(error))


async def _away(request: Request, error: Exception) -> JSONResponse:
    log_failure(request, error)
    await asyncio.sleep(_AWAY_SECONDS)
    return error_response(request.url.path, 503, message_of(error), error=error)


def _gone(request: Request, error: Exception) -> Response:
    # The client disconnected before its whole request had arrived or was answered. No one reads this response.
    log.debug("%s %s: the client disconnected", request.method, request.url.path)
    return Response(status_code=499)


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.detail == HTTPStatus(error.status_code).phrase:  # an error of the router, without details
        error.detail = f"{request.method} {request.url.path} is not an endpoint; /openapi.json lists the endpoints"
    if request.url.path.startswith(f"{OPEN_API}/"):
        return error_response(request.url.path, error.status_code, str(error.detail), error.headers)
    return await http_exception_handler(request, error)


def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return _ours(request, parameter_error(error.errors()[0]))


def _unknown(request: Request, error: Exception) -> JSONResponse:
    # uvicorn logs the traceback; the client sees no internals
    text = f"the service failed: {type(error).__name__}"
    return error_response(request.url.path, 500, text, {"Connection": "close"})  # uvicorn closes it in any case

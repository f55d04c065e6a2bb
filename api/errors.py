"""The error tree as HTTP answers.

Bodies are JSON with a Content-Length, because the SDK takes an empty 400 for a proxy's answer. Errors of the user are
never 408, 409, 425, 429 or 5xx, most of which the SDK retries for minutes.
"""

from __future__ import annotations

import logging

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect

from tinkerflow.backend.errors import (
    BodyTooLargeError,
    ConflictError,
    NotFoundError,
    TinkerflowError,
    TooManyError,
    UserError,
)

log = logging.getLogger(__name__)

_STATUS: tuple[tuple[type[TinkerflowError], int], ...] = (
    (NotFoundError, 404),
    (ConflictError, 422),
    (BodyTooLargeError, 413),
    (TooManyError, 429),
    (UserError, 400),
)


def install(app: FastAPI) -> None:
    """Answer errors in our form."""
    app.add_exception_handler(TinkerflowError, _ours)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(Exception, _unknown)


def _ours(request: Request, error: Exception) -> JSONResponse:
    status = next((code for kind, code in _STATUS if isinstance(error, kind)), 503)
    if status == 503:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return JSONResponse({"detail": str(error)}, status, {"Retry-After": "1"} if status == 429 else None)


def _gone(request: Request, error: Exception) -> Response:
    # The client left before its whole request had arrived. Nothing was done, and nobody reads this answer.
    log.debug("%s %s: the client went away", request.method, request.url.path)
    return Response(status_code=499)


def _unknown(request: Request, error: Exception) -> JSONResponse:
    # uvicorn logs the traceback; the client sees no internals
    return JSONResponse({"detail": f"the service failed: {type(error).__name__}"}, 500)

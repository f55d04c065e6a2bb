"""The OpenAPI document, and bodies in it.

Routes read their bodies themselves (`api/call.py`), so FastAPI does not see them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import orjson
from fastapi import FastAPI
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.requests import Request


def serve_document(app: FastAPI) -> None:
    """Serve the document of `app`, whose openapi_url is None. FastAPI would encode it again for each stranger."""

    @cache
    def encoded() -> bytes:
        return orjson.dumps(app.openapi())

    async def document(request: Request) -> Response:
        return Response(encoded(), media_type="application/json")

    app.add_route("/openapi.json", document, include_in_schema=False)


def takes(*models: type[BaseModel]) -> dict[str, Any]:
    """A route's `openapi_extra` when its body is JSON with the fields of all `models`."""
    schemas = [model.model_json_schema() for model in models]
    properties: dict[str, Any] = {}
    for schema in schemas:
        properties |= _inlined(schema.get("properties", {}), schema.get("$defs", {}))
    required = sorted({name for schema in schemas for name in schema.get("required", [])})
    return _body("application/json", {"type": "object", "properties": properties, "required": required})


def takes_protobuf() -> dict[str, Any]:
    """A route's `openapi_extra` when its body is a message of tinker.proto."""
    return _body("application/x-protobuf", {"type": "string", "format": "binary"})


def takes_bytes() -> dict[str, Any]:
    """A route's `openapi_extra` when its body is a file."""
    return _body("application/octet-stream", {"type": "string", "format": "binary"})


def _body(media_type: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {media_type: {"schema": schema}}}}


def _inlined(schema: Any, defined: dict[str, Any]) -> Any:
    """The schema with its own definitions in the places that refer to them: references start at the whole document."""
    if isinstance(schema, list):
        return [_inlined(item, defined) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(defined[schema["$ref"].rsplit("/", 1)[1]], defined)
    # a discriminator's mapping refers to definitions as well, and oneOf says the same without it
    return {key: _inlined(value, defined) for key, value in schema.items() if key != "discriminator"}

"""The OpenAPI document, and its descriptions of request bodies.

Routes read their bodies themselves (`api/call.py`), so FastAPI cannot describe them.
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
    """Serve the document of `app`, whose openapi_url is None. FastAPI would encode it for each request."""

    @cache
    def encoded() -> bytes:
        return orjson.dumps(app.openapi())

    async def document(request: Request) -> Response:
        return Response(encoded(), media_type="application/json")

    app.add_route("/openapi.json", document, include_in_schema=False)


def takes(*models: type[BaseModel]) -> dict[str, Any]:
    """The `openapi_extra` of a route whose body is JSON with the fields of all `models`."""
    schemas = [model.model_json_schema() for model in models]
    properties: dict[str, Any] = {}
    for schema in schemas:
        properties |= _inlined(schema.get("properties", {}), schema.get("$defs", {}))
    required = sorted({name for schema in schemas for name in schema.get("required", [])})
    return _body("application/json", {"type": "object", "properties": properties, "required": required})


def takes_protobuf() -> dict[str, Any]:
    """The `openapi_extra` of a route whose body is a message of tinker.proto."""
    return _body("application/x-protobuf", {"type": "string", "format": "binary"})


def takes_bytes() -> dict[str, Any]:
    """The `openapi_extra` of a route whose body is a file."""
    return _body("application/octet-stream", {"type": "string", "format": "binary"})


def _body(media_type: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {media_type: {"schema": schema}}}}


def _inlined(schema: Any, defined: dict[str, Any]) -> Any:
    """The schema with its references replaced by `defined`, because references would start at the whole document."""
    if isinstance(schema, list):
        return [_inlined(item, defined) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(defined[schema["$ref"].rsplit("/", 1)[1]], defined)
    # A discriminator's mapping refers to definitions, too; oneOf is equivalent without it.
    return {key: _inlined(value, defined) for key, value in schema.items() if key != "discriminator"}

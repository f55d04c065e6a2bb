"""Bodies in the OpenAPI document. Routes read their bodies themselves (`api/call.py`), so FastAPI does not see them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


def takes(model: type[BaseModel]) -> dict[str, Any]:
    """A route's `openapi_extra` when its body is JSON that is parsed as `model`."""
    schema = model.model_json_schema()
    defined = schema.pop("$defs", {})
    return _body("application/json", _inlined(schema, defined))


def takes_object() -> dict[str, Any]:
    """A route's `openapi_extra` when its body is a JSON object that tinkerflow.backend.wire reads, field by field."""
    return _body("application/json", {"type": "object"})


def takes_protobuf() -> dict[str, Any]:
    """A route's `openapi_extra` when its body is a message of tinker.proto."""
    return _body("application/x-protobuf", {"type": "string", "format": "binary"})


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

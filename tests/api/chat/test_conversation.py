"""The JSON schema that a required tool call must match."""

from __future__ import annotations

from tinkerflow.api.chat.conversation import Tool, _call_schema
from tinkerflow.backend.spec.json_schemas import exact_schema


def test_references_in_tool_parameters_resolve_from_the_tool_schema() -> None:
    def tool(name: str, kind: str) -> Tool:
        return Tool(name, "", {"properties": {"x": {"$ref": "#/$defs/X"}}, "$defs": {"X": {"type": kind}}})

    schema = exact_schema(_call_schema([tool("a", "null"), tool("b", "boolean")])).schema
    calls = [each["properties"]["arguments"] for each in schema["anyOf"]]
    kinds = [schema["$defs"][call["properties"]["x"]["$ref"].removeprefix("#/$defs/")]["type"] for call in calls]
    assert kinds == ["null", "boolean"]

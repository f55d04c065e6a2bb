"""All others, whose chat templates know no tools: none, `tools` are refused. Reasoning is known by the template."""

from tinkerflow.api.chat.parsers import ParserSpec

PARSER = ParserSpec("plain")

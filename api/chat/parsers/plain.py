"""All other families, whose chat templates take no tools: none; `tools` are refused. Templates show if they reason."""

from tinkerflow.api.chat.parsers import ParserSpec

PARSER = ParserSpec("plain")

"""All other families: their chat templates take no tools, so `tools` are refused. The template shows if they reason."""

from tinkerflow.api.chat.parsers import ParserSpec

PARSER = ParserSpec("plain")

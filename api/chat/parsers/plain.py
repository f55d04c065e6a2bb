"""All other families: their chat templates take no tools, so `tools` are refused. Templates show if they reason."""

from tinkerflow.api.chat.parsers import ParserSpec

PARSER = ParserSpec("plain")

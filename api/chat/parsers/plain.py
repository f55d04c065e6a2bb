"""Models whose chat template knows no tools: content, after reasoning if the template knows that."""

from tinkerflow.api.chat.parsers import ParserSpec

PARSER = ParserSpec("plain")

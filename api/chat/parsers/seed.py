"""Seed-OSS: `<seed:tool_call>` around a call in Qwen3-Coder's form, and `<seed:think>` around reasoning."""

from tinkerflow.api.chat.parsers import ParserSpec
from tinkerflow.api.chat.parsers.qwen_xml import FUNCTION, calls_between

OPEN, CLOSE = "<seed:tool_call>", "</seed:tool_call>"
THINK = ("<seed:think>", "</seed:think>")
PARSER = ParserSpec(
    "seed", signs=(OPEN, FUNCTION), marks=(OPEN, CLOSE), think=THINK, parse=calls_between((OPEN, CLOSE))
)

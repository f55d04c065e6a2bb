"""MiniMax-M2: `<minimax:tool_call>` with `<invoke name="NAME">` and a `<parameter name="KEY">` for each argument.

Values are plain text. The tool's schema determines which of them are numbers, lists or objects.
"""

from tinkerflow.api.chat.parsers import ParserSpec
from tinkerflow.api.chat.parsers.qwen_xml import Tags, calls_between

OPEN, CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"
PARSER = ParserSpec(
    "minimax", signs=(OPEN,), marks=(OPEN, CLOSE), parse=calls_between((OPEN, CLOSE), tags=Tags.named()), calls=(OPEN,)
)

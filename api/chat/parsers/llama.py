"""Llama 3: the whole answer is `{"name": …, "parameters": {…}}`, or several such objects separated by `;`.

Otherwise `<|python_tag|>` precedes the calls.
"""

from tinkerflow.api.chat.parsers import ParserSpec
from tinkerflow.api.chat.reader import Reader, Steps, Tools

TAG = "<|python_tag|>"


def parse(reader: Reader, tools: Tools) -> Steps[None]:
    """Calls, if the answer begins with one; otherwise content, then calls if a tag ends it."""
    opening = ""
    if (yield from reader.peek()) != "{":
        if (yield from reader.until((TAG,))) is None:
            return
        opening = TAG
    while (yield from reader.call(opening)):
        if not (yield from reader.skip(";")) and (yield from reader.peek()) != "{":
            return
        opening = ""


PARSER = ParserSpec("llama", signs=("<|start_header_id|>", '"parameters": '), marks=(TAG,), parse=parse)

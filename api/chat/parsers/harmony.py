"""gpt-oss: messages in channels. `analysis` is reasoning, `final` is the answer, a call is addressed to its tool.

A call is `<|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>`. The
prompt ends after the first `<|start|>assistant`.
"""

import re

from tinkerflow.api.chat.events import ContentDelta, ReasoningDelta
from tinkerflow.api.chat.parsers import ParserSpec
from tinkerflow.api.chat.reader import Reader, Steps, Tools

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
TO = "to=functions."
_TO = re.compile(re.escape(TO) + r"([^\s<]+)")


def parse(reader: Reader, tools: Tools) -> Steps[None]:
    """Messages in sequence. Text outside messages is content."""
    while (mark := (yield from reader.until((CHANNEL, START, TO)))) is not None:
        taken = [mark]
        header, found = yield from reader.upto((MESSAGE,), taken)
        if found is None:
            yield from reader.refuse(taken)
            return
        if tools and (to := _TO.search(mark + header)):
            if (yield from reader.arguments(to[1], taken)):
                yield from reader.skip(CALL)
            continue
        channel = header.rpartition(CHANNEL)[2].strip()
        event = ReasoningDelta if channel.startswith("analysis") else ContentDelta
        reader.trim()
        yield from reader.until((END, RETURN, CALL), event)


MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, RETURN, CALL)
PARSER = ParserSpec("harmony", signs=(CHANNEL, MESSAGE), marks=MARKS, think=None, parse=parse)

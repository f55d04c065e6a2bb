"""DeepSeek V3.2 and V4: DSML, `invoke name="NAME"` with a `parameter name="KEY" string="true"` for each argument.

Values with `string="false"` are JSON.
"""

from tinkerflow.api.chat.parsers import ParserSpec
from tinkerflow.api.chat.parsers.qwen_xml import Tags, calls_between

TOKEN = "\uff5cDSML\uff5c"
BLOCKS = [(f"<{TOKEN}{name}>", f"</{TOKEN}{name}>") for name in ("function_calls", "tool_calls")]
PARSER = ParserSpec(
    "deepseek_dsml",
    signs=(TOKEN,),
    marks=(TOKEN,),
    parse=calls_between(*BLOCKS, tags=Tags.named(TOKEN)),
    calls=tuple(opening for opening, _ in BLOCKS),
)

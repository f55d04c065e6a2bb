"""Each family's parser finds reasoning, calls and content, regardless of how the text is split."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinkerflow.api.chat.events import ArgumentsDelta, CallBreaks, ContentDelta, Event, FullAnswer
from tinkerflow.api.chat.parsers import PARSERS, Parser, parser_for
from tinkerflow.api.chat.reader import typed

TOOLS = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "at": {"type": "array"},
        },
    },
    "stop": {"type": "object", "properties": {}},
}
D = {
    name: f"<\uff5ctool▁{name.replace(' ', '▁')}\uff5c>"
    for name in ("calls begin", "calls end", "call begin", "call end", "sep")
}


@dataclass(frozen=True)
class Case:
    family: str
    text: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, dict[str, object]], ...] = ()
    opened: bool = field(default=False)


PARIS = ("weather", {"city": "Paris", "days": 3})
OSLO = ("weather", {"city": "Oslo", "days": 1})
STOP: tuple[str, dict[str, object]] = ("stop", {})
XML = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
GLM = (
    "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)
GEMMA = '<|tool_call>call:weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>'
JSON = '{"name": "weather", "arguments": {"city": "Paris", "days": 3}}'
OTHER = '{"name": "weather", "arguments": {"city": "Oslo", "days": 1}}'
ARGS = '{"city": "Paris", "days": 3}'
OLMO = "weather(city='Paris', days=3)"
DSML = "\uff5cDSML\uff5c"
DSML_PARIS = (
    f'<{DSML}invoke name="weather">\n<{DSML}parameter name="city" string="true">Paris</{DSML}parameter>\n'
    f'<{DSML}parameter name="days" string="false">3</{DSML}parameter>\n</{DSML}invoke>'
)
DSML_STOP = f'<{DSML}invoke name="stop">\n</{DSML}invoke>'
MINIMAX = (
    '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Paris</parameter>\n'
    '<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>'
)
CASES = [
    Case("plain", "  Hello <there> \n", content="  Hello <there> \n"),
    Case("plain", "<think>\nhm\n</think>\n\nYes.", content="Yes.", reasoning="hm"),
    Case("plain", "so\n</think>\n\nYes.", content="Yes.", reasoning="so", opened=True),
    Case("plain", "<think>never ends", reasoning="never ends"),
    Case("plain", "I <think> not", content="I <think> not"),
    Case("hermes", f"<tool_call>\n{JSON}\n</tool_call>", calls=(PARIS,)),
    Case("hermes", f"<tool_call>{JSON}", calls=(PARIS,)),
    Case(
        "hermes",
        f"Sure. \n<tool_call>\n{JSON}\n</tool_call>\n<tool_call>{OTHER}</tool_call>\n",
        "Sure.",
        calls=(PARIS, OSLO),
    ),
    Case("hermes", f"<think>\nhm\n</think>\n\nA\n<tool_call>\n{JSON}\n</tool_call> B", "AB", "hm", (PARIS,)),
    Case(
        "hermes",
        '<tool_call>{"arguments": {"city": "é"}, "name": "weather"}</tool_call>',
        calls=(("weather", {"city": "é"}),),
    ),
    Case(
        "hermes",
        '<tool_call>{"name": "weather", "arguments": "{\\"days\\": 1}"}</tool_call>',
        calls=(("weather", {"days": 1}),),
    ),
    Case("hermes", '<tool_call>{"name": "stop"}</tool_call>', calls=(("stop", {}),)),
    Case("hermes", '<tool_call>{"name": "stop", "arguments": {}, "id": 3}</tool_call>', calls=(("stop", {}),)),
    Case(
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"city": "}</tool_call>\\""}}',
        calls=(("weather", {"city": '}</tool_call>"'}),),
    ),
    # Malformed calls are content.
    Case("hermes", "<tool_call>\nnothing</tool_call> x", "<tool_call>\nnothing</tool_call> x"),
    Case(
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"city": "Par',
        '<tool_call>{"name": "weather", "arguments": {"city": "Par',
    ),
    Case(
        "hermes",
        f'<tool_call>{{"name": "stop", "arguments": {{"a": 1}}</tool_call> <tool_call>{JSON}',
        '<tool_call>{"name": "stop", "arguments": {"a": 1}</tool_call>',
        calls=(PARIS,),
    ),
    Case(
        "hermes",
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
    ),
    Case(
        "hermes",
        '<tool_call>{"name": "stop", "arguments": {"a": tru}}',
        '<tool_call>{"name": "stop", "arguments": {"a": tru}}',
    ),
    Case(
        "hermes",
        '<tool_call>{"name": "a", "arguments": {}, "name": "b"}',
        '<tool_call>{"name": "a", "arguments": {}, "name": "b"}',
    ),
    Case("hermes", "<tool_call>" + '{"a":' * 5000, "<tool_call>" + '{"a":' * 5000),
    Case("qwen_xml", XML, calls=(PARIS,)),
    Case("qwen_xml", f"Well\n{XML}\n{XML.removeprefix('<tool_call>')}", "Well", calls=(PARIS, PARIS)),
    Case("qwen_xml", "<tool_call><function=stop></function></tool_call>", calls=(("stop", {}),)),
    Case(
        "qwen_xml",
        "<function=weather><parameter=city>3</parameter><parameter=at>[1, 2]<parameter=units>null</function>",
        calls=(("weather", {"city": "3", "at": [1, 2], "units": None}),),
    ),
    Case(
        "qwen_xml",
        "<function=other><parameter=a>True</parameter><parameter=b>x y\nz</function>",
        calls=(("other", {"a": True, "b": "x y\nz"}),),
    ),
    Case("qwen_xml", XML[:-30], XML[:-30]),
    Case("qwen_xml", "<tool_call>\nwhat", "<tool_call>\nwhat"),
    Case(
        "seed",
        f"<seed:think>hm</seed:think>So{XML.replace('tool_call', 'seed:tool_call')}",
        "So",
        "hm",
        calls=(PARIS,),
    ),
    Case("glm", f"<think>hm</think>\n{GLM}\n{GLM}", "", "hm", (PARIS, PARIS)),
    Case("glm", "<tool_call>stop</tool_call>", calls=(("stop", {}),)),
    Case("glm", "<tool_call>a b</tool_call>c", "<tool_call>a b</tool_call>c"),
    Case("glm", GLM[:-20], GLM[:-20]),
    Case("llama", JSON.replace("arguments", "parameters"), calls=(PARIS,)),
    Case("llama", f"<|python_tag|>{JSON}; {OTHER}", calls=(PARIS, OSLO)),
    Case("llama", '{"answer": [1, 2]} is it', '{"answer": [1, 2]} is it'),
    Case("llama", "Hi {there}", "Hi {there}"),
    Case("llama", "<|python_tag|>print(1)", "<|python_tag|>print(1)"),
    Case("mistral", f"[TOOL_CALLS] [{JSON}, {OTHER}]", calls=(PARIS, OSLO)),
    Case(
        "mistral",
        f"[THINK]hm[/THINK]So[TOOL_CALLS]weather[CALL_ID]a1b2c3[ARGS]{ARGS}[TOOL_CALLS]stop{{}}",
        "So",
        "hm",
        (PARIS, ("stop", {})),
    ),
    Case("mistral", "[TOOL_CALLS] what is this", "[TOOL_CALLS] what is this"),
    Case(
        "deepseek",
        f"Ok{D['calls begin']}{D['call begin']}function{D['sep']}weather\n"
        f"```json\n{ARGS}\n```{D['call end']}{D['calls end']}",
        "Ok",
        calls=(PARIS,),
    ),
    Case(
        "deepseek",
        f"{D['calls begin']}{D['call begin']}weather{D['sep']}{ARGS}{D['call end']}"
        f"{D['call begin']}stop{D['sep']}{{}}{D['call end']}{D['calls end']}",
        calls=(PARIS, ("stop", {})),
    ),
    Case(
        "deepseek",
        f"{D['call begin']}function{D['sep']}weather\nnone",
        f"{D['call begin']}function{D['sep']}weather\nnone",
    ),
    Case(
        "harmony",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.weather <|constrain|>json<|message|>{ARGS}<|call|>",
        reasoning="hm",
        calls=(PARIS,),
    ),
    Case(
        "harmony",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
        "Yes.",
        "hm",
    ),
    Case("harmony", " to=functions.stop<|channel|>commentary<|message|>{}<|call|>", calls=(("stop", {}),)),
    Case("harmony", "No channel at all", "No channel at all"),
    Case("harmony", "<|channel|>fin", "<|channel|>fin"),
    # Output known from real models: forms of parallel calls, orders of keys, white space, unclosed reasoning.
    Case("hermes", f"I look\n\n<tool_call>\n{JSON}\n</tool_call>", "", "I look", (PARIS,), opened=True),
    Case("hermes", f"<think>so<tool_call>{JSON}</tool_call>", "", "so", (PARIS,)),
    Case("hermes", "in <tool_call> tags\n</think>\n\nOk", "Ok", "in <tool_call> tags", opened=True),
    Case("hermes", f"\n</think>\n\n<tool_call>\n{JSON}\n</tool_call>", calls=(PARIS,), opened=True),
    Case("hermes", "<think>\n\n</think>\n\nOk", "Ok"),
    Case("hermes", '<tool_call>\n{"name": "stop", "arguments": null}\n</tool_call>', calls=(STOP,)),
    Case("qwen_xml", f"I look.\n\n{XML}", "", "I look.", (PARIS,), opened=True),
    Case("qwen_xml", f"hm\n</think>\n\n{XML}", "", "hm", (PARIS,), opened=True),
    Case(
        "qwen_xml",
        "<tool_call>\n<function=weather>\n<parameter=city>\nA\n\nB\n</parameter>\n"
        "<parameter=units>\nnone\n</parameter>\n</function>\n</tool_call>",
        calls=(("weather", {"city": "A\n\nB", "units": "none"}),),
    ),
    Case("glm", f"\nhm</think>\n{GLM}", "", "hm", (PARIS,), opened=True),
    Case("glm", "  \n <tool_call>stop\n</tool_call>", calls=(STOP,)),
    Case("glm", f"Look.{GLM}".replace("\n", ""), "Look.", calls=(PARIS,)),
    *(
        Case("llama", f'{{"name": "stop", "parameters": {{}}}}{between}{JSON}', calls=(STOP, PARIS))
        for between in (";", "; ", " ; ", ";\n", "\n")
    ),
    Case("llama", '{"type": "function", "name": "stop", "parameters": {}}', calls=(STOP,)),
    Case("llama", '{"name": "stop", "parameters": {}} by {stop}', " by {stop}", calls=(STOP,)),
    Case("llama", '{"name": "stop"}', '{"name": "stop"}'),
    Case("llama", '{"parameters": {}}', '{"parameters": {}}'),
    Case("llama", '{"name": "stop", "parameters": {oops}', '{"name": "stop", "parameters": {oops}'),
    Case(
        "mistral",
        '[TOOL_CALLS][{"arguments": {"name": "Al"}, "name": "stop"}]\nmore',
        "more",
        calls=(("stop", {"name": "Al"}),),
    ),
    Case("mistral", f'Hi[TOOL_CALLS] [{JSON[:-1]}, "id": "abc123def"}}]', "Hi", calls=(PARIS,)),
    Case("mistral", f"[TOOL_CALLS]weather{ARGS}[TOOL_CALLS]stop{{}}", calls=(PARIS, STOP)),
    Case("mistral", f"[THINK]hm[TOOL_CALLS]weather[ARGS]{ARGS}", "", "hm", (PARIS,)),
    Case(
        "deepseek",
        f"<think>hm</think>\n{D['calls begin']}"
        + "\n".join(
            f"{D['call begin']}function{D['sep']}{name}\n```json\n{values}\n```{D['call end']}"
            for name, values in (("weather", ARGS), ("stop", "{}"))
        )
        + D["calls end"],
        "",
        "hm",
        (PARIS, STOP),
    ),
    Case(
        "deepseek",
        f"hm{D['calls begin']}{D['call begin']}stop{D['sep']}{{}}{D['call end']}{D['calls end']}",
        "",
        "hm",
        (STOP,),
        opened=True,
    ),
    Case(
        "harmony",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant to=functions.stop<|channel|>commentary json<|message|>{}<|call|>"
        f"<|start|>assistant<|channel|>commentary to=functions.weather<|message|>\n{ARGS}<|call|>",
        "I look.",
        "hm",
        (STOP, PARIS),
    ),
    Case("harmony", "<|channel|>analysis to=functions.stop code<|message|>{}<|call|>", calls=(STOP,)),
    Case("harmony", '<|channel|>final <|constrain|>json<|message|>{"a": 1}<|return|>', '{"a": 1}'),
    Case(
        "seed",
        "<seed:think>a<seed:cot_budget_reflect>b</seed:cot_budget_reflect></seed:think>\n"
        + XML.replace("tool_call", "seed:tool_call"),
        "",
        "a<seed:cot_budget_reflect>b</seed:cot_budget_reflect>",
        (PARIS,),
    ),
    Case("olmo3", f"<function_calls>{OLMO}</function_calls>", calls=(PARIS,)),
    Case("olmo3", f"Sure.\n<function_calls>stop()\n{OLMO}</function_calls> So.", "Sure.So.", calls=(STOP, PARIS)),
    Case("olmo3", f"hm</think><function_calls>\n{OLMO}\n</function_calls>", "", "hm", (PARIS,), opened=True),
    Case(
        "olmo3",
        "<function_calls>add-user.x(name=\"J\\u00f6\", n=[-1, 2.5, {'a': (None, null)}], "
        "ok=True, no=false, r='\\d\\n',)</function_calls>",
        calls=(
            ("add-user.x", {"name": "Jö", "n": [-1, 2.5, {"a": [None, None]}], "ok": True, "no": False, "r": "\\d\n"}),
        ),
    ),
    Case(
        "olmo3",
        """<function_calls>weather(city='Martha\\'s Vineyard', units='\\"cool\\"')</function_calls>""",
        calls=(("weather", {"city": "Martha's Vineyard", "units": '"cool"'}),),
    ),
    # An invalid call does not drop valid calls.
    Case("olmo3", f"<function_calls>bad(x=b'z')\n{OLMO}</function_calls>", "bad(x=b'z')\n", calls=(PARIS,)),
    Case("olmo3", f"<function_calls>calc(x=1e999)\n{OLMO}</function_calls>", "calc(x=1e999)\n", calls=(PARIS,)),
    Case("olmo3", "<function_calls>foo(x=1])</function_calls>", "<function_calls>foo(x=1])</function_calls>"),
    Case("olmo3", f"<function_calls>{OLMO}", f"<function_calls>{OLMO}"),
    Case("olmo3", f"<function_calls>f(a={'[' * 999}", f"<function_calls>f(a={'[' * 999}"),
    Case("phi4", f"<|tool_call|>[{JSON}, {OTHER}]<|/tool_call|>", calls=(PARIS, OSLO)),
    Case("phi4", f"<|tool_call|>{JSON}<|/tool_call|>", calls=(PARIS,)),
    Case("phi4", f"functools[\n  {JSON},\n  {OTHER}\n]", calls=(PARIS, OSLO)),
    Case("phi4", f"Let me check.\nfunctools[{JSON}]\nMore?", "Let me check.More?", calls=(PARIS,)),
    Case("phi4", 'functools[{"name": "func", "arguments": {', 'functools[{"name": "func", "arguments": {'),
    Case("phi4", 'functools{"name": "func"}', 'functools{"name": "func"}'),
    Case("phi4", "functools[] This is text", "functools[] This is text"),
    Case(
        "deepseek_dsml",
        f"Sure!\n\n<{DSML}function_calls>\n{DSML_PARIS}\n{DSML_STOP}\n</{DSML}function_calls>",
        "Sure!",
        calls=(PARIS, STOP),
    ),
    Case("deepseek_dsml", f"<{DSML}tool_calls>{DSML_PARIS}</{DSML}tool_calls>", calls=(PARIS,)),
    Case("deepseek_dsml", f"hm<{DSML}function_calls>\n{DSML_STOP}", "", "hm", (STOP,), opened=True),
    Case(
        "deepseek_dsml",
        f'<{DSML}invoke name="other"><{DSML}parameter name="a" string="true">007\n</{DSML}parameter>'
        f'<{DSML}parameter name="b" string="false">{{"raw": [true]}}</{DSML}parameter></{DSML}invoke>',
        calls=(("other", {"a": "007\n", "b": {"raw": [True]}}),),
    ),
    Case(
        "deepseek_dsml",
        f'<{DSML}invoke name="weather"><{DSML}parameter name="days" string="true">3</{DSML}parameter></{DSML}invoke>',
        calls=(("weather", {"days": 3}),),
    ),
    Case("deepseek_dsml", f"<{DSML}function_calls>\n{DSML_PARIS[:-9]}", f"<{DSML}function_calls>\n{DSML_PARIS[:-9]}"),
    Case("minimax", f"<think>\nhm\n</think>\n\nSo {MINIMAX}", "So", "hm", (PARIS,)),
    Case("minimax", f"hm {MINIMAX}\n", "", "hm", (PARIS,), opened=True),
    Case(
        "minimax",
        '<minimax:tool_call><invoke name="stop"></invoke><invoke name="weather">'
        '<parameter name="city">{"a": 1}</parameter></invoke></minimax:tool_call>',
        calls=(STOP, ("weather", {"city": '{"a": 1}'})),
    ),
    Case("minimax", "<minimax:tool_call>\nwhat", "<minimax:tool_call>\nwhat"),
    Case("gemma4", f"<|channel>thought\nhm<channel|>Look.{GEMMA}", "Look.", "hm", (PARIS,)),
    Case("gemma4", f"<|channel>thought\n<channel|>{GEMMA}<|tool_call>call:stop{{}}<tool_call|>", calls=(PARIS, STOP)),
    Case("gemma4", f"hm{GEMMA}", "", "hm", (PARIS,), opened=True),
    Case(
        "gemma4",
        '<|tool_call>call:stop{a:<|"|>say "x:{y}"<|"|>,b:[1,-2.5e3,true,None,<|"|><|"|>],<|"|>c d<|"|>:{e:"f,"}}'
        "<tool_call|>",
        calls=(("stop", {"a": 'say "x:{y}"', "b": [1, -2500.0, True, None, ""], "c d": {"e": "f,"}}),),
    ),
    *(
        Case("gemma4", text, text)
        for text in (
            "<|tool_call>call:stop{a:1",
            "<|tool_call>call:stop{a:oops}<tool_call|>",
            "<|tool_call>call:stop{a:NaN}<tool_call|>",
            "<|tool_call>call:stop{1}<tool_call|>",
            "<|tool_call>stop{}<tool_call|>",
            "<|tool_call>call:{}<tool_call|>",
            "<|tool_call>call:stop" + "{a:" * 3000 + "<tool_call|>",
        )
    ),
]


def read(case: Case, pieces: list[str]) -> tuple[FullAnswer, list[Event]]:
    parser = Parser(PARSERS[case.family], TOOLS, thinks=True, opened=case.opened)
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.end()
    return answer_from(events), events


def answer_from(events: list[Event]) -> FullAnswer:
    """The answer that these events form. Asserts that each call has ended or broken."""
    said = FullAnswer()
    for event in events:
        said.add(event)
    assert said._open is None
    return said


def facts(said: FullAnswer) -> tuple[str, str, tuple[tuple[str, dict[str, object]], ...]]:
    return said.content, said.reasoning, tuple((call.name, call.values) for call in said.calls)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.family}-{case.text[:30]}")
def test_an_answer_is_read(case: Case) -> None:
    said, _ = read(case, [case.text])
    assert facts(said) == (case.content, case.reasoning, case.calls)
    assert facts(read(case, list(case.text))[0]) == facts(said)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.family}-{case.text[:30]}")
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_split_of_the_text_does_not_change_the_parse(case: Case, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(case.text)), max_size=12)))
    pieces = [case.text[a:b] for a, b in zip([0, *cuts], [*cuts, len(case.text)], strict=True)]
    assert read(case, pieces)[0] == read(case, [case.text])[0]


WORDS = [
    "<think>",
    "</think>",
    "\n",
    " ",
    "a",
    '"',
    "\\",
    "{",
    "}",
    "[",
    "]",
    ":",
    ",",
    JSON,
    ARGS,
    "=",
    ">",
    ";",
    "name",
    "1",
    '{"name": "stop", "arguments": {',
    '{"name": "stop", "arguments": {}}',
    XML[:40],
    GLM[:40],
    "```json",
    "```",
    "\ufffd",
]
TAGS = [
    "<function=",
    "<parameter=",
    "</parameter>",
    "</function>",
    '<invoke name="',
    "</invoke>",
    f'<{DSML}invoke name="stop">',
    f"</{DSML}invoke>",
    OLMO,
    "functools[",
]


@pytest.mark.parametrize("family", sorted(PARSERS))
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_split_of_any_text_gives_the_same_parse(family: str, data: st.DataObject) -> None:
    words = st.sampled_from([*WORDS, *PARSERS[family].marks, *TAGS])
    pieces = data.draw(st.lists(words | st.text(max_size=3), max_size=12))
    case = Case(family, "".join(pieces), opened=data.draw(st.booleans()))
    whole, _ = read(case, [case.text])
    assert read(case, pieces)[0] == whole
    assert read(case, list(case.text))[0] == whole
    assert all(isinstance(json.loads(call.arguments), dict) for call in whole.calls)


def test_arguments_and_content_are_passed_on_before_the_call_or_the_answer_ends() -> None:
    parser = Parser(PARSERS["hermes"], TOOLS, thinks=True, opened=False)
    assert parser.feed("Well") == [ContentDelta("Well")]
    parser.feed('<tool_call>{"name": "weather", "arguments": {"ci')
    assert parser.feed("ty") == [ArgumentsDelta("ty")]


def test_call_that_breaks_after_its_beginning_is_reported() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"city": oops'
    said, events = read(Case("hermes", text), [text])
    assert any(isinstance(event, CallBreaks) for event in events)
    assert facts(said) == (text, "", ())


def test_text_without_tools_contains_no_call() -> None:
    for family, spec in PARSERS.items():
        text = f"{spec.opening}{JSON}" if spec.think else f"<|channel|>final<|message|>{JSON}<|end|>"
        parser = Parser(spec, {}, thinks=True, opened=False)
        said = answer_from(parser.feed(text) + parser.end())
        assert not said.calls, family
        assert JSON in said.content


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("{{ messages }}", "plain"),
        ('… <tool_call>\\n{"name": …', "hermes"),
        ("… <tool_call> … <function=example", "qwen_xml"),
        ("… <tool_call> … <arg_key>", "glm"),
        ("… <seed:tool_call> … <function=example", "seed"),
        ("[TOOL_CALLS] …", "mistral"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "harmony"),
        ('<|start_header_id|> … {"name": function name, "parameters": dictionary', "llama"),
        (f"… {D['calls begin']} …", "deepseek"),
        ("… <functions> … <function_calls> …", "olmo3"),
        ("… '<|tool|>' + message['tools'] + '<|/tool|>' …", "phi4"),
        (f"{{% set dsml_token = '{DSML}' %}} … </think>", "deepseek_dsml"),
        ("… <minimax:tool_call> … <think>", "minimax"),
    ],
)
def test_parser_is_chosen_by_the_template(template: str, family: str) -> None:
    assert parser_for(template).name == family


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "1e999", "[1, Infinity]"])
def test_non_json_numbers_are_parsed_as_text(text: str) -> None:
    assert typed(text, {}) == text
    call = f'<tool_call>\n{{"name": "f", "arguments": {{"x": {text}}}}}\n</tool_call>'
    parser = Parser(PARSERS["hermes"], {"f": {}}, thinks=False, opened=False)
    assert not answer_from([*parser.feed(call), *parser.end()]).calls


def test_phi_gets_its_tools_and_calls_as_text() -> None:
    prepared = PARSERS["phi4"].prepared
    assert prepared is not None
    function = {"name": "stop", "description": "é", "parameters": {"type": "object"}}
    call = {"id": "1", "type": "function", "function": {"name": "stop", "arguments": {"city": "Köln"}}}
    user, said = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "So", "tool_calls": [call]}
    system, first, second = prepared([user, said], [{"type": "function", "function": function}])
    assert (system["role"], system["content"], json.loads(system["tools"]), first) == ("system", "", [function], user)
    assert second["content"] == 'So<|tool_call|>[{"name": "stop", "arguments": {"city": "Köln"}}]<|/tool_call|>'
    text, events = second["content"], Parser(PARSERS["phi4"], TOOLS, thinks=False, opened=False)
    assert answer_from([*events.feed(text), *events.end()]).calls[0].values == {"city": "Köln"}
    (only,) = prepared([{"role": "system", "content": "Be."}], [{"type": "function", "function": function}])
    assert only["content"] == "Be." and "tools" in only
    assert prepared([user], []) == [user]


def test_template_that_opens_reasoning_marks_the_model_as_reasoning() -> None:
    assert PARSERS["olmo3"].thinks("<function_calls> … <|im_start|>assistant\n<think>")
    assert not PARSERS["olmo3"].thinks("<function_calls> … <|im_start|>assistant\n")

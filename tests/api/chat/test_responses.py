"""The responses endpoint through OpenAI's own client: the answers of chat completions, as items and events."""

from __future__ import annotations

import json
from typing import Any

import openai
from tests.api.chat.conftest import END, Speaker
from tests.api.chat.test_openai import CALL
from tests.api.conftest import BASE

TOOLS: Any = [
    {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}, "strict": False}
]
TEXT = f"<think>\nhm\n</think>\n\nLet me see.\n{CALL}{END}"


def test_an_answer(gpt: openai.OpenAI, speaker: Speaker) -> None:
    speaker.says(f"Hello 🐻{END}")
    done = gpt.responses.create(
        model=BASE, input="Hi", instructions="Be.", temperature=0.5, max_output_tokens=9, store=False
    )
    assert (done.output_text, done.status, done.model) == ("Hello 🐻", "completed", BASE)
    assert speaker.prompt == f"<|im_start|>system\nBe.{END}\n<|im_start|>user\nHi{END}\n<|im_start|>assistant\n"
    assert (speaker.params.temperature, speaker.params.max_tokens) == (0.5, 9)
    assert done.usage is not None
    assert (done.usage.input_tokens, done.usage.input_tokens_details.cached_tokens) == (len(speaker.tokens), 2)
    speaker.says("cut", reason="length")
    cut: Any = gpt.responses.create(model=BASE, input="Hi")
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert [item.status for item in cut.output] == ["incomplete"]


def test_answers_and_events_have_all_fields_that_the_client_requires(gpt: openai.OpenAI, speaker: Speaker) -> None:
    for text, reason in ((TEXT, "stop"), (f"<think>\nhm\n</think>\n\nLet {CALL} x", "length")):
        asked: Any = {"model": BASE, "input": "Hi", "tools": TOOLS}
        speaker.says(text, reason=reason)
        answers: list[Any] = [gpt.responses.create(**asked)]
        speaker.says(text, reason=reason)
        answers += gpt.responses.create(**asked, stream=True)
        assert len(answers) > 10
        for answer in answers:
            type(answer).model_validate(answer.to_dict())


def test_reasoning_and_calls_are_items_whole_and_streamed(gpt: openai.OpenAI, speaker: Speaker) -> None:
    speaker.says(TEXT)
    done: Any = gpt.responses.create(model=BASE, input="Hi", tools=TOOLS)
    reasoning, message, call = done.output
    assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "hm")
    assert (message.type, message.content[0].text) == ("message", "Let me see.")
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", {"city": "Köln"})
    speaker.says(TEXT)
    with gpt.responses.stream(model=BASE, input="Hi", tools=TOOLS) as stream:
        events = list(stream)
        again: Any = stream.get_final_response()
    shown = [
        [item.model_dump(exclude={"id", "call_id", "parsed_arguments"}) for item in one.output] for one in (done, again)
    ]
    assert done.usage.output_tokens_details.reasoning_tokens == len(speaker.tokenizer.encode("hm").ids) > 0
    assert [item["type"] for item in shown[1]] == ["reasoning", "message", "function_call"]
    assert again.output_text == done.output_text
    assert again.output[2].arguments == call.arguments
    assert [event.sequence_number for event in events if hasattr(event, "sequence_number")] == sorted(
        event.sequence_number for event in events if hasattr(event, "sequence_number")
    )
    assert [events[0].type, events[1].type, events[-1].type] == [
        "response.created", "response.in_progress", "response.completed",
    ]  # fmt: skip


def test_the_items_of_an_answer_are_part_of_the_next_prompt(gpt: openai.OpenAI, speaker: Speaker) -> None:
    speaker.says(TEXT)
    done = gpt.responses.create(model=BASE, input="Hi", tools=TOOLS)
    call: Any = done.output[2]
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        *(item.model_dump(exclude_none=True) for item in done.output),
        {"type": "function_call_output", "call_id": call.call_id, "output": "wet"},
    ]
    speaker.says(f"Rain.{END}")
    assert gpt.responses.create(model=BASE, input=items, tools=TOOLS).output_text == "Rain."
    assert (
        f"<|im_start|>assistant\n<think>\nhm\n</think>\n\nLet me see.{CALL}{END}\n<|im_start|>tool\nwet{END}"
        in speaker.prompt
    )


def test_consecutive_answers_all_reach_the_prompt(gpt: openai.OpenAI, speaker: Speaker) -> None:
    speaker.says(f"ok{END}")
    gpt.responses.create(
        model=BASE,
        input=[
            {"role": role, "content": said}
            for role, said in (("user", "Hi"), ("assistant", "One"), ("assistant", "Two"), ("user", "Go"))
        ],
    )
    assert f"assistant\nOne{END}\n<|im_start|>assistant\nTwo{END}" in speaker.prompt


def test_broken_call_is_text_and_its_format_is_kept(gpt: openai.OpenAI, speaker: Speaker) -> None:
    speaker.says(CALL[:45])
    with gpt.responses.stream(model=BASE, input="Hi", tools=TOOLS) as stream:
        list(stream)
        broken = stream.get_final_response()
    assert broken.output_text == CALL[:45]
    speaker.says('{"a": 1}')
    schema: Any = {"type": "object", "properties": {"a": {"type": "integer"}}}
    gpt.responses.create(
        model=BASE, input="Hi", text={"format": {"type": "json_schema", "name": "x", "schema": schema}}
    )
    assert speaker.params.constraint.value == schema
    speaker.says('{"name": "weather", "arguments": {}}')
    done: Any = gpt.responses.create(
        model=BASE, input="Hi", tools=TOOLS, tool_choice={"type": "function", "name": "weather"}
    )
    assert done.output[0].name == "weather"


def test_groups_of_functions_and_other_fields_that_codex_sends(gpt: openai.OpenAI, speaker: Speaker) -> None:
    spawn = {"type": "function", "name": "weather", "description": "Look", "parameters": {"type": "object"}}
    tools: Any = [
        *TOOLS,
        {"type": "namespace", "name": "agents", "description": "Others", "tools": [spawn]},
        {"type": "web_search", "external_web_access": False},
    ]
    asked: Any = {"model": BASE, "input": "Hi", "tools": tools, "include": ["reasoning.encrypted_content"]}
    more = {"client_metadata": {"turn": "1"}, "reasoning": {"summary": "auto"}, "prompt_cache_key": "x"}
    speaker.says(f"{CALL.replace('weather', 'agents__weather')}\n{CALL}{END}")
    done: Any = gpt.responses.create(**asked, extra_body=more)
    assert [(call.name, call.namespace) for call in done.output] == [("weather", "agents"), ("weather", None)]
    assert '"agents__weather"' in speaker.prompt
    assert "web_search" not in speaker.prompt
    speaker.says(f"{CALL.replace('weather', 'agents__weather')}{END}")
    with gpt.responses.stream(**asked, extra_body=more) as stream:
        (call,) = stream.get_final_response().output
    assert (call.type == "function_call") and (call.name, call.namespace) == ("weather", "agents")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "wet"}
    speaker.says(f"It rains.{END}")
    gpt.responses.create(model=BASE, tools=tools, input=[call.model_dump(exclude_none=True), output])
    assert '{"name": "agents__weather", "arguments": {"city": "Köln"}}' in speaker.prompt

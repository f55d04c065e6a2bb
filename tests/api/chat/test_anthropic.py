"""The messages endpoint through Anthropic's own client: answers, streams, tools, thinking, token counts and errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.api.chat.conftest import END, Speaker
from tests.api.chat.test_openai import CALL
from tests.api.conftest import BASE

HI: Any = [{"role": "user", "content": "Hi"}]
TOOLS: Any = [{"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}]
ASKED: Any = {"model": BASE, "messages": HI, "max_tokens": 50}
TEXT = f"<think>\nhm\n</think>\n\nLet me see.\n{CALL}{END}"


def test_an_answer(claude: Any, speaker: Speaker) -> None:
    speaker.says(f"Hello 🐻{END}")
    done = claude.messages.create(
        **ASKED,
        system=[{"type": "text", "text": "Be."}],
        stop_sequences=["!"],
        extra_body={"temperature": 0.5, "top_k": 3},
    )
    assert [block.to_dict() for block in done.content] == [{"type": "text", "text": "Hello 🐻"}]
    assert (done.role, done.stop_reason, done.stop_sequence, done.model) == ("assistant", "end_turn", None, BASE)
    assert done.usage.input_tokens + (done.usage.cache_read_input_tokens or 0) == len(speaker.tokens)
    assert speaker.prompt == f"<|im_start|>system\nBe.{END}\n<|im_start|>user\nHi{END}\n<|im_start|>assistant\n"
    assert (speaker.params.temperature, speaker.params.top_k, speaker.params.stop) == (0.5, 3, ["!"])
    speaker.says("a!b")
    stopped = claude.messages.create(**ASKED, stop_sequences=["!"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "!")
    speaker.says("a", reason="length")
    assert claude.messages.create(**(ASKED | {"max_tokens": 5000})).stop_reason == "max_tokens"
    assert speaker.params.max_tokens == 4096 - len(speaker.tokens)


def test_thinking_and_calls_are_blocks_whole_and_streamed(claude: Any, speaker: Speaker) -> None:
    speaker.says(TEXT)
    done = claude.messages.create(**ASKED, tools=TOOLS, thinking={"type": "enabled", "budget_tokens": 1024})
    thinking, text, call = done.content
    assert (thinking.type, text.type, call.type, done.stop_reason) == ("thinking", "text", "tool_use", "tool_use")
    assert (thinking.thinking, text.text, call.name, call.input) == ("hm", "Let me see.", "weather", {"city": "Köln"})
    speaker.says(TEXT)
    with claude.messages.stream(**ASKED, tools=TOOLS) as stream:
        again = stream.get_final_message()
    shown = [block.model_dump(exclude={"id", "signature", "parsed_output"}) for block in again.content]
    assert shown == [block.model_dump(exclude={"id", "signature"}) for block in done.content]
    assert (again.stop_reason, again.usage.output_tokens) == ("tool_use", done.usage.output_tokens)


def test_blocks_of_a_whole_answer_are_in_the_order_of_the_stream(claude: Any, speaker: Speaker) -> None:
    for text in (f"One.\n{CALL}\nTwo.{END}", f"{CALL}\nOne.\n{CALL}{END}"):
        speaker.says(text)
        done = claude.messages.create(**ASKED, tools=TOOLS)
        speaker.says(text)
        with claude.messages.stream(**ASKED, tools=TOOLS) as stream:
            again = stream.get_final_message()
        shown = [block.model_dump(exclude={"id", "parsed_output"}) for block in again.content]
        assert shown == [block.model_dump(exclude={"id"}) for block in done.content] and len(shown) == 3


def test_stream_events_follow_the_order_of_anthropic(post: Callable[..., Any], speaker: Speaker) -> None:
    speaker.says(TEXT)
    answer = post("messages", {**ASKED, "tools": TOOLS, "stream": True})
    assert answer.headers["x-accel-buffering"] == "no"
    parts = [part.split("\n") for part in answer.text.split("\n\n") if part]
    events = [json.loads(data.removeprefix("data: ")) for _, data in parts]
    assert [name.removeprefix("event: ") for name, _ in parts] == [event["type"] for event in events]
    kinds = [event["type"] for event in events if event["type"] != "ping"]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    signed = ["content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"]
    assert kinds == ["message_start", *signed, *block, *block, "message_delta", "message_stop"]
    starts = [event for event in events if event["type"] == "content_block_start"]
    assert [(event["index"], event["content_block"]["type"]) for event in starts] == [
        (0, "thinking"),
        (1, "text"),
        (2, "tool_use"),
    ]


def test_blocks_of_earlier_turns_are_part_of_the_prompt(claude: Any, speaker: Speaker) -> None:
    speaker.says(f"Rain.{END}")
    messages: Any = [
        *HI,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "text", "text": "So", "cache_control": {"type": "ephemeral"}},
                {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Köln"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "wet"}]},
                {"type": "text", "text": "And?"},
            ],
        },
        {"role": "assistant", "content": "It is "},
    ]
    done = claude.messages.create(model=BASE, max_tokens=9, messages=messages, tools=TOOLS)
    assert done.content[0].text == "Rain."  # type: ignore[union-attr]
    assert f"<|im_start|>assistant\n<think>\nhm\n</think>\n\nSo{CALL}{END}" in speaker.prompt
    assert speaker.prompt.endswith(f"tool\nwet{END}\n<|im_start|>user\nAnd?{END}\n<|im_start|>assistant\nIt is")


def test_answer_with_thinking_can_be_sent_in_the_next_turn(claude: Any, speaker: Speaker) -> None:
    asked: Any = {**ASKED, "tools": TOOLS, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    for stream in (False, True):
        speaker.says(TEXT)
        if stream:
            with claude.messages.stream(**asked) as events:
                said: Any = events.get_final_message()
        else:
            said = claude.messages.create(**asked)
        result = {"type": "tool_result", "tool_use_id": said.content[-1].id, "content": "wet", "is_error": False}
        turns = [*HI, {"role": "assistant", "content": said.content}, {"role": "user", "content": [result]}]
        speaker.says(f"Rain.{END}")
        done = claude.messages.create(**(asked | {"messages": turns}))
        assert [block.to_dict() for block in done.content] == [{"type": "text", "text": "Rain."}]
        assert f"<|im_start|>assistant\n<think>\nhm\n</think>\n\nLet me see.{CALL}{END}" in speaker.prompt
        assert f"<|im_start|>tool\nwet{END}" in speaker.prompt


def test_fields_that_coding_agents_always_send(claude: Any, speaker: Speaker) -> None:
    said = [{"role": "system", "content": [{"type": "text", "text": text}]} for text in ("Be brief.", "Be kind.")]
    asked: Any = {
        **ASKED,
        "messages": [said[0], *HI, said[1]],
        "tools": [{**tool, "eager_input_streaming": True} for tool in TOOLS],
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }
    speaker.says(TEXT)
    whole = claude.beta.messages.create(**asked)
    assert speaker.prompt.startswith("<|im_start|>system\nBe brief.")
    assert f"<|im_start|>user\nHi{END}\n<|im_start|>system\nBe kind.{END}\n" in speaker.prompt
    speaker.says(TEXT)
    with claude.beta.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    for done in (whole, streamed):
        assert done.context_management.applied_edits == []
        assert done.content[-1].name == "weather"


def test_token_count_equals_the_usage_of_the_answer(claude: Any, speaker: Speaker) -> None:
    speaker.says(f"x{END}")
    claude.messages.create(**ASKED, tools=TOOLS)
    counted = claude.messages.count_tokens(model=BASE, messages=HI, tools=TOOLS)
    assert counted.input_tokens == len(speaker.tokens)


def test_broken_call_is_returned_as_text(claude: Any, speaker: Speaker) -> None:
    for stream in (False, True):
        speaker.says(CALL[:45], reason="length")
        if stream:
            with claude.messages.stream(**ASKED, tools=TOOLS) as events:
                done: Any = events.get_final_message()
        else:
            done = claude.messages.create(**ASKED, tools=TOOLS)
        assert [(block.type, block.text) for block in done.content] == [("text", CALL[:45])]
        assert done.stop_reason == "max_tokens"


def test_unknown_models_and_keys_raise_errors_of_the_client_library(claude: Any, speaker: Speaker) -> None:
    import anthropic  # here, because the import takes seconds in each process that collects tests

    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(**(ASKED | {"model": "nobody"}))
    with pytest.raises(anthropic.AuthenticationError):
        claude.with_options(api_key="wrong").messages.create(**ASKED)
    (model,) = claude.models.list()
    assert (model.id, model.type, model.display_name, claude.models.retrieve(BASE)) == (BASE, "model", BASE, model)
    assert model.lifecycle == "active"


def test_error_for_a_missing_field_omits_the_request_body(post: Callable[..., Any]) -> None:
    answer = post("messages", {"model": BASE, "messages": HI})
    assert (answer.status_code, answer.json()["error"]["message"]) == (
        400,
        "max_tokens is missing: must be a whole number >= 1",
    )

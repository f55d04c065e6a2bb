"""Chat completions through OpenAI's own client: answers, streams, tools, logprobs and errors."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
import sqlalchemy as sa
from sqlmodel import col
from tests.api.chat.conftest import END, Speaker
from tests.api.conftest import BASE, KEY, Running

from tinkerflow.api.text import Detokenizer
from tinkerflow.backend.catalog.model_card import ModelCard
from tinkerflow.backend.core.errors import ServerError
from tinkerflow.backend.journal import Journal, Outcome, Pending
from tinkerflow.backend.journal.tables import Request

HI: Any = [{"role": "user", "content": "Hi"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "now",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


def streamed(stream: Any) -> tuple[str, str, list[dict[str, str]], str, list[Any]]:
    """A stream's content, reasoning, calls, finish reason and chunks."""
    content, reasoning, calls, finish, chunks = "", "", [], "", []
    for chunk in stream:
        chunks.append(chunk)
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or []:
                if call.id:
                    assert call.index == len(calls)
                    calls.append({"name": call.function.name, "arguments": ""})
                calls[call.index]["arguments"] += call.function.arguments
            finish = choice.finish_reason or finish
    return content, reasoning, calls, finish, chunks


def test_an_answer(gpt: openai.OpenAI, speaker: Speaker) -> None:
    speaker.says(f"Hello 🐻{END}")
    done = gpt.chat.completions.create(
        model=BASE, messages=[{"role": "developer", "content": "Be."}, *HI], temperature=0.5, max_tokens=9
    )
    (choice,) = done.choices
    assert (choice.message.content, choice.message.role, choice.finish_reason) == ("Hello 🐻", "assistant", "stop")
    assert choice.message.tool_calls is None
    assert speaker.prompt == f"<|im_start|>system\nBe.{END}\n<|im_start|>user\nHi{END}\n<|im_start|>assistant\n"
    assert (speaker.params.temperature, speaker.params.max_tokens) == (0.5, 9)
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.prompt_tokens_details.cached_tokens) == (len(speaker.tokens), 2)  # type: ignore[union-attr]
    assert done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens


def test_reasoning_and_calls_are_separate_whole_and_streamed(gpt: openai.OpenAI, speaker: Speaker) -> None:
    text = f"<think>\nhm\n</think>\n\nLet me see.\n{CALL}\n{CALL}{END}"
    asked: Any = {"model": BASE, "messages": HI, "tools": TOOLS}
    speaker.says(text)
    done = gpt.chat.completions.create(**asked)
    message = done.choices[0].message
    assert (message.content, message.reasoning_content) == ("Let me see.", "hm")  # type: ignore[attr-defined]
    calls = [{"name": call.function.name, "arguments": call.function.arguments} for call in message.tool_calls or []]  # type: ignore[union-attr]
    assert calls == [{"name": "weather", "arguments": '{"city": "Köln"}'}] * 2
    assert len({call.id for call in message.tool_calls or []}) == 2
    assert done.choices[0].finish_reason == "tool_calls"
    reasoned = len(speaker.tokenizer.encode("hm", add_special_tokens=False).ids)
    assert done.usage.completion_tokens_details.reasoning_tokens == reasoned > 0  # type: ignore[union-attr]
    speaker.says(text)
    said = streamed(gpt.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert said[:4] == ("Let me see.", "hm", calls, "tool_calls")
    assert said[4][-1].usage == done.usage
    speaker.says(text)
    once = gpt.chat.completions.create(**asked, parallel_tool_calls=False)
    assert len(once.choices[0].message.tool_calls or []) == 1


def test_calls_and_results_of_tools_are_part_of_the_prompt(gpt: openai.OpenAI, speaker: Speaker) -> None:
    speaker.says(f"Rain.{END}")
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Köln"}'}}
    messages: Any = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": [], "audio": None},
        {
            "role": "tool",
            "tool_call_id": "1",
            "content": [{"type": "text", "text": "wet"}, {"type": "text", "text": "cold"}],
        },
    ]
    gpt.chat.completions.create(model=BASE, messages=messages, tools=TOOLS)
    assert '{"name": "weather", "description": "now"' in speaker.prompt
    assert (
        f'assistant\n<tool_call>\n{{"name": "weather", "arguments": {{"city": "Köln"}}}}\n</tool_call>{END}'
        in speaker.prompt
    )
    assert f"<|im_start|>tool\nwet\ncold{END}" in speaker.prompt
    speaker.says(f"{CALL}{END}")
    none = gpt.chat.completions.create(model=BASE, messages=HI, tools=TOOLS, tool_choice="none")
    assert none.choices[0].message.content == CALL
    assert "weather" not in speaker.prompt


def test_tool_arguments_with_a_lone_surrogate_are_rendered(post: Callable[..., Any], speaker: Speaker) -> None:
    speaker.says("ok")
    call = {"id": "1", "function": {"name": "weather", "arguments": '{"city": "K\\ud800ln"}'}}
    messages = [*HI, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": "?"}]
    answer = post("chat/completions", {"model": BASE, "messages": messages})
    assert answer.status_code == 200, answer.text
    assert '{"city": "K?ln"}' in speaker.prompt


def test_tokens_and_logprobs_are_exact_whole_and_streamed(gpt: openai.OpenAI, speaker: Speaker) -> None:
    text = f"a 🐻{END}"
    tokens = speaker.tokenizer.encode(text, add_special_tokens=False).ids
    asked: Any = {"model": BASE, "messages": HI, "logprobs": True, "extra_body": {"return_token_ids": True}}
    speaker.says(text)
    done = gpt.chat.completions.create(**asked)
    assert done.prompt_token_ids == speaker.tokens  # type: ignore[attr-defined]
    assert done.choices[0].token_ids == tokens  # type: ignore[attr-defined]
    entries = done.choices[0].logprobs.content  # type: ignore[union-attr]
    assert [entry.logprob for entry in entries] == [-(n + 1) / 8 for n in range(len(tokens))]  # type: ignore[union-attr]
    assert b"".join(bytes(entry.bytes or ()) for entry in entries or ()) == text.encode()
    speaker.says(text)
    *_, chunks = streamed(gpt.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert [
        token for chunk in chunks for choice in chunk.choices for token in getattr(choice, "token_ids", ())
    ] == tokens
    assert [
        entry for chunk in chunks for choice in chunk.choices if choice.logprobs for entry in choice.logprobs.content
    ] == entries
    assert chunks[0].prompt_token_ids == speaker.tokens
    assert (chunks[-1].choices, chunks[-1].usage) == ([], done.usage)


def test_many_samples_and_stop_strings_are_answered(gpt: openai.OpenAI, speaker: Speaker) -> None:
    speaker.says("one. two", f"three{END}")
    done = gpt.chat.completions.create(model=BASE, messages=HI, n=2, stop=[". "], seed=3)
    assert [choice.message.content for choice in done.choices] == ["one", "three"]
    assert speaker.params.stop == [". "] and speaker.params.stop_token_ids == [2]
    speaker.says("cut sho", reason="length")
    cut = gpt.chat.completions.create(model=BASE, messages=HI)
    assert cut.choices[0].finish_reason == "length"


def test_null_counts_as_an_omitted_field(post: Callable[..., Any], speaker: Speaker) -> None:
    names = (
        *("n", "stream", "stream_options", "logprobs", "top_logprobs", "stop", "seed", "temperature", "top_p", "user"),
        *("max_tokens", "max_completion_tokens", "presence_penalty", "frequency_penalty", "logit_bias", "tools"),
        *("tool_choice", "parallel_tool_calls", "response_format", "metadata", "store", "service_tier", "modalities"),
        *("functions", "a field that nobody knows"),
    )
    speaker.says("ok")
    answer = post("chat/completions", {"model": BASE, "messages": HI, **dict.fromkeys(names)})
    assert answer.status_code == 200, answer.text
    refused = post("chat/completions", {"model": None, "messages": HI})
    assert refused.status_code == 400 and "model is None: must be" in refused.json()["error"]["message"], refused.text


def test_streams_of_several_samples_are_interleaved(gpt: openai.OpenAI, speaker: Speaker) -> None:
    speaker.says(f"one{END}", "two", f"{CALL}{END}")
    usage = {"include_usage": True}
    *chunks, last = gpt.chat.completions.create(
        model=BASE, messages=HI, tools=TOOLS, n=3, stream=True, stream_options=usage, logprobs=True, top_logprobs=0
    )
    text, finish, roles = ["", "", ""], {}, []
    for (choice,) in (chunk.choices for chunk in chunks):
        text[choice.index] += choice.delta.content or ""
        finish |= {choice.index: choice.finish_reason} if choice.finish_reason else {}
        roles += [choice.index] if choice.delta.role else []
        assert not choice.logprobs or all(one.top_logprobs == [] for one in choice.logprobs.content or ())
    assert (text, sorted(roles)) == (["one", "two", ""], [0, 1, 2])
    assert finish == {0: "stop", 1: "stop", 2: "tool_calls"}
    assert {chunk.usage for chunk in chunks} == {None} and last.choices == []
    spoken = sum(
        len(speaker.tokenizer.encode(one, add_special_tokens=False).ids) for one in (f"one{END}", "two", f"{CALL}{END}")
    )
    assert last.usage.completion_tokens == spoken


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_other_requests_are_answered_while_a_long_answer_is_written(
    server: Running, post: Callable[..., Any], speaker: Speaker, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    feed, statuses = Detokenizer.feed, []

    def asking(self: Detokenizer, tokens: Any) -> str:
        statuses.append(server.http.get(f"{server.url}/api/v1/healthz").status_code)
        return feed(self, tokens)

    monkeypatch.setattr(Detokenizer, "feed", asking)
    speaker.says(*(text := "yes no " * 500, text))
    asked = {"messages": HI} if path == "chat/completions" else {"prompt": "Hi"}
    answer = post(path, {"model": BASE, "n": 2, **asked})
    assert answer.status_code == 200 and set(statuses) == {200}


def test_rest_of_a_long_stream_comes_in_parts(gpt: openai.OpenAI, speaker: Speaker) -> None:
    speaker.says(text := "yes no " * 500)
    whole, _, _, finish, chunks = streamed(gpt.chat.completions.create(model=BASE, messages=HI, stream=True))
    assert (whole, finish) == (text, "stop") and len(chunks) > 3


def test_answer_can_be_sent_as_a_message_of_the_next_turn(gpt: openai.OpenAI, speaker: Speaker) -> None:
    speaker.says(f"<think>\nhm\n</think>\n\n{CALL}{END}")
    said = gpt.chat.completions.create(model=BASE, messages=HI, tools=TOOLS).choices[0].message
    (call,) = said.tool_calls or ()
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "wet"}
    for message in (said, said.model_dump()):
        speaker.says(f"Rain.{END}")
        done = gpt.chat.completions.create(model=BASE, messages=[*HI, message, result], tools=TOOLS)
        assert done.choices[0].message.content == "Rain."
        assert f"assistant\n<think>\nhm\n</think>\n\n{CALL}{END}" in speaker.prompt
        assert f"<|im_start|>tool\nwet{END}" in speaker.prompt


def test_incomplete_tool_call_is_returned_as_content(gpt: openai.OpenAI, speaker: Speaker) -> None:
    speaker.says(CALL[:40], reason="length")
    done = gpt.chat.completions.create(model=BASE, messages=HI, tools=TOOLS)
    assert done.choices[0].message.content == CALL[:40]
    assert (done.choices[0].finish_reason, done.choices[0].message.tool_calls) == ("length", None)


def test_call_that_broke_off_in_a_stream_can_be_sent_in_the_next_turn(gpt: openai.OpenAI, speaker: Speaker) -> None:
    speaker.says(CALL[:56], reason="length")
    asked: Any = {"model": BASE, "tools": TOOLS}
    content, _, (call,), finish, _ = streamed(gpt.chat.completions.create(**asked, messages=HI, stream=True))
    assert (content, finish) == (CALL[:56], "length") and call["arguments"] in content
    sent: Any = {"role": "assistant", "tool_calls": [{"id": "one", "type": "function", "function": call}]}
    result: Any = {"role": "tool", "tool_call_id": "one", "content": "broken"}
    speaker.says(f"Again.{END}")
    gpt.chat.completions.create(**asked, messages=[*HI, {**sent, "content": content}, result])
    assert f"assistant\n{content}{END}\n<|im_start|>tool\nbroken{END}" in speaker.prompt
    with pytest.raises(openai.BadRequestError, match=r"arguments is .*: must be a JSON object as text"):
        gpt.chat.completions.create(**asked, messages=[*HI, {**sent, "content": "else"}, result])


def test_body_that_is_not_json_has_an_error_with_the_position(server: Running, speaker: Speaker) -> None:
    url, headers = f"{server.url}/v1/chat/completions", {"Authorization": f"Bearer {KEY}"}
    error = server.http.post(url, content=b"{no", headers=headers).json()["error"]
    assert error["message"] == "the request body is not JSON: key must be a string at line 1 column 2"
    error = server.http.get(url, headers=headers).json()["error"]
    assert error["message"] == "GET /v1/chat/completions is not an endpoint; /openapi.json lists the endpoints"
    detail = server.http.post(f"{server.url}/chat/completions", json={}, headers=headers).json()["detail"]
    assert detail == "POST /chat/completions is not an endpoint; /openapi.json lists the endpoints"


def test_answer_id_equals_the_request_id_header(gpt: openai.OpenAI, speaker: Speaker) -> None:
    speaker.says("Hello")
    done = gpt.chat.completions.create(model=BASE, messages=HI)
    assert done._request_id == done.id
    speaker.says("Hello")
    stream = gpt.chat.completions.create(model=BASE, messages=HI, stream=True)
    assert {chunk.id for chunk in stream} == {stream.response.headers["x-request-id"]}


def test_interactive_requests_precede_batch_requests(gpt: openai.OpenAI, speaker: Speaker, journal: Journal) -> None:
    for tier, expected in ((None, "interactive"), ("default", "interactive"), ("flex", "batch")):
        for ask in (
            lambda **more: gpt.chat.completions.create(model=BASE, messages=HI, **more),
            lambda **more: gpt.responses.create(model=BASE, input="Hi", **more),
        ):
            speaker.says("Hello")
            done: Any = ask(service_tier=tier)
            assert speaker.asked[-1].priority == expected
            with journal.requests._read() as connection:
                kept = sa.select(col(Request.interactive)).where(col(Request.id) == done.id)
                assert connection.execute(kept).scalar_one() is (expected == "interactive")


def test_unknown_models_and_keys_raise_errors_of_the_client_library(gpt: openai.OpenAI, speaker: Speaker) -> None:
    with pytest.raises(openai.NotFoundError, match="nobody"):
        gpt.chat.completions.create(model="nobody", messages=HI)
    with pytest.raises(openai.AuthenticationError):
        gpt.with_options(api_key="sk-wrong").chat.completions.create(model=BASE, messages=HI)


def test_error_before_the_first_token_has_its_own_status(gpt: openai.OpenAI, speaker: Speaker) -> None:
    def fails(request: Pending) -> Outcome:
        return request.failed(ServerError("the devices are gone"))

    speaker.engine.next_outcome = fails
    with pytest.raises(openai.InternalServerError, match="the devices are gone"):
        gpt.chat.completions.create(model=BASE, messages=HI, stream=True)


def test_required_tool_call_and_response_schema_constrain_sampling(gpt: openai.OpenAI, speaker: Speaker) -> None:
    speaker.says('{"name": "weather", "arguments": {"city": "Rome"}}')
    done = gpt.chat.completions.create(model=BASE, messages=HI, tools=TOOLS, tool_choice="required")
    assert [call.function.name for call in done.choices[0].message.tool_calls or []] == ["weather"]  # type: ignore[union-attr]
    assert speaker.prompt.endswith("<|im_start|>assistant\n<tool_call>\n")
    schema = speaker.params.constraint.value
    assert schema["properties"]["name"] == {"const": "weather"}
    assert schema["properties"]["arguments"] == TOOLS[0]["function"]["parameters"]
    wanted: Any = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": wanted, "strict": True}}
    speaker.says('{"a": 3}')
    done = gpt.chat.completions.create(model=BASE, messages=HI, response_format=form)
    assert done.choices[0].message.content == '{"a": 3}'
    assert speaker.params.constraint.value == wanted
    speaker.says("{}")
    gpt.chat.completions.create(model=BASE, messages=HI, response_format={"type": "json_object"})
    assert speaker.params.constraint.value == {"type": "object"}


def test_answer_ends_where_the_template_ends_a_turn(
    card: ModelCard, journal: Journal, gpt: openai.OpenAI, speaker: Speaker, tmp_path: Path
) -> None:
    """Gemma 4's template ends a turn with a token that is not the base model's end of text."""
    folder = Path(shutil.copytree(card.path, tmp_path / "gemma"))
    words = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(words.replace("<|pad|>", "<turn|>"))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}<turn|>{% endfor %}")
    journal.base_models.register([(BASE, replace(card, path=str(folder)).to_json())])
    speaker.says("Hi.")
    gpt.chat.completions.create(model=BASE, messages=[{"role": "user", "content": "Hello"}])
    assert speaker.params.stop_token_ids == [2, 3]


def test_nul_characters_in_chats_are_replaced(post: Callable[..., Any], speaker: Speaker) -> None:
    asked = {"chat/completions": "messages", "messages": "messages", "responses": "input"}
    for path, field in asked.items():
        speaker.says(f"Hello{END}")
        text = "a\0b \\u0000 \\\0\0"
        length = "max_output_tokens" if path == "responses" else "max_tokens"
        answer = post(path, {"model": BASE, length: 9, field: [{"role": "user", "content": text}]})
        assert answer.status_code == 200, answer.text
        assert f"user\n{text.replace(chr(0), chr(0xFFFD))}{END}" in speaker.prompt
    assert post("completions", {"model": BASE, "prompt": "a\0"}).status_code == 400

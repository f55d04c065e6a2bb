"""Errors of the OpenAI and Anthropic endpoints for invalid requests: each names the field, its value and the rule."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from tests.api.chat.conftest import Speaker
from tests.api.conftest import BASE, KEY, Running

from tinkerflow.api.routes import chat, messages, responses

USER = {"role": "user", "content": "Hi"}
GOOD: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [USER], "max_tokens": 2},
    "completions": {"prompt": "Hi", "max_tokens": 2},
    "responses": {"input": "Hi", "max_output_tokens": 2},
    "messages": {"messages": [USER], "max_tokens": 2},
}
TOOL = {"type": "function", "function": {"name": "f"}}
TOOLS = [{"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}, "strict": False}]
CALLED = {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"}
PICTURE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
NO_IMAGES = "[0].content[0] is an image: must be text, because tiny/bigram does not accept images"
FORM = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}


def call(**fields: Any) -> list[dict[str, Any]]:
    return [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}, **fields}]}]


def content(value: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": value}]}


CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages is None: must be a list"),
    ({"messages": []}, "messages is []: must be a list of at least 1"),
    ({"messages": [1]}, "messages[0] is 1: must be a JSON object"),
    ({"messages": [{}]}, "messages[0].role is missing"),
    *(
        ({"messages": [{"role": role, "tool_call_id": "a", **none}]}, "messages[0].content is None: must be text or")
        for role in ("system", "developer", "user", "assistant", "tool")
        for none in ({}, {"content": None})
    ),
    *((content([], role), "messages[0].content is []: must be text or") for role in ("system", "user", "assistant")),
    (content(5), "messages[0].content is 5: must be a string or a list"),
    (content(["x"]), "messages[0].content[0] is 'x': must be a JSON object"),
    (content([{"type": "text"}]), "messages[0].content[0].text is None: must be text"),
    (content([{"type": "file"}]), "messages[0].content[0].type is 'file': must be text"),
    (content("x", "bot"), "messages[0].role is 'bot': must be 'system'"),
    ({"messages": call(type="custom")}, "messages[1].tool_calls[0].type is 'custom': must be 'function'"),
    (
        {"messages": call(function={"name": "f", "arguments": "x"})},
        "messages[1].tool_calls[0].function.arguments is 'x': must be a JSON object as text",
    ),
    ({"messages": [USER, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id is None: must be the id"),
    (content([{"type": "image_url", "image_url": {"url": "x"}}]), f"messages{NO_IMAGES}"),
    ({"messages": [{**USER, "mood": 1}]}, "messages[0].mood is not supported"),
    ({"frobnicate": 1}, "frobnicate is not supported"),
    ({"stop": 5, "stop_token_ids": "x"}, "stop is 5: must be a string or a list"),  # the first invalid field is named
    ({"stream": "yes", "stream_options": 5}, "stream is 'yes': must be true or false"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type is 'web_search': must be 'function'"),
    ({"tools": [{"type": "function"}]}, "tools[0].function is missing"),
    (
        {"tools": [{"function": {"name": "a b"}}]},
        "tools[0].function.name is 'a b': must be a string that matches",
    ),
    ({"tool_choice": {"type": "function"}, "tools": [TOOL]}, "tool_choice.function is missing"),
    ({"tool_choice": {"type": "mcp"}, "tools": [TOOL]}, "tool_choice.type is 'mcp': must be 'function'"),
    ({"tool_choice": "f"}, "tool_choice is 'f': must be 'none', 'auto' or 'required' or a JSON object"),
    ({"tool_choice": "required"}, "tool_choice is 'required': must be auto, none, or a call to one of the tools"),
    ({"response_format": {"type": "xml"}}, "response_format.type is 'xml': must be 'text'"),
    (
        {"tool_choice": {"type": "function", "function": {"name": "other"}}, "tools": [TOOL]},
        "tool_choice is 'other': must be auto, none, or a call to one of the tools",
    ),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema is None: must be given"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}},
        "response_format is not a json_schema that can be enforced: type is 'nothing'",
    ),
    ({"stop": 5}, "stop is 5: must be a string or a list"),
    ({"stop": ["a", 5]}, "stop[1] is 5: must be a string"),
    ({"stop_token_ids": "x"}, "stop_token_ids is 'x': must be a list"),
    ({"stop_token_ids": [4, 99999]}, "stop_token_ids[1] is 99999: must be >= 0"),
    ({"n": 0}, "n is 0: must be a whole number from 1 to 1024"),
    ({"n": "two"}, "n is 'two': must be a whole number from 1 to 1024"),
    ({"user": 5}, "user is 5: must be a string"),
    ({"max_tokens": 100_000}, "max_tokens is 100000: must be at most"),
    ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs['messages'] is 1: must be left out"),
    ({"temperature": "hot"}, "temperature is 'hot': must be a finite number >= 0"),
    ({"temperature": -1}, "temperature is -1: must be a finite number >= 0"),
    ({"top_logprobs": 3}, "top_logprobs is 3: must be left out without logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options is given: must be left out without stream"),
    ({"logit_bias": {"a": 1}}, "logit_bias has the key 'a'"),
    ({"metadata": {"a": 1}}, "metadata['a'] is 1: must be a string"),
    ({"store": True}, "store is True: must be false"),
    ({"functions": []}, "functions is not supported by this endpoint"),
    ({"model": 5}, "model is 5: must be a string"),
]
COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt is None: must be a string or a list"),
    ({"prompt": []}, "prompt is []: must be text, token ids, or a non-empty list of either"),
    ({"prompt": ""}, "prompt has 0 tokens"),
    ({"prompt": ["x", ""]}, "prompt[1] has 0 tokens"),
    ({"prompt": [[]]}, "prompt[0] has 0 tokens"),
    ({"prompt": [True]}, "prompt[0] is True: must be a whole number or a string or a list"),
    ({"prompt": ["a", 1]}, "prompt[1] is 1: must be"),
    ({"prompt": [1, "a"]}, "prompt[1] is 'a': must be"),
    ({"prompt": [99999]}, "prompt[0] is 99999: must be >= 0"),
    ({"prompt": [[1], [2, 99999]]}, "prompt[1][1] is 99999: must be >= 0"),
    ({"prompt": ["x"] * 1025}, "prompt has 1025 prompts: must have at most 1024"),
    ({"n": 2, "prompt": ["x"] * 1024}, "n is 2: must be at most 1 for 1024 prompts"),
    ({"best_of": 2}, "best_of is not supported by this endpoint"),
    ({"max_tokens": 0}, "max_tokens is 0: must be at least 1 without echo"),
    ({"max_tokens": 10_000}, "max_tokens is 10000: must be at most"),
    ({"top_p": 0.0}, "top_p is 0"),
    ({"temperature": "warm"}, "temperature is 'warm'"),
    ({"n": 0}, "n is 0"),
    ({"logit_bias": {"x": 1}}, "logit_bias has the key 'x'"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0] is -1"),
    ({"echo": True, "stream": True}, "echo is"),
    ({"stream_options": {"include_usage": True}}, "stream_options is"),
    ({"logprobs": 21}, "logprobs is 21"),
    ({"frobnicate": 1}, "frobnicate is not supported"),
]
RESPONSES: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input is None: must be a string or a list"),
    ({"input": ["x"]}, "input[0] is 'x': must be a JSON object"),
    ({"input": [{}]}, "input[0].role is None"),
    *(({"input": [{"role": role}]}, "input[0].content is None") for role in ("system", "user", "assistant")),
    ({"input": [{"role": "user", "content": []}]}, "input[0].content is []: must be text or a list of at least one"),
    ({"input": []}, "input is []: must be text, or at least one item"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, f"input{NO_IMAGES}"),
    ({"input": [{"role": "user", "content": [PICTURE]}]}, f"input{NO_IMAGES}"),
    ({"input": [{"role": "judge", "content": "Hi"}]}, "input[0].role is 'judge': must be system, developer"),
    ({"input": [{"type": "strange"}]}, "input[0].type is 'strange'"),
    ({"input": [{"type": "web_search_call"}]}, "input[0].type is 'web_search_call'"),
    ({"input": [{"type": "function_call", "call_id": "1", "name": 3}]}, "input[0].name is 3: must be text"),
    ({"input": [USER, {**CALLED, "arguments": "["}]}, "input[1].arguments is '[': must be a JSON object as text"),
    ({"input": [USER, {"type": "function_call_output", "output": "wet"}]}, "input[1].call_id is None"),
    ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input[0].output is None"),
    ({"tools": [{"type": "mcp"}]}, "tools[0].type is 'mcp': must be 'function', 'namespace' or 'web_search'"),
    ({"tools": [{}]}, "tools[0].type is None: must be given"),
    (
        {"tools": [{"type": "namespace", "name": "a" * 128, "tools": [{"type": "function", "name": "b"}]}]},
        "tools[0].function.name is",
    ),
    ({"tool_choice": {"type": "function"}}, "tool_choice.name is missing"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema is None: must be given"),
    (
        {"text": {"format": {**FORM, "schema": {"type": "x"}}}},
        "text.format is not a json_schema that can be enforced: type is 'x'",
    ),
    ({"text": {"format": FORM}, "tools": TOOLS, "tool_choice": "required"}, "text.format is given: must be left out"),
    ({"max_output_tokens": 10**6}, "max_output_tokens is 1000000: must be at most"),
    (
        {"include": ["message.output_text.logprobs"]},
        "include[0] is 'message.output_text.logprobs': must be 'reasoning.encrypted_content'",
    ),
    ({"frobnicate": 1}, "frobnicate is not supported"),
    ({"temperature": -1}, "temperature is -1"),
    ({"truncation": "auto"}, "truncation is 'auto': must be 'disabled'"),
    ({"previous_response_id": "x"}, "previous_response_id is not supported"),
]
MESSAGES: list[tuple[dict[str, Any], str]] = [
    *(({"messages": [{"role": role}]}, "messages[0].content is missing") for role in ("user", "assistant")),
    *((content(none), "messages[0].content is") for none in (None, [])),
    (content("x", "bot"), "messages[0].role is 'bot': must be 'user', 'assistant' or 'system'"),
    (content([{"type": "image"}], "system"), "messages[0].content[0].type is 'image': must be text"),
    (content([{"type": "tool_result"}]), "messages[0].content[0].tool_use_id is None"),
    (content([{"type": "image", "source": {}}]), f"messages{NO_IMAGES}"),
    (
        content([{"type": "tool_use", "id": "1", "name": "f", "input": 3}], "assistant"),
        "messages[0].content[0].input is 3: must be an object",
    ),
    ({"tool_choice": {"type": "any"}}, "tool_choice is 'any': must be a call to one of the tools"),
    ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type is 'web_search_20250305': must be"),
    ({"stop_sequences": "x"}, "stop_sequences is 'x': must be a list"),
    ({"stop_sequences": [5]}, "stop_sequences[0] is 5: must be a string"),
    ({"stop_sequences": ["x" * 1025]}, "stop_sequences is ["),
    ({"temperature": 2}, "temperature is 2: must be a finite number >= 0 and <= 1"),
    ({"top_p": 0}, "top_p is 0: must be a finite number > 0 and <= 1"),
    ({"frobnicate": 1}, "frobnicate is not supported"),
    ({"mcp_servers": [1]}, "mcp_servers is not supported"),
    ({"max_tokens": None}, "max_tokens is None: must be a whole number >= 1"),
]
TABLE = [
    (path, change, message)
    for path, rows in zip(GOOD, (CHAT, COMPLETIONS, RESPONSES, MESSAGES), strict=True)
    for change, message in rows
]
Post = Callable[..., Any]


def test_refusal_names_the_invalid_field(post: Post, speaker: Speaker) -> None:
    """All rows share one server. `param` is the name of the top-level field."""
    wrong = []
    for path, change, message in TABLE:
        answer = post(path, {"model": BASE, **GOOD[path], **change})
        body = answer.json()
        error = body["error"] if answer.status_code == 400 else {"message": answer.text, "type": ""}
        field = next(iter(change))
        named = error["message"].startswith(message) and error.get("param", field) == field
        is_error = error["type"] == "invalid_request_error" and (path != "messages" or body["type"] == "error")
        if not (named and is_error):
            wrong.append((path, change, error))
    assert not wrong, "\n".join(map(str, wrong))


def test_an_answer_without_content_that_calls_tools_is_a_message(post: Post, speaker: Speaker) -> None:
    results = [{"role": "tool", "tool_call_id": "a", "content": "3"}]
    for other in ({"tool_calls": [{"id": "a", "function": {"name": "f"}}]}, {"reasoning_content": "hm"}):
        speaker.says("ok")
        messages = [USER, {"role": "assistant", "content": None, **other}, *(results if "tool_calls" in other else ())]
        assert post("chat/completions", {"model": BASE, "messages": messages}).status_code == 200


LONG = {
    "chat/completions": ({"messages": [{"role": "user", "content": "x " * 6000}]}, "messages have 12"),
    "completions": ({"prompt": [5] * 5000}, "prompt has 5000 tokens"),
    "responses": ({"input": "x " * 6000}, "input has 12"),
    "messages": ({"messages": [{"role": "user", "content": "x " * 6000}]}, "prompt is too long: 12"),
}


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("chat/completions", {"messages": [USER] * 32_769}, "messages is [{"),
        ("messages", {"messages": [USER] * 32_769}, "messages is [{"),
        ("responses", {"input": [USER] * 32_769}, "input is [{"),
        ("chat/completions", {"tools": [TOOL] * 4097}, "tools is [{"),
        ("messages", {"tools": [{"name": "f", "input_schema": {}}] * 4097}, "tools is [{"),
        ("responses", {"tools": TOOLS * 4097}, "tools is [{"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_longer_conversations_than_any_context_are_refused_unread(
    post: Post, speaker: Speaker, path: str, body: dict[str, Any], text: str
) -> None:
    (most,) = {len(value) - 1 for value in body.values()}
    answer = post(path, {"model": BASE, **GOOD[path], **body})
    message = answer.json()["error"]["message"]
    assert (answer.status_code, message[: len(text)]) == (400, text)
    assert message.endswith(f"a list of at most {most}")


@pytest.mark.parametrize(
    ("path", "module", "work", "body"),
    [
        ("chat/completions", chat, "_messages", {"messages": [USER] * 3000}),
        ("responses", responses, "_messages", {"input": [USER] * 3000}),
        ("messages", messages, "_conversation", {"messages": [USER] * 3000}),
    ],
)
def test_long_conversations_are_converted_off_the_event_loop(
    post: Post, speaker: Speaker, monkeypatch: pytest.MonkeyPatch, path: str, module: Any, work: str, body: Any
) -> None:
    convert, on_loop = getattr(module, work), []

    def watched(given: Any) -> Any:
        on_loop.append(asyncio._get_running_loop() is not None)
        return convert(given)

    monkeypatch.setattr(module, work, watched)
    for conversation in (GOOD[path], {**GOOD[path], **body}):
        post(path, {"model": BASE, **conversation})
    assert on_loop == [True, False]


def test_exceeded_context_has_an_error_code(post: Post, speaker: Speaker) -> None:
    for path, stream, limited in itertools.product(LONG, (False, True), (False, True)):
        body, message = LONG[path]
        limit = {"max_tokens" if path != "responses" else "max_output_tokens": 5} if limited else {}
        answer = post(path, {"model": BASE, **GOOD[path], **body, **limit, "stream": stream})
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["message"].startswith(message), error
        assert error["type"] == "invalid_request_error"
        assert error.get("code", "context_length_exceeded") == "context_length_exceeded"


def test_answer_longer_than_the_context_has_the_context_code(post: Post, speaker: Speaker) -> None:
    names = {"chat/completions": "max_tokens", "completions": "max_tokens", "responses": "max_output_tokens"}
    for path, name in names.items():
        error = post(path, {"model": BASE, **GOOD[path], name: 5000}).json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", name)
    long = {"prompt": "x" * 16 * 4096 + "x"}
    assert post("completions", {"model": BASE, **long}).json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_litellm_raises_context_window_exceeded_error(provider: str, server: Running, speaker: Speaker) -> None:
    import litellm  # here, because the import takes seconds in each process that collects tests

    base = f"{server.url}/v1" if provider == "openai" else server.url
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(
            f"{provider}/{BASE}", [{"role": "user", "content": "x " * 6000}], api_base=base, api_key=KEY, max_tokens=2
        )

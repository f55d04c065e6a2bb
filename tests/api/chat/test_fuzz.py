"""Chat endpoints under broken requests and arbitrary model output: no 5xx and no broken stream."""

from __future__ import annotations

import json
import random
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.api.chat.conftest import Speaker
from tests.api.chat.test_openai import CALL, TOOLS
from tests.api.conftest import BASE, KEY, Running
from tests.api.fuzz import _BYTES, _EDITS, broken, edited

from tinkerflow.backend.journal import Outcome, Pending
from tinkerflow.backend.spec.commands import Candidates, SampledSequence, SampleResult
from tinkerflow.backend.wire import SampleBody, encode_sample, parse

OPENAI = {
    "model": BASE,
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "Be."}]},
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "wet"},
    ],
    "tools": TOOLS,
    "tool_choice": "auto",
    "n": 2,
    "stop": ["!"],
    "temperature": 0.5,
    "logprobs": True,
    "top_logprobs": 2,
    "logit_bias": {"5": 1},
    "seed": 3,
    "max_tokens": 30,
    "stream": True,
    "stream_options": {"include_usage": True},
    "chat_template_kwargs": {"enable_thinking": False},
    "return_token_ids": True,
}
COUNTED = {
    "model": BASE,
    "system": [{"type": "text", "text": "Be.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "text", "text": "So"},
                {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Köln"}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "wet", "is_error": False}]},
    ],
    "tools": [{"name": "weather", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
}
MESSAGES = {**COUNTED, "max_tokens": 30, "stream": True, "stop_sequences": ["!"], "metadata": {"user_id": "me"}}
RESPONSES = {
    "model": BASE,
    "instructions": "Be.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "1", "name": "weather", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "1", "output": "wet"},
    ],
    "tools": [{"type": "function", "name": "weather", "parameters": {"type": "object"}}],
    "tool_choice": "auto",
    "max_output_tokens": 30,
    "stream": True,
}
BODIES = {"responses": RESPONSES, "chat/completions": OPENAI, "messages": MESSAGES, "messages/count_tokens": COUNTED}
ENDS = {"chat/completions": "[DONE]", "messages": '{"type":"message_stop"}', "responses": '"usage":{'}
WORDS = [
    CALL,
    CALL[:50],
    "<think>",
    "</think>",
    "<tool_call>",
    "!",
    "Hi ",
    '{"a": ',
    "}",
    "\n",
    "🐻",
    "<|im_start|>",
    "<|im_end|>",
]


@pytest.fixture
def babble(speaker: Speaker, monkeypatch: pytest.MonkeyPatch) -> Speaker:
    """A model with random output, including incomplete UTF-8 characters."""
    chance = random.Random(1)

    def sequence(top: int) -> SampledSequence:
        tokens = speaker.tokenizer.encode("".join(chance.choices(WORDS, k=6)), add_special_tokens=False).ids
        tokens += [chance.randrange(4, 1024) for _ in range(chance.randrange(3))]
        length = len(tokens)
        listed = None
        if top:
            listed = Candidates(np.full((length, top), 7, np.int32), np.full((length, top), -np.inf, np.float32))
        logprobs = np.full(length, -np.inf, np.float32)
        return SampledSequence(np.array(tokens, np.int32), logprobs, chance.choice(["stop", "length"]), listed)  # type: ignore[arg-type]

    def answer(engine: Any, request: Pending) -> Outcome:
        body = SampleBody.from_values(parse(request.payload))
        sequences = tuple(sequence(body.topk_sample_logprobs) for _ in range(body.num_samples))
        return request.done(encode_sample(SampleResult(request.id, sequences, None)), "proto")

    monkeypatch.setattr(type(speaker.engine), "_sample", answer)
    return speaker


def send(server: Running, path: str, content: bytes) -> httpx.Response:
    headers = {"X-API-Key": KEY, "Content-Type": "application/json"}
    return server.http.post(f"{server.url}/v1/{path}", content=content, headers=headers, timeout=60)


def check(path: str, answer: httpx.Response) -> None:
    """Assert that there is no 5xx, that a stream ends with its last event, and that an error has a message."""
    assert answer.status_code < 500, (path, answer.status_code, answer.text)
    if answer.headers["content-type"].startswith("text/event-stream"):
        *_, last = [part for part in answer.text.split("\n\n") if part]
        assert ENDS[path] in last, answer.text
    elif answer.status_code >= 400:
        assert answer.json()["error"]["message"]


def test_broken_bodies_are_answered(server: Running, babble: Speaker) -> None:
    statuses: set[int] = set()

    @settings(
        derandomize=True, database=None, deadline=None, phases=[Phase.generate], max_examples=250,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.sampled_from(sorted(BODIES)), _EDITS, st.just(()) | _BYTES)
    def attack(path: str, edits: Any, changes: Any) -> None:
        answer = send(server, path, broken(json.dumps(edited(BODIES[path], edits)).encode(), changes))
        statuses.add(answer.status_code)
        check(path, answer)

    attack()
    assert {200, 400} <= statuses


def test_good_bodies_are_answered_for_any_model_output(server: Running, babble: Speaker) -> None:
    for path, body in BODIES.items():
        for stream in (True, False) * 10:
            asked = {**body, "stream": stream} if "stream" in body else body
            if not stream:
                asked = {name: value for name, value in asked.items() if name != "stream_options"}
            answer = send(server, path, json.dumps(asked).encode())
            assert answer.status_code == 200, answer.text
            check(path, answer)

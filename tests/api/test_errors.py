"""Errors in OpenAI's form: `param` is the field that the message names."""

from __future__ import annotations

import pytest

from tinkerflow.api.errors import openai_error


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ("max_tokens is 0: must be at least 1", "max_tokens"),
        ("messages[0].content is 3: must be a string", "messages"),
        ("messages[1].tool_call_id is None: must be the id", "messages"),
        ("model 'a b' does not exist", "model"),
        ("reward, label and text are all absent", None),
        ("a" * 1_000_000 + "! is not supported by this endpoint", None),
        ("a.b" * 1_000_000 + "!", None),
    ],
)
def test_openai_error_param_is_the_field_at_the_start_of_the_message(message: str, field: str | None) -> None:
    assert openai_error(400, message)["error"]["param"] == field

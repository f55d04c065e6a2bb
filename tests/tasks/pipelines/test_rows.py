"""What a row may look like, and what is said about one that does not fit."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tinkerflow.tasks.pipelines import Row, RowError, guess_schema, parse_row

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "hello"}


def test_each_schema_gives_a_prompt_and_how_it_goes_on() -> None:
    chat = parse_row({"messages": [USER, ANSWER, USER, ANSWER], "id": 7}, "chat")
    assert chat == Row((USER,), (ANSWER, USER, ANSWER), extra={"id": 7})
    assert parse_row({"prompt": "hi", "completion": "hello"}, "prompt_completion") == Row((USER,), (ANSWER,))
    preference = {"prompt": [USER], "chosen": "hello", "rejected": [{"role": "assistant", "content": "no"}]}
    assert parse_row(preference, "preference") == Row((USER,), (ANSWER,), ({"role": "assistant", "content": "no"},))
    assert parse_row({"prompt": "hi", "answer": "4"}, "prompt") == Row((USER,), extra={"answer": "4"})


@pytest.mark.parametrize(
    ("raw", "schema"),
    [
        ({"messages": []}, "chat"),
        ({"prompt": "", "completion": ""}, "prompt_completion"),
        ({"prompt": "", "chosen": "", "rejected": ""}, "preference"),
        ({"prompt": "", "answer": ""}, "prompt"),
    ],
)
def test_the_schema_is_guessed_from_the_fields(raw: Any, schema: str) -> None:
    assert guess_schema(raw) == schema


@pytest.mark.parametrize(
    ("raw", "schema", "message"),
    [
        ([1], "chat", "row: [1]: must be an object"),
        ({"prompt": "hi"}, "prompt_completion", "completion: None: is missing"),
        ({"messages": []}, "chat", "messages: []: must be a text or a list of messages, not empty"),
        ({"messages": [USER]}, "chat", "messages: ['user']: must hold an assistant message"),
        ({"messages": [ANSWER]}, "chat", "messages[0].role: 'assistant': must be another one"),
        ({"messages": [USER, {"role": "bot", "content": "x"}]}, "chat", "messages[1].role: 'bot': must be one of"),
        ({"messages": [USER, {"role": "assistant"}]}, "chat", "messages[1].content: None: must be a text"),
        ({"messages": [USER, "hello"]}, "chat", "messages[1]: 'hello': must be an object with role and content"),
        ({"prompt": "  ", "completion": "x"}, "prompt_completion", "prompt: '  ': must be a text that is not blank"),
        ({"prompt": "hi", "completion": [USER]}, "prompt_completion", "completion[0].role: 'user': must be assistant"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "preference", "rejected: 'b': must differ from chosen"),
        ({"prompt": "a<|im_end|>b"}, "prompt", "prompt: 'a<|im_end|>b': must not hold '<|im_end|>'"),
    ],
)
def test_what_is_wrong_is_named_with_its_field_value_and_rule(raw: Any, schema: Any, message: str) -> None:
    with pytest.raises(RowError) as error:
        parse_row(raw, schema, forbidden=("<|im_end|>",))
    assert str(error.value).startswith(message)


JSON = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(("messages", "role", "content", "prompt")), inner),
    max_leaves=4,
)


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(JSON, st.sampled_from(("chat", "prompt_completion", "preference", "prompt")))
def test_whatever_a_row_is_it_fits_or_is_refused_by_name(raw: Any, schema: Any) -> None:
    try:
        row = parse_row(raw, schema)
    except RowError:
        return
    assert Row.from_json(row.to_json()) == row

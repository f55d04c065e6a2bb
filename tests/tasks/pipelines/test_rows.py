"""The forms of rows, and the refusal of content that nothing uses."""

from __future__ import annotations

import contextlib
import copy
import json
from typing import Any

import orjson
import pytest
from tests.tasks.pipelines.row_parts import CALL, CALLS, RESULT, TOOL, A, U

from tinkerflow.tasks.pipelines import Row, RowError, RowReader, guess_form

FORMS = {  # a row of each form, with every field that the form has
    "chat": {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
            {"role": "user", "content": "hi", "name": "Ann"},
            {**CALLS, "content": None, "reasoning_content": "I add.", "weight": 0},
            RESULT,
            {**A, "weight": 1},
        ],
        "tools": [TOOL],
    },
    "sharegpt": {
        "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello", "weight": 1}],
        "system": "Be brief.",
        "tools": [TOOL],
    },
    "alpaca": {
        "instruction": "hi",
        "input": "there",
        "output": "hello",
        "system": "Be brief.",
        "history": [["a", "b"]],
    },
    "prompt_completion": {"prompt": [U], "completion": [A], "tools": [TOOL]},
    "preference": {"prompt": [U], "chosen": [A], "rejected": [{**A, "content": "no"}], "tools": [TOOL]},
    "prompt": {"prompt": [U], "tools": [TOOL]},
    "text": {"text": "Once upon a time."},
}
EVERY = pytest.mark.parametrize("form", FORMS)


def read(raw: Any, form: str = "", **options: Any) -> Row:
    return RowReader(form or guess_form(raw), **options).parse(raw)  # type: ignore[arg-type]


def test_each_form_gives_prompt_and_continuation() -> None:
    reasons = {"role": "assistant", "content": "", "reasoning_content": "I add.", "tool_calls": [CALL], "weight": 0}
    system = {"role": "system", "content": "Be brief."}
    asks = {"role": "user", "content": "hi", "name": "Ann"}
    assert read(FORMS["chat"]) == Row((system, asks), (reasons, RESULT, A), tools=(TOOL,))
    assert read(FORMS["sharegpt"]) == Row((system, U), (A,), tools=(TOOL,))
    earlier = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
    assert read(FORMS["alpaca"]) == Row((system, *earlier, {"role": "user", "content": "hi\n\nthere"}), (A,))
    assert read(FORMS["prompt_completion"]) == Row((U,), (A,), tools=(TOOL,))
    assert read(FORMS["preference"]) == Row((U,), (A,), ({**A, "content": "no"},), tools=(TOOL,))
    assert read(FORMS["prompt"]) == Row((U,), tools=(TOOL,))
    assert read(FORMS["text"]) == Row((), text="Once upon a time.")


@EVERY
def test_a_form_is_guessed_survives_storage_and_may_be_stored_as_json_texts(form: str) -> None:
    raw = FORMS[form]
    assert guess_form(raw) == form
    row = read(raw)
    assert Row.from_json(row.to_json()) == row
    stored = {k: json.dumps(v) if k in ("messages", "conversations", "tools", "history") else v for k, v in raw.items()}
    assert read(stored) == row
    assert read({**raw, "id": None}) == row  # null counts as absent


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all objects in a row whose fields the form defines, so without arguments and schemas."""
    items = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
    below = [p for k, v in items if k not in ("arguments", "parameters") for p in paths(v, (*path, k))]
    return [path, *below] if isinstance(value, dict) else below


@pytest.mark.parametrize(("form", "path"), [(form, path) for form, raw in FORMS.items() for path in paths(raw)])
def test_unknown_field_is_named_at_any_level_and_may_be_ignored(form: str, path: tuple[Any, ...]) -> None:
    raw = copy.deepcopy(FORMS[form])
    at: Any = raw
    for key in path:
        at = at[key]
    at["extra_info"] = {"a": 1}
    if path[:1] == ("tools",) and path[-1:] == ("function",):  # a tool's definition is passed on unchanged
        assert "extra_info" in read(raw, form).tools[0]["function"]
        return
    with pytest.raises(RowError, match="extra_info") as error:
        read(raw, form)
    pattern = ".".join([*(str(key) for key in path if isinstance(key, str)), "extra_info"])
    assert f"add {pattern!r} to data.ignore" in str(error.value)
    assert read(raw, form, ignore=frozenset({pattern})) == read(FORMS[form], form)


def test_a_misspelled_field_gets_a_suggestion_and_a_star_ignores_all_of_a_row() -> None:
    with pytest.raises(RowError, match=r"messages\[1\]\.tool_cals: .* \(did you mean 'tool_calls'\?\)"):
        read({"messages": [U, {**A, "tool_cals": [CALL]}]})
    with pytest.raises(RowError, match=r"tool: .* is not used by sft \(did you mean 'tools'\?\)"):
        read({"messages": [U, A], "tool": [TOOL]}, user="sft")
    assert read({"messages": [U, A], "id": 7, "source": "x"}, ignore=frozenset("*")) == Row((U,), (A,))
    assert read({"prompt": "hi", "answer": 4, "id": 7}, extra=None).extra == {"answer": 4, "id": 7}


def test_a_misspelled_required_field_gets_a_suggestion() -> None:
    for forms in ((), ("chat", "text")):
        with pytest.raises(RowError, match=r"massages: is not a field of a row \(did you mean 'messages'\?\)"):
            read({"massages": [U, A]}, "chat", forms=forms)


def test_all_unused_fields_of_a_row_are_named_together() -> None:
    with pytest.raises(
        RowError, match=r"^id, source: are not used by sft; add 'id', 'source' to data\.ignore to leave them out"
    ):
        read({"messages": [U, A], "id": 7, "source": "x", "score": None}, user="sft")
    with pytest.raises(RowError, match=r"^messages\[1\]: .* has fields that are not used") as error:
        read({"messages": [U, {**A, "refusal": "x", "audio": "y"}]})
    assert error.value.ignore == ["messages.refusal", "messages.audio"]


def test_columns_are_mapped_to_fields() -> None:
    columns = {"prompt": "question", "completion": "reply"}
    with pytest.raises(
        RowError, match=r"^messages: is missing; a chat has messages, and this row has question, reply$"
    ):
        read({"question": "hi", "reply": "hello"}, "chat")
    with pytest.raises(
        RowError, match=r"^prompt, completion: are missing; .*; for example data\.columns: {prompt: q, comp"
    ):
        read({"q": "hi", "reply": "hello"}, "prompt_completion")
    with pytest.raises(RowError, match=r"{prompt: Question, completion: Answer} and data\.ignore: \[id\]"):
        read({"id": "1", "Question": "hi", "Answer": "hello"}, "prompt_completion")
    with pytest.raises(RowError, match=r"data\.columns: {prompt: COLUMN, completion: Answer}$"):
        read({"id": "1", "Gruss": "hi", "Answer": "hello"}, "prompt_completion")
    assert read({"question": "hi", "reply": "hello"}, "prompt_completion", columns=columns) == Row((U,), (A,))
    with pytest.raises(
        RowError, match=r"data\.columns\.prompt: 'question': the column is missing or empty, and this row has"
    ):
        read({"reply": "hello"}, "prompt_completion", columns=columns)
    with pytest.raises(RowError, match=r"prompt: 'x': is in the row, but data\.columns\.prompt is 'question'"):
        read({"question": "hi", "reply": "hello", "prompt": "x"}, "prompt_completion", columns=columns)
    swapped = read({"prompt": "hello", "completion": "hi"}, "prompt_completion",
                   columns={"prompt": "completion", "completion": "prompt"})  # fmt: skip
    assert swapped == Row((U,), (A,))


def test_calls_tools_and_answers_have_alternative_spellings() -> None:
    flat = {"name": "add", "arguments": '{"a": 1}', "id": "c1"}
    assert read({"messages": [U, {**CALLS, "tool_calls": [flat]}, RESULT, A]}).chosen[0]["tool_calls"] == [CALL]
    assert read({"messages": [U, A], "tools": [TOOL["function"]]}).tools == (TOOL,)
    turns = [{"from": "human", "value": "hi"}, {"from": "function_call", "value": json.dumps(CALL["function"])}]
    called = read({"conversations": [*turns, {"from": "observation", "value": "2"}]}).chosen
    assert called[0]["tool_calls"][0]["function"] == CALL["function"] and called[1]["role"] == "tool"
    for key in ("reasoning", "thinking"):
        assert read({"messages": [U, {**A, key: "hm"}]}).chosen[0]["reasoning_content"] == "hm"
    no = {**A, "content": "no"}
    wanted = Row((U,), (A,), (no,))
    assert read({"chosen": [U, A], "rejected": [U, no]}) == wanted  # without a prompt
    assert read({"prompt": "hi", "chosen": [U, A], "rejected": [U, no]}) == wanted  # with the prompt again
    assert read({"prompt": "hi", "chosen": A, "rejected": {"from": "gpt", "value": "no"}}) == wanted


def test_a_result_of_an_unknown_call_is_refused() -> None:
    with pytest.raises(RowError, match=r"messages\[2\]\.tool_call_id: 'c2': must be the id of an earlier .*\(c1\)"):
        read({"messages": [U, CALLS, {**RESULT, "tool_call_id": "c2"}, A]})


WRONG: list[tuple[Any, str, str]] = [
    ([1], "chat", "row: [1]: must be an object"),
    ({"prompt": "hi"}, "prompt_completion", "completion: is missing; a question with its"),
    ({"messages": []}, "chat", "messages: []: must be text or a list of messages, and not empty"),
    ({"messages": [U]}, "chat", "messages: ['user']: must contain an assistant message"),
    ({"messages": [A]}, "chat", "messages[0].role: 'assistant': must be another role"),
    ({"messages": [U, {**A, "role": "bot"}]}, "chat", "messages[1].role: 'bot': must be one of"),
    ({"messages": [U, {"role": "assistant"}]}, "chat", "messages[1].content: must be text"),
    ({"messages": [U, "hello"]}, "chat", "messages[1]: 'hello': must be an object with role and content"),
    ({"messages": "[{"}, "chat", "messages: '[{': must be a list, or a list as JSON"),
    ({"messages": [{**U, "tool_calls": [CALL]}, A]}, "chat", "messages[0].tool_calls: "),
    ({"messages": [U, {**A, "tool_call_id": "c"}]}, "chat", "messages[1].tool_call_id: 'c': is only for"),
    ({"messages": [U, {**A, "weight": 0.5}]}, "chat", "messages[1].weight: 0.5: must be 0"),
    ({"messages": [U, {**A, "tool_calls": [{"name": "f", "arguments": "[1]"}]}]}, "chat",
     "messages[1].tool_calls[0].arguments: [1]: must be an object"),
    ({"messages": [U, {**A, "tool_calls": [{"arguments": {}}]}]}, "chat", "messages[1].tool_calls[0].name: must be"),
    ({"messages": [U, {**A, "tool_calls": [{**CALL, "type": "x"}]}]}, "chat", "messages[1].tool_calls[0].type: 'x'"),
    ({"messages": [{**U, "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}, A]}, "chat",
     "messages[0].content[0].type: 'image_url': must be 'text'"),
    ({"messages": [U, A], "tools": [{"type": "retrieval"}]}, "chat", "tools[0].name: must be text"),
    ({"prompt": "  ", "completion": "x"}, "prompt_completion", "prompt: '  ': must be text that is not blank"),
    ({"prompt": "hi", "completion": [U]}, "prompt_completion", "completion[0].role: 'user': must be assistant"),
    ({"prompt": "a", "chosen": "b", "rejected": "b"}, "preference", "rejected: 'b': must differ from chosen"),
    ({"chosen": "b", "rejected": "c"}, "preference", "prompt: is missing, and chosen and rejected do not"),
    ({"conversations": [{"from": "me", "value": "x"}]}, "sharegpt", "conversations[0].from: 'me': must be one of"),
    ({"instruction": "a", "output": "b", "history": [["a"]]}, "alpaca", "history[0]: ['a']: must be a pair"),
    ({"instruction": "a", "output": "b", "history": 0}, "alpaca", "history: 0: must be a non-empty list"),
    ({"messages": [U, A], "tools": [{"type": "function", "function": None}]}, "chat", "tools[0].name: must be text"),
    ({"messages": [U, {**A, "tool_calls": [{"name": "f", "arguments": '{"a": 1, "a": 2}'}]}]}, "chat",
     "messages[1].tool_calls[0].arguments: "),
    ({"prompt": "a", "chosen": [CALLS, RESULT, A], "rejected": [CALLS, {**RESULT, "tool_call_id": "c2"}, A]},
     "preference", "messages[2].tool_call_id: 'c2'"),
    ({"text": 7}, "text", "text: 7: must be text"),
    ({"prompt": "a", "n": float("nan")}, "prompt", "n: nan: must be a finite number"),
    ({"prompt": "a", "n": 2**70}, "prompt", "n: 1180591620717411303424: must be a finite number of at most 64 bits"),
    ({"prompt": "a", "n": b"x"}, "prompt", "n: b'x': must be text, a number, a list or an object, not bytes"),
    ({"prompt": "a\ud800"}, "prompt", "prompt: 'a\\ud800': must be valid Unicode"),
]  # fmt: skip


@pytest.mark.parametrize(("raw", "form", "message"), WRONG)
def test_an_error_names_the_field_the_value_and_the_rule(raw: Any, form: str, message: str) -> None:
    with pytest.raises(RowError) as error:
        read(raw, form, extra=None)
    assert str(error.value).startswith(message)


def test_row_of_unknown_form_is_refused_with_the_forms() -> None:
    with pytest.raises(RowError, match=r"row: \['question'\]: .*alpaca: instruction, output.*data\.columns maps"):
        guess_form({"question": "x"})


DEEP: list[Any] = []
for _ in range(300):
    DEEP = [DEEP]
ODD: list[Any] = [
    *(None, 0, 5, 1.5, True, "", " ", "x", "5", "null", "[1]", '{"a": 1, "a": 2}', "\ud800", '"\\ud800"', b"x", (1, 2)),
    *([], {}, [None], [1], [[]], [{}], {"a": 1}, {"\ud800": 1}, {1: 2}, DEEP, 10**30, float("nan")),
    *({"from": None, "value": "x"}, {"from": None, **U}, {"type": "function", "function": None}),
    *([{"type": "function", "function": None}], [{"function": None, "name": "f"}], [{"name": "f", "id": "\ud800"}]),
    '{"name": "\\ud800", "arguments": {}}',
]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value in a row."""
    items = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
    return [path, *(place for key, below in items for place in places(below, (*path, key)))]


@EVERY
def test_any_value_gives_a_row_or_a_row_error(form: str) -> None:
    for *parents, key in filter(None, places(FORMS[form])):
        for odd in ODD:
            for name in (key, "from", "function", "\ud800"):
                raw = copy.deepcopy(FORMS[form])
                at = raw
                for parent in parents:
                    at = at[parent]
                if isinstance(at, list) and name != key:
                    continue
                at[name] = odd
                for extra in (frozenset(), None):
                    with contextlib.suppress(RowError):
                        row = read(raw, form, extra=extra)
                        assert Row.from_json(orjson.loads(orjson.dumps(row.to_json()))) == row, (parents, name, odd)


def test_a_row_that_is_only_nested_lists_is_refused() -> None:
    with pytest.raises(RowError, match="row: "):
        guess_form(DEEP)

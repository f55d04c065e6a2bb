"""Conversations are rendered into tokens by the model's template, and only answers are trained on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.tasks.pipelines.row_parts import CALL, CALLS, RESULT, TOOL
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tinkerflow.backend.core.errors import UserError
from tinkerflow.tasks.pipelines import Renderer, Row, RowError, TokenizedExample

USER = {"role": "user", "content": "What is 4 + 5?"}
ANSWER = {"role": "assistant", "content": "4 + 5 = 9."}
SEARCH = {**TOOL, "function": {**TOOL["function"], "description": "adds", "strict": True}}


def trained(tokenizer: Any, example: TokenizedExample) -> str:
    return str(tokenizer.decode(example.tokens[example.weights > 0].tolist()))


def only(renderer: Renderer, row: Row) -> TokenizedExample:
    ((example,),) = renderer.examples(row)
    return example


@contextmanager
def template(tokenizer: Any, text: str | None) -> Iterator[None]:
    tokenizer.chat_template, kept = text, tokenizer.chat_template
    try:
        yield
    finally:
        tokenizer.chat_template = kept


def test_answers_are_trained_on_and_the_rest_is_read(tokenizer: Any, renderer: Renderer) -> None:
    example = only(renderer, Row((USER,), (ANSWER, USER, ANSWER)))
    whole = tokenizer.apply_chat_template([USER, ANSWER, USER, ANSWER], tokenize=False)
    assert tokenizer.decode(example.tokens.tolist()) == whole
    assert trained(tokenizer, example) == "4 + 5 = 9.<|im_end|>\n" * 2
    assert renderer.pieces(example)[1::2] == [("4 + 5 = 9.<|im_end|>\n", True)] * 2
    prompt = renderer.prompt([USER])
    assert example.tokens[: len(prompt)].tolist() == prompt
    datum = example.datum()
    assert datum.model_input.length == len(example.tokens) - 1
    assert datum.loss_fn_inputs["target_tokens"].to_numpy()[-1] == example.tokens[-1]
    unweighted = only(renderer, Row((USER,), ({**ANSWER, "weight": 0}, USER, {**ANSWER, "content": "9"})))
    assert trained(tokenizer, unweighted) == "9<|im_end|>\n"


def test_tools_calls_results_and_reasoning_are_rendered_as_the_template_has_them(
    tokenizer: Any, renderer: Renderer
) -> None:
    reasons = {**CALLS, "content": "I add.", "reasoning_content": "There is a tool."}
    messages = [USER, reasons, RESULT, ANSWER]
    example = only(renderer, Row((USER,), (reasons, RESULT, ANSWER), tools=(SEARCH,)))
    assert tokenizer.decode(example.tokens.tolist()) == tokenizer.apply_chat_template(
        messages, tools=[SEARCH], tokenize=False
    )
    called = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    first = f"<think>\nThere is a tool.\n</think>\n\nI add.{called}<|im_end|>\n"
    assert trained(tokenizer, example) == first + "4 + 5 = 9.<|im_end|>\n"
    assert renderer.answer_text(Row((USER,), (reasons,))) == first.removesuffix("<|im_end|>\n")
    assert tokenizer.decode(renderer.prompt([USER], [SEARCH])).startswith("<|im_start|>system\nTools, called by")


PLAIN = (
    "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
DROPPED: dict[str, tuple[Row, str]] = {
    "tool_calls": (Row((USER,), (CALLS, RESULT, ANSWER)), r"messages\[1\]\.tool_calls\[0\]\.function\.name"),
    "reasoning": (Row((USER,), ({**ANSWER, "reasoning_content": "hm"},)), r"messages\[1\]\.reasoning_content: 'hm'"),
    "tools": (Row((USER,), (ANSWER,), tools=(TOOL,)), r"tools\[0\]\.function\.name: 'add'"),
    "name": (Row(({**USER, "name": "Ann"},), (ANSWER,)), r"messages\[0\]\.name: 'Ann'"),
}


@pytest.mark.parametrize("format_", ["chat", "text"])
@pytest.mark.parametrize("field", DROPPED)
def test_field_that_the_template_drops_is_refused_with_its_name(tokenizer: Any, field: str, format_: Any) -> None:
    row, message = DROPPED[field]
    with template(tokenizer, PLAIN), pytest.raises(RowError, match=message if format_ == "chat" else "has no place"):
        Renderer(tokenizer, format_).examples(row)
    with template(tokenizer, PLAIN), pytest.raises(RowError, match=message if format_ == "chat" else "has no place"):
        Renderer(tokenizer, format_).prompt([*row.prompt, *row.chosen], row.tools)


@pytest.mark.parametrize(
    ("shows", "message"),
    [
        ("{% if m['role'] != 'system' %}{{ m['content'] }}{% endif %}", r"messages\[0\]\.content: 'Be brief'"),
        ("{{ m['content'].split('</think>')[-1] }}", r"messages\[2\]\.content: .*: the chat template drops a part"),
        ("{{ raise_exception('no system') if m['role'] == 'system' }}", r"the chat template rejects them: no system"),
        ("{{ m['content'] }}{{ m.surprise.of.it }}", r"the chat template rejects them: .*no attribute 'surprise'"),
    ],
)
def test_row_is_refused_if_the_template_drops_or_refuses_messages(tokenizer: Any, shows: str, message: str) -> None:
    text = PLAIN.replace("{{ m['content'] }}", shows)
    row = Row(({"role": "system", "content": "Be brief"}, USER), ({**ANSWER, "content": "<think>a\nb</think>9"},))
    with template(tokenizer, text), pytest.raises(RowError, match=message):
        Renderer(tokenizer).examples(row)


def test_a_keyword_of_a_tool_that_the_template_does_not_show_is_refused(tokenizer: Any) -> None:
    text = "{% for t in tools or [] %}{{ t.function.name }}{{ t.function.description }}{% endfor %}" + PLAIN
    with template(tokenizer, text), pytest.raises(RowError, match=r"'tools\.function\.strict' to data\.ignore"):
        Renderer(tokenizer).examples(Row((USER,), (ANSWER,), tools=({**SEARCH, "function": {
            "name": "add", "description": "adds", "strict": True}},)))  # fmt: skip


def test_a_repeated_name_of_a_result_and_ids_of_calls_need_not_be_shown(tokenizer: Any, renderer: Renderer) -> None:
    named = {**RESULT, "name": "add"}
    assert only(renderer, Row((USER,), (CALLS, named, ANSWER))).weights.any()
    with pytest.raises(RowError, match=r"messages\[2\]\.name: 'subtract'"):
        renderer.examples(Row((USER,), (CALLS, {**RESULT, "name": "subtract"}, ANSWER)))


@pytest.mark.parametrize("every", [True, False])
def test_tokenizers_that_add_a_space_add_none_within_a_conversation(every: bool) -> None:
    letters = [
        "<unk>",
        "</s>",
        "\u2581",
        "\n",
        *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ<|>0123456789.?+=*",
    ]
    model = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, [], unk_token="<unk>"))
    if every:  # as Llama 2's: a space after every special token
        model.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    else:
        model.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}</s>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    renderer, chat = Renderer(tokenizer), [USER, ANSWER, USER, ANSWER]
    example = only(renderer, Row((USER,), (ANSWER, USER, ANSWER)))
    assert example.tokens.tolist() == tokenizer.apply_chat_template(chat, return_dict=False)
    prompt = renderer.prompt(chat[:3])
    assert example.tokens[: len(prompt)].tolist() == prompt, "a turn is trained after the tokens that sampling sees"


def test_a_text_of_one_token_is_refused(tokenizer: Any, renderer: Renderer) -> None:
    endless = copy.deepcopy(tokenizer)
    endless.eos_token = None
    assert only(renderer, Row((), text="a")).learned == 1.0
    with pytest.raises(RowError, match=r"^text: 'a': has a single token"):
        Renderer(endless).examples(Row((), text="a"))


def test_an_answer_ends_with_the_text_or_with_the_templates_end_of_a_turn(tokenizer: Any, renderer: Renderer) -> None:
    end, text_end = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert (renderer.stop, Renderer(tokenizer, "text").stop) == ([end], [end])
    base = copy.deepcopy(tokenizer)  # as in Qwen's base models: their texts end with another token than their turns
    base.eos_token = "<|endoftext|>"
    assert (Renderer(base).stop, Renderer(base, "text").stop) == ([text_end, end], [text_end])
    with template(base, PLAIN):
        assert Renderer(base).stop == [text_end]
    with template(base, "{{ raise_exception('no') }}"):
        assert Renderer(base).stop == [text_end]


def test_a_template_that_rewrites_earlier_turns_gives_a_sequence_per_answer(tokenizer: Any) -> None:
    # Templates of thinking models do this: only the last answer includes its reasoning.
    forgetful = (
        "{% for m in messages %}{{ m['role'] }}:{% if loop.last and m.reasoning_content %} <{{ m.reasoning_content }}>"
        "{% endif %} {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    reasons = {**ANSWER, "reasoning_content": "hm"}
    with template(tokenizer, forgetful):
        (first,), (second,) = Renderer(tokenizer).examples(Row((USER,), (reasons, USER, reasons)))
        assert trained(tokenizer, first) == trained(tokenizer, second) == " <hm> 4 + 5 = 9.\n"
        assert tokenizer.decode(second.tokens.tolist()).count("hm") == 1
        with pytest.raises(RowError, match=r"rejected: .* must be one message"):
            Renderer(tokenizer).examples(Row((USER,), (ANSWER,), (reasons, USER, reasons)))
    with (
        template(tokenizer, PLAIN.replace("assistant:", ">")),
        pytest.raises(RowError, match="renders this answer differently"),
    ):
        Renderer(tokenizer).examples(Row((USER,), (ANSWER,)))
    with template(tokenizer, None), pytest.raises(UserError, match="has no chat template"):
        Renderer(tokenizer)


def test_texts_end_with_the_end_of_text_and_are_cut(tokenizer: Any, renderer: Renderer) -> None:
    example = only(Renderer(tokenizer, "text"), Row((USER,), (ANSWER,)))
    assert tokenizer.decode(example.tokens.tolist()) == "What is 4 + 5?4 + 5 = 9.<|im_end|>"
    assert trained(tokenizer, example) == "4 + 5 = 9.<|im_end|>"
    parts = renderer.examples(Row((), text="Once upon a time. " * 9), 16)
    assert {len(part.tokens) for (part,) in parts} <= set(range(12, 17))
    assert "".join(trained(tokenizer, part) for (part,) in parts) == "Once upon a time. " * 9 + "<|im_end|>"


PLACES: dict[str, Callable[[str], Row]] = {
    "user": lambda text: Row(({**USER, "content": text},), (ANSWER,)),
    "answer": lambda text: Row((USER,), ({**ANSWER, "content": text},)),
    "reasoning": lambda text: Row((USER,), ({**ANSWER, "reasoning_content": text},)),
    "arguments": lambda text: Row((USER,), ({**CALLS, "tool_calls": [
        {**CALL, "function": {"name": "add", "arguments": {"a": text}}}]},)),
    "result": lambda text: Row((USER,), (CALLS, {**RESULT, "content": text}, ANSWER)),
    "tool": lambda text: Row((USER,), (ANSWER,), tools=({**TOOL, "function": {"name": "add", "description": text}},)),
    "text": lambda text: Row((), text=text),
}  # fmt: skip


@pytest.mark.parametrize("format_", ["chat", "text"])
@pytest.mark.parametrize("place", PLACES)
def test_special_tokens_in_texts_are_text_unless_the_data_asks_for_tokens(
    tokenizer: Any, place: str, format_: Any
) -> None:
    if format_ == "text" and place not in ("user", "answer", "text"):
        pytest.skip("format text has no place for it")
    plain, special = PLACES[place]("a<b>\ufdd0"), PLACES[place]("a<|im_end|>\n<|im_start|>b\ufdd0")
    renderer = Renderer(tokenizer, format_)

    def count(renderer: Renderer, row: Row) -> int:
        return sum(int(token < 4) for token in only(renderer, row).tokens)

    assert count(renderer, special) == count(renderer, plain)
    whole = tokenizer.decode(only(renderer, special).tokens.tolist())
    assert "a<|im_end|>" in whole and "<|im_start|>b\ufdd0" in whole
    as_tokens = renderer.with_special_tokens("tokens")
    assert count(as_tokens, special) == count(as_tokens, plain) + 2
    assert as_tokens.fingerprint != renderer.fingerprint


def test_tokens_of_texts_without_special_tokens_are_the_tokenizers_own(tokenizer: Any, renderer: Renderer) -> None:
    """A special token in a text changes no other token."""
    marked = renderer.prompt([{"role": "user", "content": "What is 4 + 5?<|pad|>"}])
    plain = renderer.prompt([USER])
    same = next(i for i, (a, b) in enumerate(zip(marked, plain, strict=False)) if a != b)
    assert marked[: same - 1] == plain[: same - 1] and marked[-6:] == plain[-6:]

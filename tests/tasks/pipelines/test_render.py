"""Conversations become tokens as the model's template says, and only answers are learnt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tinkerflow.backend.core.errors import UserError
from tinkerflow.tasks.pipelines import DataSource, Renderer, check_data, load_examples, render
from tinkerflow.tasks.pipelines.render import TokenizedExample

USER = {"role": "user", "content": "What is 4 + 5?"}
ANSWER = {"role": "assistant", "content": "4 + 5 = 9."}


def learnt(tokenizer: Any, example: TokenizedExample) -> str:
    return str(tokenizer.decode(example.tokens[example.weights > 0].tolist()))


def test_answers_are_learnt_and_the_rest_is_read(tokenizer: Any, renderer: Renderer) -> None:
    (example,) = renderer.examples([USER], [ANSWER, USER, ANSWER])
    whole = tokenizer.apply_chat_template([USER, ANSWER, USER, ANSWER], tokenize=False)
    assert tokenizer.decode(example.tokens.tolist()) == whole
    assert learnt(tokenizer, example) == "4 + 5 = 9.<|im_end|>\n" * 2
    prompt = renderer.prompt([USER])
    assert example.tokens[: len(prompt)].tolist() == prompt
    datum = example.datum()
    assert datum.model_input.length == len(example.tokens) - 1
    assert datum.loss_fn_inputs["target_tokens"].to_numpy()[-1] == example.tokens[-1]


def test_a_template_that_rewrites_earlier_turns_gives_a_sequence_per_answer(tokenizer: Any, renderer: Renderer) -> None:
    # As thinking models do: thoughts are in the last answer only.
    forgetful = (
        "{% for m in messages %}{{ m['role'] }}:{% if m['role'] == 'assistant' and loop.last %} hm,{% endif %}"
        " {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tokenizer.chat_template, kept = forgetful, tokenizer.chat_template
    try:
        first, second = renderer.examples([USER], [ANSWER, USER, ANSWER])
        assert learnt(tokenizer, first) == learnt(tokenizer, second) == " hm, 4 + 5 = 9.\n"
        assert tokenizer.decode(second.tokens.tolist()).count("hm,") == 1
        tokenizer.chat_template = (
            "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
        )
        with pytest.raises(UserError, match="otherwise than it asks for it"):
            renderer.examples([USER], [ANSWER])
        tokenizer.chat_template = None
        with pytest.raises(UserError, match="has no chat template"):
            Renderer(tokenizer)
    finally:
        tokenizer.chat_template = kept


def test_plain_text_ends_with_the_end_of_text(tokenizer: Any) -> None:
    (example,) = Renderer(tokenizer, "text").examples([USER], [ANSWER])
    assert tokenizer.decode(example.tokens.tolist()) == "What is 4 + 5?4 + 5 = 9.<|im_end|>"
    assert learnt(tokenizer, example) == "4 + 5 = 9.<|im_end|>"


def test_rendering_is_done_once_for_each_content(tokenizer: Any, renderer: Renderer, tmp_path: Path, work: str) -> None:
    file = tmp_path / "rows.jsonl"
    long = {"role": "assistant", "content": "well " * 50}
    file.write_text("".join(json.dumps({"messages": [USER, answer]}) + "\n" for answer in (ANSWER, long)))
    digest = check_data.fn(DataSource(url=str(file)), work).digest
    first = render.fn(digest, work, renderer, 64)
    assert (first.examples, first.left_out) == (1, 1)
    (example,) = load_examples(work, first.key)
    assert learnt(tokenizer, example) == "4 + 5 = 9.<|im_end|>\n"

    class Unused(Renderer):
        def examples(self, *_: Any) -> Any:
            raise AssertionError("rendered again")

    assert render.fn(digest, work, Unused(tokenizer), 64) == first
    other = render.fn(digest, work, Renderer(tokenizer, "text"), 1000)
    assert (other.examples, other.key != first.key) == (2, True)
    with pytest.raises(UserError, match="max_tokens 8: all 2 sequences"):
        render.fn(digest, work, renderer, 8)


def test_a_preference_is_two_sequences_that_stay_together(renderer: Renderer, tmp_path: Path, work: str) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [
        {"prompt": "Hi", "chosen": "Yes.", "rejected": "No."},
        {"prompt": "Hi", "chosen": "Yes.", "rejected": "no " * 90},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    digest = check_data.fn(DataSource(url=str(file)), work).digest
    found = render.fn(digest, work, renderer, 64)
    assert (found.examples, found.left_out) == (2, 1)
    said = [renderer.text(one.tokens[one.weights > 0].tolist()) for one in load_examples(work, found.key)]
    assert said == ["Yes.", "No."]

"""Constrained answers parse and end where the grammar allows it. Other requests are unchanged, except in speed."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.compute.conftest import ask, run_all
from tests.compute.sampler.conftest import prompt
from tests.compute.sampler.tokenizer import END, save_tokenizer

from tinkerflow.backend.compute.sampler import admission
from tinkerflow.backend.compute.sampler.constraints import everything, new_matcher, words
from tinkerflow.backend.compute.sampler.decode import decode
from tinkerflow.backend.compute.sampler.model import SamplerModel
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.spec.commands import Adjustments, Constraint

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ada", "Bo"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
JSON = Constraint("json_schema", json.dumps(SCHEMA), (END,))
REGEX = Constraint("regex", r"[ab]{3,9}-\d\d", (END,))
LARK = Constraint("grammar", 'start: "(" start ")" | "x"', (END,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with a token for each byte."""
    made = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(made)
    return made


@pytest.fixture(scope="module")
def text(folder: Path) -> Any:
    """text(sequence): its text. The sequence must end with the end-of-text token, which is removed."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def read(sequence: Any) -> str:
        tokens = sequence.tokens_T.tolist()
        assert sequence.stop_reason == "stop" and tokens[-1] == END and END not in tokens[:-1]
        return str(tokenizer.decode(tokens[:-1]))

    return read


def test_a_constraint_is_compiled_once_for_each_owner(qwen: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, made = qwen.sampler(model_path=str(folder)), list[Constraint]()

    def counted(where: str, vocab: int, constraint: Constraint) -> Any:
        made.append(constraint)
        return new_matcher(where, vocab, constraint)

    monkeypatch.setattr(admission, "new_matcher", counted)
    for name, owner, constraint in [("a", "x", REGEX), ("b", "x", REGEX), ("c", "x", LARK), ("d", "y", REGEX)]:
        sampler.admission.begin(ask(name, [1, 2], owner=owner, constraint=constraint))
    assert made == [REGEX, LARK, REGEX]


def fits(found: Any) -> bool:
    """Whether a value validates against SCHEMA."""
    assert list(found) == ["name", "age", "tags"]
    assert found["name"] in ("Ada", "Bo") and type(found["age"]) is int and 0 <= found["age"] <= 99
    return len(found["tags"]) <= 3 and all(type(tag) is bool for tag in found["tags"])


def test_constrained_answers_fit_and_unconstrained_answers_do_not_change(qwen: Any, folder: Path, text: Any) -> None:
    sampler = qwen.sampler(model_path=str(folder), decode_chunk=4)
    asked = {"temperature": 1.0, "num_samples": 3, "stop_tokens": ()}
    requests = [
        ask("json", prompt(9), 400, seed=1, constraint=JSON, **asked),
        ask("regex", prompt(20), 60, seed=2, constraint=REGEX, **asked),
        ask("lark", prompt(12), 400, seed=3, constraint=LARK, **asked),
        ask("greedy", prompt(5), 60, constraint=REGEX),
        ask("biased", prompt(5), 60, constraint=REGEX, adjustments=Adjustments(bias=((97, 100.0),))),
        ask("free", prompt(9), 40, temperature=1.0, seed=4),
        ask("short", prompt(9), 2, constraint=REGEX),
    ]
    together = run_all(sampler, *requests)
    assert not [result.error for result in together.values() if result.error]
    assert all(fits(json.loads(text(one))) for one in together["json"].sequences)
    for name in ("regex", "greedy", "biased"):
        assert all(re.fullmatch(REGEX.text, text(one)) for one in together[name].sequences)
    assert all(re.fullmatch(r"(\(*)x(\)*)", text(one)) for one in together["lark"].sequences)
    (cut,) = together["short"].sequences
    assert (cut.stop_reason, len(cut.tokens_T)) == ("length", 2)
    known = decode._cache_size()
    for request in requests[:2] + requests[3:4] + requests[5:6]:
        (alone,) = run_all(sampler, request).values()
        for one, other in zip(alone.sequences, together[request.request_id].sequences, strict=True):
            assert one.tokens_T.tolist() == other.tokens_T.tolist(), request.request_id
    run_all(sampler, ask("a", prompt(5), 9, constraint=REGEX), ask("b", prompt(5), 9, constraint=LARK))
    assert decode._cache_size() <= known + 3, "one program for each number of slots, for all constraints"


@pytest.mark.parametrize("rows_are_dear", [True, False])
def test_unconstrained_rows_decode_in_chunks_where_rows_are_dear(
    qwen: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, rows_are_dear: bool
) -> None:
    sampler, asked = qwen.sampler(model_path=str(folder), decode_chunk=4), list[tuple[str, int]]()
    sampler._batch._shapes = replace(sampler._batch._shapes, rows_are_dear=rows_are_dear)
    real = SamplerModel.decode_chunk

    def watched(model: SamplerModel, slots: int, held: Any, steps: int, before: Any) -> Any:
        asked.append((" ".join(sorted({one.parent.id for _, one in held})), steps))
        return real(model, slots, held, steps, before)

    monkeypatch.setattr(SamplerModel, "decode_chunk", watched)
    requests = [ask("regex", prompt(9), 60, constraint=REGEX), ask("free", prompt(9), 24)]
    regex = run_all(sampler, *requests)["regex"].sequences[0]
    if rows_are_dear:
        assert [steps for names, steps in asked if names == "free"] == [4] * 6
        assert [steps for names, steps in asked if names == "regex"] == [1] * len(regex.tokens_T)
    else:
        assert asked[: len(regex.tokens_T)] == [("free regex", 1)] * len(regex.tokens_T)
    assert len({names for names, _ in asked}) == 2, "few dispatches, and no sequence is decoded in both ways"


def test_unsatisfiable_constraint_fails_only_its_request(qwen: Any, folder: Path, text: Any) -> None:
    sampler = qwen.sampler(model_path=str(folder))
    impossible = Constraint("regex", r"[^\s\S]", (END,))
    broken = Constraint("grammar", 'start: "a" nobody', (END,))
    results = run_all(
        sampler,
        ask("impossible", prompt(9), 20, num_samples=2, constraint=impossible),
        ask("broken", prompt(9), 20, constraint=broken),
        ask("good", prompt(9), 60, constraint=REGEX),
        ask("free", prompt(9), 20),
    )
    assert "sampling_params.constraint cannot be enforced after 0 tokens: no text" in results["impossible"].error
    assert "nobody" in results["broken"].error
    assert re.fullmatch(REGEX.text, text(results["good"].sequences[0]))
    assert results["free"].error is None
    nowhere = run_all(qwen.sampler(model_path=str(folder / "none")), ask("a", prompt(9), 20, constraint=REGEX))
    assert "sampling_params.constraint needs the model's tokenizer" in nowhere["a"].error


def test_end_of_text_is_allowed_only_where_the_text_may_end(folder: Path) -> None:
    first = new_matcher(folder, 320, Constraint("regex", "ab?", (END,)))

    def allowed(said: str) -> list[int]:
        matcher = first.copy()
        matcher.advance([json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"][one] for one in said])
        bits = np.unpackbits(matcher.allowed.view(np.uint8), bitorder="little")
        return np.flatnonzero(bits).tolist()

    assert END not in allowed("") and len(allowed("")) == 1
    assert END in allowed("a") and len(allowed("a")) == 2
    assert allowed("ab") == [END]


def test_masks_have_a_bit_for_every_token() -> None:
    assert (words(320), words(321)) == (10, 11)
    assert np.unpackbits(everything(2, 33).view(np.uint8)).all()


def test_work_is_limited(folder: Path) -> None:
    """In an ambiguous grammar, every token costs more than the previous one."""
    matcher = new_matcher(folder, 320, Constraint("grammar", 'start: "a" | start start | start start start', (END,)))
    letter = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]["a"]
    with pytest.raises(
        UserError, match=r"sampling_params\.constraint cannot be enforced after \d+ tokens: .*Current row has"
    ):
        for count in range(1000):
            matcher.advance([letter] * count)

"""Biases and penalties against formulas in NumPy, over several chunks. They change only the rows that have them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.compute.conftest import ask, result_of, run_all
from tests.compute.sampler.conftest import prompt

from tinkerflow.backend.compute.sampler.adjustments import AdjustedRows, adjusted, generated
from tinkerflow.backend.compute.sampler.constraints import everything
from tinkerflow.backend.compute.sampler.decode import decode
from tinkerflow.backend.spec.commands import Adjustments, SampleStep

VOCAB = 40
WISHES = {
    "bias": Adjustments(bias=((3, 50.0), (7, -100.0))),
    "presence": Adjustments(presence=2.0),
    "frequency": Adjustments(frequency=1.5),
    "repetition": Adjustments(repetition=1.7),
    "negative": Adjustments(presence=-1.0, frequency=-0.5, repetition=0.6),
    "all": Adjustments(presence=0.5, frequency=0.4, repetition=1.3, bias=((5, 3.0), (300, -2.0))),
}


def expected(logits_V: Any, asked: Adjustments, prompt: list[int], tokens: list[int]) -> Any:
    """The adjusted logits of one row."""
    logits_V = logits_V.astype(np.float64)
    for token, bias in asked.bias:
        logits_V[token] += bias
    for token in {*prompt, *tokens}:
        logits_V[token] *= 1 / asked.repetition if logits_V[token] > 0 else asked.repetition
    for token, count in Counter(tokens).items():
        logits_V[token] -= asked.frequency * count + asked.presence
    return logits_V


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    presence=st.floats(-2, 2, width=32),
    frequency=st.floats(-2, 2, width=32),
    repetition=st.floats(0.125, 8, width=32),
    bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, width=32), max_size=4),
)
def test_logits_are_adjusted_as_the_formulas_define(
    seed: int, presence: float, frequency: float, repetition: float, bias: dict[int, float]
) -> None:
    generator = np.random.default_rng(seed)
    logits_SV = generator.normal(size=(2, VOCAB), scale=5).astype(np.float32)
    prompt, tokens = (generator.integers(0, VOCAB, 12).tolist() for _ in range(2))
    asked = Adjustments(presence, frequency, repetition, tuple(bias.items()))
    rows = AdjustedRows(
        *(np.float32([value, off]) for value, off in ((presence, 0), (frequency, 0), (repetition, 1))),
        seen_SV=np.zeros((2, VOCAB), np.int32),
        bias_SV=np.zeros((2, VOCAB), np.float32),
        allowed_SW=everything(2, VOCAB),
    )
    rows.seen_SV[0, prompt] = 1
    rows.bias_SV[0, list(bias)] = list(bias.values())
    rows = jax.tree.map(jax.numpy.asarray, rows)
    for token in tokens:
        rows = generated(rows, np.asarray([token, 0]))
    found_SV = np.asarray(adjusted(logits_SV, rows))
    np.testing.assert_allclose(found_SV[0], expected(logits_SV[0], asked, prompt, tokens), rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(found_SV[1], logits_SV[1], "a row without adjustments is unchanged")


@pytest.mark.parametrize("name", ["bias", "presence", "frequency", "negative"])
def test_every_token_of_an_answer_is_the_best_of_the_changed_logits(qwen: Any, name: str) -> None:
    tokens, vocab, asked = prompt(20), qwen.cfg.vocab, replace(WISHES[name], repetition=1.0)
    sampler = qwen.sampler(decode_chunk=4)  # the counts continue over chunks
    (found,) = result_of(sampler, ask("a", tokens, 30, topk_sample=vocab, adjustments=asked)).sequences
    said = found.tokens_T.tolist()
    for place, token in enumerate(said):
        logprobs_V = np.empty(vocab, np.float32)
        logprobs_V[found.top.tokens_Nk[place]] = found.top.logprobs_Nk[place]
        changed_V = expected(logprobs_V, asked, tokens, said[:place])
        assert changed_V[token] >= changed_V.max() - 1e-4
        np.testing.assert_allclose(
            found.logprobs_T[place], logprobs_V[token], atol=1e-5
        )  # of the logits before adjustment
    (plain,) = result_of(sampler, ask("b", tokens, 30)).sequences
    assert plain.tokens_T.tolist() != said


def test_repetition_counts_the_prompt(qwen: Any) -> None:
    tokens = prompt(20)
    sampler = qwen.sampler()
    (plain,) = result_of(sampler, ask("a", tokens, 1)).sequences
    first = int(plain.tokens_T[0])
    asked = Adjustments(repetition=100.0)
    (kept,) = result_of(sampler, ask("b", [*tokens, first], 1, adjustments=asked)).sequences
    (free,) = result_of(sampler, ask("c", [*tokens, first], 1)).sequences
    assert int(kept.tokens_T[0]) not in {*tokens, first} or int(free.tokens_T[0]) == int(kept.tokens_T[0])
    (long,) = result_of(sampler, ask("d", tokens, 60, adjustments=asked)).sequences
    assert len(set(long.tokens_T.tolist())) == 60, "no token comes twice"


def test_preempted_sequence_keeps_its_token_counts(qwen: Any) -> None:
    requests = [ask(f"r{i}", prompt(30, i), 60, adjustments=WISHES["all"]) for i in range(4)]
    roomy, tight = qwen.sampler(page=32), qwen.sampler(page=32, free_pages=8)
    free, pressed = run_all(roomy, *requests), run_all(tight, *requests)
    for request in requests:
        (one,), (other,) = (results[request.request_id].sequences for results in (free, pressed))
        assert one.tokens_T.tolist() == other.tokens_T.tolist()


def test_requests_without_adjustments_reuse_the_plain_program(qwen: Any) -> None:
    sampler = qwen.sampler()
    run_all(sampler, ask("a", prompt(9), 12, num_samples=3))
    run_all(sampler, ask("b", prompt(9), 12, num_samples=3, adjustments=WISHES["all"]))
    known = decode._cache_size()
    run_all(sampler, ask("c", prompt(9), 12, num_samples=3, min_p=0.1, temperature=1.0))
    run_all(sampler, ask("d", prompt(5), 9, num_samples=3, adjustments=WISHES["presence"]))
    assert decode._cache_size() == known


def test_sampler_is_empty_after_an_adjusted_request(qwen: Any) -> None:
    sampler = qwen.sampler()
    progress = sampler.step(SampleStep(admit=(ask("a", prompt(9), 1, adjustments=WISHES["frequency"]),)))
    while progress.active or progress.waiting:
        progress = sampler.step(SampleStep())
    assert not sampler.decoding

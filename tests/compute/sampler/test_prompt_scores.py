"""Scores of prompts and of sampled tokens, against the logits of Hugging Face's forward pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.compute.closeness import close_logprobs
from tests.compute.conftest import ask, run_all
from tests.compute.sampler.conftest import prompt

from tinkerflow.backend.compute.sampler.sampling import ALTERNATIVES, UniformStream
from tinkerflow.backend.spec.commands import NO_LOGPROB, PromptWishes


@pytest.fixture(scope="module")
def log_probs(qwen: Any) -> Any:
    """log_probs(tokens): Hugging Face's logprobs of the token after each token, [T, V]."""
    import torch
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(qwen.folder, dtype=torch.float32)

    def run(tokens: list[int]) -> Any:
        with torch.no_grad():
            return torch.log_softmax(model(torch.tensor([tokens])).logits[0].double(), -1).numpy()

    return run


def test_prompt_scores_match_the_plain_forward_and_do_not_depend_on_the_batch(qwen: Any, log_probs: Any) -> None:
    tokens, last_n, k, temperature = prompt(40), 30, 5, 0.7
    targets_TK = np.random.default_rng(1).integers(-1, 320, (39, 3)).astype(np.int32)
    targets_TK[3] = -1
    wishes = PromptWishes(last_n=last_n, top=k, targets_TK=targets_TK, alternatives=2)
    plain = ask("a", tokens, 8, temperature=temperature, seed=9, prompt_logprobs=True, topk_sample=4)
    request = replace(plain, prompt=wishes)
    sampler = qwen.sampler()
    alone = run_all(sampler, request)["a"]
    crowd = run_all(sampler, ask("x", prompt(40), 8), ask("y", prompt(9), 8, prompt_logprobs=True), request)
    assert crowd["x"].sequences[0].top is None and crowd["x"].top is None
    (sequence,) = alone.sequences
    expected = log_probs([*tokens, *sequence.tokens_T.tolist()])
    rows = expected[:39]
    for result in (alone, crowd["a"]):
        assert result.prompt_logprobs_T is not None and result.top is not None
        assert result.targets_TK is not None and result.alternatives is not None
        assert np.isnan(result.prompt_logprobs_T[:-last_n]).all()
        wanted = np.take_along_axis(rows, np.array(tokens[1:])[:, None], 1)[:, 0]
        close_logprobs(result.prompt_logprobs_T[-last_n:], wanted[-last_n:], ulps=1024)
        # the most likely tokens, only for the last n
        assert result.top.tokens_Nk.shape == (40, k) and result.top.tokens_Nk.dtype == np.int32
        assert (result.top.logprobs_Nk[:-last_n] == NO_LOGPROB).all() and not result.top.tokens_Nk[:-last_n].any()
        best = np.sort(rows, -1)[:, ::-1][-last_n:, :k]
        close_logprobs(result.top.logprobs_Nk[-last_n:], best, ulps=1024)
        own = np.take_along_axis(rows[-last_n:], result.top.tokens_Nk[-last_n:], 1)
        close_logprobs(result.top.logprobs_Nk[-last_n:], own, ulps=1024)
        # given tokens, at all positions
        given = np.where(targets_TK >= 0, np.take_along_axis(rows, np.maximum(targets_TK, 0), 1), 0)
        close_logprobs(result.targets_TK, given, ulps=1024)
        assert (result.targets_TK[targets_TK == -1] == 0).all()
        # alternatives: logprobs without temperature, drawn by the request's own random numbers
        drawn, uniforms = result.alternatives.tokens_Nk, UniformStream(9, ALTERNATIVES).draw(78).reshape(39, 2)
        assert drawn.shape == (39, 2) and len(np.unique(drawn)) > 10
        close_logprobs(result.alternatives.logprobs_Nk, np.take_along_axis(rows, drawn, 1), ulps=1024)
        weights = np.exp(rows / temperature)
        assert _draws_match_distribution(weights, drawn, uniforms)
        # sampled tokens
        (one,) = result.sequences
        assert one.top is not None and one.top.tokens_Nk.shape == (8, 4)
        after = expected[39:47]
        close_logprobs(one.top.logprobs_Nk, np.sort(after, -1)[:, ::-1][:, :4], ulps=1024)
        np.testing.assert_array_equal(one.tokens_T, sequence.tokens_T)
    assert alone.alternatives is not None and crowd["a"].alternatives is not None
    np.testing.assert_array_equal(alone.alternatives.tokens_Nk, crowd["a"].alternatives.tokens_Nk)


def _draws_match_distribution(weights_NV: Any, drawn_Nk: Any, uniforms_Nk: Any) -> bool:
    """Whether each draw inverts the distribution at its number, in the sampler's order (by column of 128, then row)."""
    padded = np.pad(weights_NV, ((0, 0), (0, -weights_NV.shape[1] % 128)))
    order = np.arange(padded.shape[1]).reshape(-1, 128).T.reshape(-1)
    ends = np.cumsum(padded[:, order], -1) / padded.sum(-1, keepdims=True)
    place = np.argsort(order)[drawn_Nk]
    high = np.take_along_axis(ends, place, 1)
    low = high - np.take_along_axis(padded / padded.sum(-1, keepdims=True), drawn_Nk, 1)
    return bool(((uniforms_Nk >= low - 1e-4) & (uniforms_Nk <= high + 1e-4)).all())


def test_a_prompt_that_fills_the_context_is_scored_to_its_last_token(qwen: Any, log_probs: Any) -> None:
    tokens = prompt(256)
    wishes = PromptWishes(top=3, targets_TK=np.full((255, 1), 7, np.int32))
    asked = [
        ask("scored", tokens, 1, prompt_logprobs=True),
        replace(ask("all", tokens, 1, prompt_logprobs=True), prompt=wishes),
        ask("beside", prompt(100), 9),
    ]
    results = run_all(qwen.sampler(max_context=256, pages=6), *asked)
    expected = log_probs(tokens)
    for name in ("scored", "all"):
        scored = results[name].prompt_logprobs_T
        close_logprobs(scored[1:], np.take_along_axis(expected[:-1], np.array(tokens[1:])[:, None], 1)[:, 0], ulps=1024)
        (sequence,) = results[name].sequences
        assert sequence.stop_reason == "length" and sequence.tokens_T.tolist() == [int(expected[-1].argmax())]
    close_logprobs(results["all"].targets_TK[:, 0], expected[:-1, 7], ulps=1024)
    assert results["beside"].error is None

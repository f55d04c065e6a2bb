"""Draws against NumPy: the possible tokens, their frequencies, and independent random numbers for each row."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.compute.closeness import close_logprobs

from tinkerflow.backend.compute.sampler.sampling import (
    Choice,
    UniformStream,
    filtered,
    greedy_choice,
    invert,
    normal_temperature,
    sample,
    sample_with_supports,
)
from tinkerflow.backend.spec.supports import MOST_SUPPORTED

ROWS, VOCAB = 4096, 300
jitted_sample, jitted_filter, jitted_invert = jax.jit(sample), jax.jit(filtered), jax.jit(invert)


def reference(logits_V: Any, temperature: float, top_k: int, top_p: float, min_p: float = 0.0) -> Any:
    """The distribution in float64, by sorting."""
    weights = np.exp((logits_V.astype(np.float64) - logits_V.max()) / temperature)
    weights[weights < min_p] = 0
    order = np.argsort(-weights, kind="stable")
    if top_k > 0:
        weights[order[top_k:]] = 0
    share = weights[order] / weights.sum()
    if top_p < 1:
        weights[order[1:][np.cumsum(share)[:-1] >= top_p]] = 0
    return weights / weights.sum()


def choice(rows: int, temperature: float, top_k: int = -1, top_p: float = 1.0, min_p: float = 0.0) -> Choice:
    made = greedy_choice(rows)
    made.temperature_S[:], made.top_k_S[:] = temperature, top_k
    made.top_p_S[:], made.min_p_S[:] = top_p, min_p
    return made


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, -1, 1.0, 0.0),
        (0.5, -1, 1.0, 0.0),
        (2.0, -1, 1.0, 0.0),
        (1.0, 7, 1.0, 0.0),
        (1.0, -1, 0.8, 0.0),
        (1.3, 20, 0.7, 0.0),
        (1.0, 1, 1.0, 0.0),
        (1.0, -1, 1.0, 0.1),
        (1.5, 50, 0.9, 0.05),
        (1.0, -1, 1.0, 1.0),
    ],
)
def test_sampled_token_frequencies_match_the_distribution(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits_V = np.random.default_rng(0).normal(size=VOCAB, scale=2).astype(np.float32)
    expected_V = reference(logits_V, temperature, top_k, top_p, min_p)
    uniform_S = np.concatenate([UniformStream(seed, 0).draw(1) for seed in range(ROWS)])
    tokens_S, logprobs_S = jitted_sample(
        np.tile(logits_V, (ROWS, 1)), choice(ROWS, temperature, top_k, top_p, min_p), uniform_S
    )
    counts_V = np.bincount(np.asarray(tokens_S), minlength=VOCAB)
    assert not counts_V[expected_V == 0].any()
    spread_V = np.sqrt(ROWS * expected_V * (1 - expected_V))
    assert (np.abs(counts_V - ROWS * expected_V) <= 5 * spread_V + 2).all()
    large = ROWS * expected_V >= 5  # chi-square over frequent tokens, with a bound of five sigma
    square = (((counts_V - ROWS * expected_V) ** 2)[large] / (ROWS * expected_V[large])).sum()
    assert square <= large.sum() + 5 * np.sqrt(2 * large.sum())
    # logprobs are those of the softmax without temperature and filters
    close_logprobs(logprobs_S, np.log(reference(logits_V, 1.0, -1, 1.0))[np.asarray(tokens_S)], ulps=16)


def test_temperature_zero_takes_the_first_of_equal_maxima() -> None:
    logits_SV = np.zeros((ROWS, VOCAB), np.float32)
    logits_SV[:, [17, 40]] = 3
    mixed = choice(ROWS, 0.0, 5, 0.5)
    mixed.temperature_S[1::2] = 1.0  # other rows of the batch change nothing
    tokens_S, _ = jitted_sample(logits_SV, mixed, np.full(ROWS, 0.7, np.float32))
    assert (np.asarray(tokens_S)[::2] == 17).all()


def test_a_tiny_temperature_is_greedy_and_stays_finite() -> None:
    logits_SV = np.random.default_rng(1).normal(size=(ROWS, VOCAB)).astype(np.float32) * 50
    tokens_S, logprobs_S = jitted_sample(logits_SV, choice(ROWS, 1e-30), np.full(ROWS, 0.999, np.float32))
    assert (np.asarray(tokens_S) == logits_SV.argmax(axis=1)).all()
    assert np.isfinite(logprobs_S).all()


@pytest.mark.parametrize("temperature", [1e37, 1e38, 1e300])
def test_a_huge_temperature_draws_only_allowed_tokens(temperature: float) -> None:
    logits_SV = np.random.default_rng(1).normal(size=(ROWS, VOCAB)).astype(np.float32)
    allowed_SV = np.where(np.arange(VOCAB) % 100 == 5, logits_SV, -np.inf).astype(np.float32)
    huge = choice(ROWS, normal_temperature(temperature))
    tokens_S, _ = jitted_sample(logits_SV, huge, np.linspace(0.01, 0.99, ROWS, dtype=np.float32), allowed_SV)
    assert {*np.asarray(tokens_S).tolist()} == {*range(5, VOCAB, 100)}


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    top_k=st.one_of(st.just(-1), st.integers(1, 2 * VOCAB)),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    min_p=st.one_of(st.just(0.0), st.floats(2.0**-13, 1.0, width=32)),
    scale=st.sampled_from([0.1, 1.0, 10.0]),
)
def test_filters_keep_the_tokens_that_sorting_keeps(
    seed: int, top_k: int, top_p: float, min_p: float, scale: float
) -> None:
    logits_V = np.random.default_rng(seed).normal(size=VOCAB, scale=scale).astype(np.float32)
    weights_V = np.exp(logits_V - logits_V.max())
    kept_V = np.asarray(jitted_filter(weights_V[None], choice(1, 1.0, top_k, top_p, min_p)))[0]
    kept = kept_V > 0
    np.testing.assert_array_equal(kept_V[kept], weights_V[kept])
    expected_V = reference(logits_V, 1.0, top_k, top_p, min_p)
    different = np.flatnonzero(kept != (expected_V > 0))
    # float32 sums may move the border of top_p by one token
    # and rounding may decide whether a weight is above min_p
    assert len(different) <= (top_p < 1) + (min_p > 0)


def test_ties_at_the_border_are_all_kept() -> None:
    weights_V = np.full(VOCAB, 0.25, np.float32)
    weights_V[:3] = 1
    kept_V = np.asarray(jitted_filter(weights_V[None], choice(1, 1.0, 5)))[0]
    assert (kept_V > 0).all()
    assert (np.asarray(jitted_filter(weights_V[None], choice(1, 1.0, 2)))[0] > 0).sum() == 3


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), empty=st.floats(0, 0.999), uniform=st.floats(0, 1, exclude_max=True))
def test_inversion_never_finds_a_token_of_weight_zero(seed: int, empty: float, uniform: float) -> None:
    generator = np.random.default_rng(seed)
    weights_V = (generator.random(VOCAB) * (generator.random(VOCAB) >= empty)).astype(np.float32)
    weights_V[generator.integers(VOCAB)] = 1e-6
    wanted = np.float32(uniform) * weights_V.sum()
    (token,) = np.asarray(jitted_invert(weights_V[None], wanted[None]))
    assert weights_V[token] > 0


def test_random_stream_depends_only_on_seed_and_index() -> None:
    whole = UniformStream(-5, 3).draw(20)
    assert whole.dtype == np.float32 and ((whole > 0) & (whole < 1)).all()
    parts = UniformStream(2**64 - 5, 3)
    np.testing.assert_array_equal(np.concatenate([parts.draw(7), parts.draw(13)]), whole)
    assert (UniformStream(-5, 4).draw(20) != whole).all()
    assert (UniformStream(6, 3).draw(20) != whole).all()
    # pinned: a seed must mean the same tokens after an upgrade of NumPy
    np.testing.assert_array_equal(
        UniformStream(1, 0).draw(3), np.float32([0.3035680651664734, 0.8487088084220886, 0.15613478422164917])
    )


def test_supports_are_the_tokens_that_a_row_was_drawn_from() -> None:
    """Each row uses its own filters. Rows without filters, and rows with too many tokens, have no supports."""
    rows = [(1.0, 7, 1.0, 0.0), (1.3, 20, 0.7, 0.0), (0.5, -1, 0.9, 0.0), (1.0, -1, 1.0, 0.1), (1.0, -1, 1.0, 0.0)]
    rows += [(0.0, 5, 1.0, 0.0), (1.0, MOST_SUPPORTED + 1, 1.0, 0.0)]
    made = greedy_choice(len(rows))
    for row, values in enumerate(rows):
        for part, value in zip(jax.tree.leaves(made), values, strict=True):
            part[row] = value
    logits_SV = np.random.default_rng(0).normal(size=(len(rows), VOCAB), scale=2).astype(np.float32)
    uniform_S = UniformStream(1, 0).draw(len(rows))
    tokens_S, logprobs_S, supports = jax.jit(sample_with_supports)(logits_SV, made, uniform_S)
    assert all(
        np.array_equal(*pair)
        for pair in zip(jitted_sample(logits_SV, made, uniform_S), (tokens_S, logprobs_S), strict=True)
    )
    for row, values in enumerate(rows):
        ids = [token for token in np.asarray(supports.tokens_Ss)[row].tolist() if token >= 0]
        if row >= 4:
            assert not ids and float(supports.log_mass_S[row]) == 0
            continue
        expected_V = reference(logits_SV[row], *values)
        assert sorted(ids) == np.flatnonzero(expected_V).tolist() and int(tokens_S[row]) in ids
        log_mass = np.log(reference(logits_SV[row], 1.0, -1, 1.0)[ids].sum())
        assert float(supports.log_mass_S[row]) == pytest.approx(log_mass, abs=1e-5)

"""Samplers with a KV cache in float8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.compute.conftest import ask, result_of
from tests.compute.sampler.conftest import make_tiny, prompt


@pytest.mark.parametrize(
    ("family", "most"),
    [
        ("qwen3", 0.1),
        *(pytest.param(*one, marks=pytest.mark.thorough) for one in (("qwen3_next", 0.1), ("gemma4_text", 0.4))),
    ],
)
def test_float8_cache_gives_nearly_the_logprobs_of_the_exact_cache(family: str, most: float, tmp_path: Path) -> None:
    """Includes layers with states, and layers with two kinds of heads."""
    tiny = make_tiny(tmp_path, family)
    plain, small = (tiny.sampler(kv_cache=kind) for kind in ("full", "float8"))
    assert plain._model.cache.k[0].nbytes == 4 * small._model.cache.k[0].nbytes
    request = ask("a", prompt(60), 1, prompt_logprobs=True)
    wanted, found = (result_of(one, request).prompt_logprobs_T[1:] for one in (plain, small))
    assert 0 < np.abs(found - wanted).mean() < most


@pytest.mark.thorough
def test_float8_cache_repeats_its_results_from_cached_pages(qwen: Any) -> None:
    sampler, tokens = qwen.sampler(kv_cache="float8"), prompt(150)
    first, again, repeated = (result_of(sampler, ask(name, tokens, 20)) for name in "abc")
    assert first.prompt_cache_hit_tokens == 0 < again.prompt_cache_hit_tokens
    assert first.sequences[0].tokens_T[0] == again.sequences[0].tokens_T[0]
    np.testing.assert_allclose(first.sequences[0].logprobs_T[0], again.sequences[0].logprobs_T[0], atol=0.05)
    np.testing.assert_array_equal(again.sequences[0].tokens_T, repeated.sequences[0].tokens_T)
    np.testing.assert_array_equal(again.sequences[0].logprobs_T, repeated.sequences[0].logprobs_T)

"""Samplers whose KV cache holds float8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.compute.sampler.conftest import make_tiny


@pytest.mark.parametrize(
    ("family", "most"), [("qwen3", 0.12), ("qwen3_next", 0.12), ("glm4_moe_lite", 0.25), ("gemma4_text", 0.4)]
)
def test_a_sampler_with_a_cache_in_float8(
    family: str, most: float, tmp_path: Path, ask: Any, run_all: Any, prompt: Any
) -> None:
    """It says almost what the exact one says, also beside others, and from pages that it kept.

    Plain layers, layers with states, with latents, and with two kinds of heads.
    """
    tiny = make_tiny(tmp_path, family)
    plain, small = (tiny.sampler(kv_cache=kind) for kind in ("full", "float8"))
    assert plain._model.cache.k[0].nbytes == 4 * small._model.cache.k[0].nbytes
    tokens = prompt(150)
    wanted, found = (run_all(one, ask("a", tokens, 20, prompt_logprobs=True))["a"] for one in (plain, small))
    error = np.abs(found.prompt_logprobs_T[1:] - wanted.prompt_logprobs_T[1:])
    assert 0 < error.mean() < most
    alone = run_all(small, ask("b", tokens, 20))["b"]
    assert alone.prompt_cache_hit_tokens > 0
    beside = run_all(small, ask("c", tokens, 20), *(ask(str(size), prompt(size), 20) for size in (40, 90, 200)))["c"]
    for again in (alone, beside):
        assert again.sequences[0].tokens_T[0] == found.sequences[0].tokens_T[0]
        np.testing.assert_allclose(again.sequences[0].logprobs_T[0], found.sequences[0].logprobs_T[0], atol=0.05)
    repeated = run_all(small, ask("d", tokens, 20))["d"]
    np.testing.assert_array_equal(repeated.sequences[0].tokens_T, alone.sequences[0].tokens_T)
    np.testing.assert_array_equal(repeated.sequences[0].logprobs_T, alone.sequences[0].logprobs_T)

"""In a wide stack each row is multiplied by its own adapter's columns, and the samples do not change."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from tests.compute.closeness import close, close_logprobs
from tests.compute.conftest import ask, run_all
from tests.compute.sampler.conftest import prompt, random_lora

from tinkerflow.backend.compute.models.lora import LoraPair
from tinkerflow.backend.compute.sampler import snapshot_cache
from tinkerflow.backend.compute.sampler.adapter_runs import by_runs
from tinkerflow.backend.compute.sampler.snapshot_cache import stack_apply
from tinkerflow.backend.spec.commands import LoraSpec

WIDTH = 256
PLACES = [(0, 32), (32, 40), (40, 168), (176, 200), (224, 256)]  # a wide adapter begins in the middle of a block


@pytest.mark.parametrize("tokens", [1, 5])
def test_adapter_runs_equal_the_whole_stack(tokens: int) -> None:
    random = np.random.default_rng(tokens)

    def array(*shape: int) -> np.ndarray[Any, Any]:
        return random.standard_normal(shape).astype(np.float32)

    columns_B2 = np.array([(0, 0), *(PLACES[i] for i in random.integers(0, 5, 21)), (0, 0), PLACES[2]], np.int32)
    x_BTi, pairs = array(24, tokens, 48), tuple(LoraPair(array(WIDTH, 48), array(WIDTH, out)) for out in (20, 36))
    found = jax.jit(lambda c, x, p: by_runs(c, WIDTH)(x, p))(columns_B2, x_BTi, pairs)
    expected = jax.jit(lambda c, x, p: stack_apply(c, WIDTH)(x, p))(columns_B2, x_BTi, pairs)
    for one, other in zip(found, expected, strict=True):
        assert not np.any(np.asarray(one)[[0, 22]]), "rows of the base model use no column"
        close(one, other, ulps=64, scale=100.0)


def test_overflow_stays_in_the_columns_of_its_row() -> None:
    pair = LoraPair(np.ones((64, 8), np.float32), np.ones((64, 8), np.float32))
    pair.A[:32] = 3e38
    columns_B2, x_BTi = np.array([(0, 32), (32, 64)], np.int32), np.ones((2, 1, 8), np.float32)
    (found,) = by_runs(columns_B2, 64)(jax.device_put(x_BTi), (pair,))
    assert not np.isfinite(found[0]).any() and (np.asarray(found[1]) == 8 * 32).all()


def test_wide_stack_samples_like_a_narrow_one(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    used, real = list[int](), by_runs
    monkeypatch.setattr(snapshot_cache, "by_runs", lambda columns, width: used.append(width) or real(columns, width))
    sampler, spec = qwen.sampler(decode_chunk=6), LoraSpec(80)  # a chunk that no other test has compiled
    for seed, name in enumerate("ab"):
        sampler.publish(name, random_lora(qwen.cfg, spec, seed), spec)
    asked = [ask(name, prompt(9), 12, snapshot_id=name) for name in "ab"]
    alone = run_all(sampler, asked[1])["b"].sequences[0]
    assert not used
    together = run_all(sampler, *asked)
    assert set(used) == {512}
    mine, theirs = (together[name].sequences[0] for name in "ba")
    assert alone.tokens_T.tolist() == mine.tokens_T.tolist() != theirs.tokens_T.tolist()
    close_logprobs(alone.logprobs_T, mine.logprobs_T, ulps=128)

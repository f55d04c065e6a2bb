"""The rank of experts, and the factor in PEFT's files that gives them the right scale."""

from __future__ import annotations

import numpy as np
import pytest

from tinkerflow.backend.compute.models.families import load_config
from tinkerflow.backend.compute.models.lora_weights import check_spec, from_shared_scale, init_lora, to_shared_scale
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.spec.commands import LORA_ALPHA, LoraSpec
from tinkerflow.backend.spec.ranks import expert_rank, peft_factor


@pytest.mark.parametrize(
    ("rank", "per_token", "own"),
    [(32, 8, 4), (20, 8, 2), (8, 8, 1), (5, 8, 1), (1, 8, None), (32, 1, None), (32, 0, None)],
)
def test_the_rank_is_divided_and_at_least_one(rank, per_token, own):
    assert expert_rank(rank, per_token, "divided") == own
    assert expert_rank(rank, per_token, "full") is None


@pytest.mark.parametrize(("rank", "own", "factor"), [(32, 4, 8), (24, 3, 8), (8, 8, 1), (20, 2, 1), (32, 10, 1)])
def test_rank_factor_is_exact(rank, own, factor):
    assert peft_factor(rank, own) == factor
    if factor > 1:
        assert LORA_ALPHA / rank * factor == LORA_ALPHA / own


def test_a_shared_scale_and_back_is_the_same_bit_for_bit(moe):
    spec = LoraSpec(8, expert_rank=2)
    lora = init_lora(load_config(moe.folder), spec, 1)
    rng = np.random.default_rng(0)
    for pair in lora.layers.values():
        pair.B[:] = rng.normal(size=pair.B.shape) * 10.0 ** rng.integers(-30, 4, pair.B.shape)
    shared = to_shared_scale(spec, lora)
    assert np.array_equal(shared.layers["gate"].B, 4 * lora.layers["gate"].B)
    assert np.array_equal(shared.layers["q"].B, lora.layers["q"].B)
    again = from_shared_scale(spec, shared)
    assert all(np.array_equal(again.layers[name].B, pair.B) for name, pair in lora.layers.items())


@pytest.mark.parametrize("own", [0, 9])
def test_a_rank_out_of_range_is_named(own):
    with pytest.raises(UserError, match=f"expert_rank {own}: must be 1 to the rank, 8"):
        check_spec(LoraSpec(8, expert_rank=own))

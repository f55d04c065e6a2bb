"""Every registered loss per token: its value and slope against NumPy, by the public documentation's formulas.

A new loss needs a row in EXPECTED. `test_sequence_losses.py` tests the losses of whole sequences.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
import pytest
from tests.compute.closeness import close

from tinkerflow.backend.compute.training.token_losses import PER_TOKEN, choose, losses_and_slopes, token_losses
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.spec.losses import LOSSES, packed_inputs

Values = tuple[np.ndarray, np.ndarray]  # of each token: the loss, and its slope by the logprob


def cross_entropy(lp, x, c) -> Values:
    return -lp, -np.ones_like(lp)


def importance_sampling(lp, x, c) -> Values:
    ratio = np.exp(lp - x["logprobs"])
    kept = (ratio >= c["mask_low_threshold"]) & (ratio <= c["mask_high_threshold"])
    value = np.where(kept, -ratio * x["advantages"], 0.0)
    return value, value


def ppo(lp, x, c) -> Values:
    ratio = np.exp(lp - x["logprobs"])
    unclipped, clipped = ratio * x["advantages"], np.clip(ratio, *bounds(x, c)) * x["advantages"]
    return -np.minimum(unclipped, clipped), np.where(unclipped <= clipped, -unclipped, 0.0)


def cispo(lp, x, c) -> Values:
    weight = np.clip(np.exp(lp - x["logprobs"]), *bounds(x, c)) * x["advantages"]
    return -weight * lp, -weight


def dro(lp, x, c) -> Values:
    distance = lp - x["logprobs"]
    return -(lp * x["advantages"] - 0.5 * c["beta"] * distance**2), -(x["advantages"] - c["beta"] * distance)


def bounds(x, c):
    names = ("clip_low_threshold", "clip_high_threshold")
    return [np.where(np.isnan(x[name]), c[name], x[name]) for name in names]


EXPECTED: dict[str, tuple[Callable[..., Values], dict[str, float]]] = {
    "cross_entropy": (cross_entropy, {}),
    "importance_sampling": (importance_sampling, {"mask_low_threshold": 0.5, "mask_high_threshold": 3.0}),
    "ppo": (ppo, {"clip_low_threshold": 0.5, "clip_high_threshold": 3.0}),
    "cispo": (cispo, {"clip_low_threshold": 0.5, "clip_high_threshold": 3.0}),
    "dro": (dro, {"beta": 0.3}),
}


def draw(shape: tuple[int, ...], *, own: bool) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Logprobs, and all inputs of all losses. own: optional inputs have values for half of the tokens."""
    rng = np.random.default_rng(0)
    lp, inputs = rng.normal(size=shape).astype(np.float32), {}
    for name, fill in packed_inputs().items():
        inputs[name] = rng.normal(size=shape).astype(np.float32)
        if np.isnan(fill):
            given = rng.random(shape) < 0.5 if own else np.zeros(shape, bool)
            inputs[name] = np.where(given, np.abs(inputs[name]), np.float32(np.nan))
    return lp, inputs


@pytest.mark.parametrize("loss", [spec.name for spec in PER_TOKEN])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("configured", [False, True])
def test_value_and_slope(loss, own, configured):
    formula, config = EXPECTED[loss]
    config = config if configured else {}
    lp, inputs = draw((5, 7, 2), own=own)
    wide = {name: array.astype(np.float64) for name, array in inputs.items()}
    value, slope = formula(lp.astype(np.float64), wide, {**LOSSES[loss].defaults, **config})
    choice = choose(loss, config)
    close(token_losses(choice, lp, inputs), value * wide["weights"])
    found = jax.grad(lambda x: token_losses(choice, x, inputs).sum())(lp)
    close(found, slope * wide["weights"])
    for found, expected in zip(losses_and_slopes(choice, lp, inputs), (value, slope), strict=True):
        close(found, expected * wide["weights"])


def test_unchosen_loss_branch_may_have_a_nan_slope():
    lp, inputs = draw((3, 2), own=False)
    inputs["logprobs"][:] = -1e4  # the ratios of the others are infinite
    loss, slope = losses_and_slopes(choose("cross_entropy", {}), lp, inputs)
    assert np.array_equal(loss, -lp * inputs["weights"]) and np.array_equal(slope, -inputs["weights"])


def test_a_masked_token_with_an_infinite_ratio_has_no_slope():
    lp, inputs = draw((3, 2), own=False)
    inputs["logprobs"][0] = -1e4
    choice = choose("importance_sampling", {"mask_high_threshold": 2.0})
    for found in losses_and_slopes(choice, lp, inputs):
        assert not found[0].any() and np.isfinite(found).all() and found[1:].any()


def test_nan_logprob_is_not_masked():
    lp, inputs = draw((3, 2), own=False)
    lp[0] = np.nan
    loss, _ = losses_and_slopes(choose("importance_sampling", {"mask_high_threshold": 2.0}), lp, inputs)
    assert np.isnan(loss[0]).all() and np.isfinite(loss[1:]).all()


def test_ratio_at_its_bound_has_the_whole_slope():
    lp, inputs = draw((5, 2), own=False)
    inputs["logprobs"] = lp
    _, slope = losses_and_slopes(choose("ppo", {"clip_low_threshold": 1.0, "clip_high_threshold": 1.0}), lp, inputs)
    assert np.array_equal(slope, -inputs["advantages"] * inputs["weights"])


def test_unknown_names_are_refused():
    with pytest.raises(UserError, match="loss_fn is 'nope': must be one of"):
        choose("nope", {})
    with pytest.raises(UserError, match=r"loss_fn_config has the key 'beta': must be one of clip_low_threshold"):
        choose("ppo", {"beta": 1.0})

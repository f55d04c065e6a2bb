"""Each loss and its slope against NumPy, by the public documentation's formulas."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tinkerflow.backend.commands import TOKEN_LOSSES
from tinkerflow.backend.compute.losses import LossInputs, choose, token_losses
from tinkerflow.backend.errors import UserError


def expected(loss, lp, q, adv, low=0.8, high=1.2, beta=0.05):
    """Value and slope by the logprob, of each token."""
    ratio = np.exp(lp - q)
    match loss:
        case "cross_entropy":
            return -lp, -np.ones_like(lp)
        case "importance_sampling":
            return -ratio * adv, -ratio * adv
        case "ppo":
            unclipped, clipped = ratio * adv, np.clip(ratio, low, high) * adv
            return -np.minimum(unclipped, clipped), np.where(unclipped <= clipped, -ratio * adv, 0.0)
        case "cispo":
            weight = np.clip(ratio, low, high)
            return -weight * lp * adv, -weight * adv
        case "dro":
            return -(lp * adv - 0.5 * beta * (lp - q) ** 2), -(adv - beta * (lp - q))


@pytest.mark.parametrize("loss", TOKEN_LOSSES)
@pytest.mark.parametrize("given", [{}, {"low": 0.5, "high": 3.0, "beta": 0.3}])
def test_value_and_slope(loss, given):
    rng = np.random.default_rng(0)
    lp, q, adv, weights = (rng.normal(size=(5, 7, 2)).astype(np.float32) for _ in range(4))
    keys = {"ppo": ("low", "high"), "cispo": ("low", "high"), "dro": ("beta",)}.get(loss, ())
    wire = {"low": "clip_low_threshold", "high": "clip_high_threshold", "beta": "beta"}
    choice = choose(loss, {wire[k]: given[k] for k in keys if k in given})
    defaults = {"cispo": {"low": 0.0, "high": 4.0}}.get(loss, {})
    value, slope = expected(
        loss, *(a.astype(np.float64) for a in (lp, q, adv)), **(defaults | {k: given[k] for k in given})
    )
    unset = np.full_like(q, np.nan)
    inputs = LossInputs(weights, q, adv, unset, unset)
    assert np.allclose(token_losses(choice, lp, inputs), value * weights, rtol=2e-5, atol=1e-6)
    found = jax.grad(lambda x: token_losses(choice, x, inputs).sum())(lp)
    assert np.allclose(found, slope * weights, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("loss", ["ppo", "cispo"])
def test_a_tokens_own_thresholds_go_before_the_configs(loss):
    rng = np.random.default_rng(1)
    lp, q, adv = (rng.normal(size=(6, 4, 1)).astype(np.float32) for _ in range(3))
    low, high = np.full_like(q, 0.5), np.full_like(q, np.nan)
    low[:, 2:] = np.nan
    high[:, 1:3] = 1.5
    choice = choose(loss, {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1})
    of = {"low": np.where(np.isnan(low), 0.9, low), "high": np.where(np.isnan(high), 1.1, high)}
    value, _ = expected(loss, lp, q, adv, **of)
    inputs = LossInputs(np.ones_like(q), q, adv, low, high)
    assert np.allclose(token_losses(choice, lp, inputs), value, rtol=2e-5, atol=1e-6)


def test_unknown_names_are_refused():
    with pytest.raises(UserError, match="'nope'"):
        choose("nope", {})
    with pytest.raises(UserError, match=r"loss_fn_config\['beta'\]: ppo does not take it"):
        choose("ppo", {"beta": 1.0})

"""Every loss at extreme inputs: masked tokens have no effect, and branches that are not taken give no gradient.

Clients put placeholders such as -9999 into masked tokens. One NaN from them would spoil the whole gradient.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import orjson
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.compute.conftest import add_adapter, examples, gradients
from tests.compute.training.test_custom_losses import elementwise, gspo, masked, ppo, reductions, shapes, trace
from tests.compute.training.test_losses import EXPECTED
from tests.compute.training.test_sequence_losses import judge

from tinkerflow.backend.compute.training.custom_loss import custom_loss
from tinkerflow.backend.compute.training.custom_loss.evaluate import evaluate
from tinkerflow.backend.compute.training.custom_loss.masked import value_and_slope
from tinkerflow.backend.compute.training.packing import pack
from tinkerflow.backend.compute.training.token_losses import PER_TOKEN, choose, losses_and_slopes, token_losses
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.spec.commands import Example, Forward, ForwardResult
from tinkerflow.backend.spec.losses import LOSSES, packed_inputs
from tinkerflow.backend.wire import drift_metrics

T = 8
EXTREME = (-100.0, -9999.0, -1e30, -3.4e38, 3.4e38, 50.0, 1e-40)
BUILT_IN = [spec for spec in LOSSES.values() if not spec.traced]
MASKED = [(spec, mask) for spec in BUILT_IN for mask in spec.masks]
numbers = st.sampled_from(EXTREME)


@jax.jit
def of_tokens(choice: Any, logprobs: Any, inputs: Any) -> Any:
    """The loss and the slopes as CPUs compute them, and the losses and slopes as GPUs and TPUs do."""
    on_cpus = jax.value_and_grad(lambda lp: token_losses(choice, lp, inputs).sum())(logprobs)
    return on_cpus, losses_and_slopes(choice, logprobs, inputs)


def outcome(loss: str, example: Example, logprobs_T: np.ndarray, **config: float) -> Any:
    """The losses, the slopes and the metrics of training on the example."""
    spec = LOSSES[loss]
    command = Forward("a", (example,), loss, {**spec.defaults, **config})
    drift = drift_metrics(command, ForwardResult((logprobs_T,), 0.0))
    if spec.per_token is None:
        judged = judge(command, [logprobs_T[:, None]])
        return judged.loss_sum, judged.surrogates[0].weights_TK, drift
    (batch,) = pack([example], microbatch_tokens=64, loss=spec)
    padded = np.zeros(batch.targets_BTK.shape, np.float32)
    padded[0, :T, 0] = logprobs_T
    return jax.device_get(of_tokens(choose(loss, config), padded, batch.inputs_BTK)), drift


def draw(seed: int = 0) -> tuple[Example, np.ndarray]:
    """An example with all inputs, and its log probabilities, near those of the sampler."""
    rng = np.random.default_rng(seed)
    old = -rng.exponential(1.0, (T, 1)).astype(np.float32)
    columns = np.zeros((T, 1), np.int32)
    inputs = {"logprobs": old, "advantages": rng.normal(size=(T, 1)).astype(np.float32)}
    weights = rng.uniform(0.5, 2, (T, 1)).astype(np.float32)
    near = old[:, 0] + rng.normal(size=T, scale=0.1).astype(np.float32)
    return Example(columns[:, 0], columns, weights, inputs=inputs), near


def masking(example: Example, loss: str, mask: str, places: list[int], fillers: list[float]) -> Example:
    """The example with the tokens at `places` masked by the input `mask`, and with `fillers` in their other inputs."""
    columns = {"weights": example.weights_TK, **example.inputs}
    for given_input, filler in zip(LOSSES[loss].inputs, fillers, strict=False):
        column = columns.get(given_input.name, np.ones((T, 1), np.float32)).copy()
        column[places] = max(filler, given_input.low)
        if given_input.name in columns or given_input.name.startswith("clip"):
            columns[given_input.name] = column
    columns[mask] = columns[mask].copy()
    columns[mask][places] = 0.0
    weights = columns.pop("weights")
    return replace(example, weights_TK=weights, inputs=columns)


@pytest.mark.parametrize(("spec", "mask"), MASKED, ids=lambda x: getattr(x, "name", x))
@settings(max_examples=30)
@given(st.sets(st.integers(0, T - 1), min_size=1, max_size=T - 1), st.lists(numbers, min_size=6, max_size=6))
def test_the_inputs_of_a_masked_token_change_no_bit(spec, mask, places, fillers):
    example, logprobs_T = draw()
    config = {"kl_coeff": 0.5} if "kl_coeff" in spec.config else {}
    usual, odd = (masking(example, spec.name, mask, list(places), given) for given in ([0.0] * 6, fillers))
    expected, found = (outcome(spec.name, one, logprobs_T, **config) for one in (usual, odd))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("spec", PER_TOKEN, ids=lambda spec: spec.name)
@settings(max_examples=60)
@given(st.lists(st.tuples(numbers, st.sampled_from([-1.0, 0.0, 1e-3, 2.0])), min_size=T, max_size=T), st.booleans())
def test_counted_tokens_have_the_slope_of_the_formula_unless_it_overflows(spec, tokens, own):
    """For example, PPO's clipped branch is flat for any ratio."""
    example, logprobs_T = draw()
    old, advantages = (np.array(column, np.float32)[:, None] for column in zip(*tokens, strict=True))
    inputs = {"logprobs": old, "advantages": advantages}
    if own:
        inputs |= {name: np.full((T, 1), value, np.float32) for name, value in CLIPS.items()}
    example = replace(example, inputs=inputs)
    (_, slopes), (losses, again) = outcome(spec.name, example, logprobs_T)[0]
    wide = {name: np.full((T, 1), fill) for name, fill in packed_inputs().items()} | {
        name: column.astype(np.float64) for name, column in inputs.items()
    }
    with np.errstate(all="ignore"):
        value, slope = EXPECTED[spec.name][0](logprobs_T[:, None].astype(np.float64), wide, spec.defaults)
    # The formula of a masked token, 0 times infinity, is not evaluated.
    counts = np.all([wide[mask] != 0 for mask in spec.masks if mask != "weights"], axis=0) | np.zeros((T, 1), bool)
    value, slope = (np.where(counts, x * example.weights_TK, 0.0) for x in (value, slope))
    for found, expected in ((slopes, slope), (again, slope), (losses, value)):
        fits = np.abs(expected) < 1e30
        np.testing.assert_allclose(found[0, :T][fits], expected[fits], rtol=1e-4, atol=1e-30)


CLIPS = {"clip_low_threshold": 0.7, "clip_high_threshold": 1.5}


def test_sequence_loss_is_flat_where_its_ratio_is_clipped():
    example, logprobs_T = draw()
    far = np.full((T, 1), -9999, np.float32)
    advantages = np.abs(example.inputs["advantages"])
    advantages[0] = 0.0
    clipped = replace(example, inputs={"logprobs": far, "advantages": advantages})
    loss, weights, _ = outcome("gspo", clipped, logprobs_T)
    high = LOSSES["gspo"].defaults["clip_high_threshold"]
    assert loss == pytest.approx(-high * float((example.weights_TK * advantages).sum()), rel=1e-6)
    assert not weights.any()
    with pytest.raises(UserError, match="not finite"):
        outcome("gspo", replace(clipped, inputs={"logprobs": far, "advantages": -advantages}), logprobs_T)


# ------------------------------------------------------------------ traced losses
def weighted(logprobs, old, advantages, weights):
    ratio = torch.exp(logprobs - old)
    return -(weights * ratio * advantages).sum(), {"custom/ratio:mean": (ratio * weights).sum() / weights.sum()}


def divided(logprobs, old, advantages, weights):
    kl = torch.exp(old - logprobs) - 1 - (old - logprobs)
    return -((torch.exp(logprobs) / torch.exp(old) * advantages + kl) * weights).sum() / weights.sum(), {}


def selected(logprobs, old, advantages, weights):
    ratio, none = torch.exp(logprobs - old), torch.zeros_like(old)
    loss = torch.where(weights > 0, ratio * advantages, none) + (ratio**2).masked_fill(weights == 0, 0.0)
    return loss.sum(), {"custom/kept:sum": (weights > 0).sum()}


def clipped(logprobs, old, advantages, weights):
    ratio = torch.exp(logprobs - old)
    return -(torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) * weights).sum(), {}


def multiplied(logprobs, old, advantages, weights):
    outer = advantages.unsqueeze(1) * weights.unsqueeze(0)
    return torch.dot(weights, torch.exp(logprobs - old)) + (outer @ torch.exp(logprobs - old)).mean(), {}


def rooted(logprobs, old, advantages, weights):
    inside = (logprobs - old).square() * weights
    return (weights * inside.sqrt()).sum() + (weights * torch.log(inside)).sum(), {}


def zeroed(logprobs, old, advantages, weights):
    ratio, none = torch.exp(logprobs - old), torch.zeros_like(old)
    loss = torch.dot(torch.where(weights > 0, logprobs, none), ratio) + ((logprobs * weights) * ratio).sum()
    return loss + ((torch.exp((logprobs - old) * weights) - 1) * ratio).sum(), {}


def gated(logprobs, old, advantages, weights):
    ratio = torch.exp(logprobs - old)
    gate = torch.relu(torch.where(weights > 0, logprobs, old * 0 - 99) + 90)
    return (gate * ratio).sum() + (
        torch.sign(logprobs * weights) * ratio + (ratio * weights).detach() * ratio
    ).sum(), {}


def shared(logprobs, old, advantages, weights):
    return (weights / torch.exp(old - logprobs)).sum() + (weights * logprobs / torch.exp(logprobs - old)).sum(), {}


def smooth(logprobs, old, advantages, weights):
    ratio = torch.exp(logprobs - old)
    loss = F.softplus(ratio) + F.gelu(ratio) + F.silu(ratio) + F.logsigmoid(ratio) + torch.logaddexp(ratio, old)
    return (loss * weights).sum() + torch.xlogy(weights, ratio).sum(), {}


TRACED = [weighted, divided, selected, clipped, multiplied, rooted, zeroed, gated, shared, smooth]


@pytest.mark.parametrize("fn", TRACED, ids=lambda fn: fn.__name__)
@settings(max_examples=25)
@given(st.sets(st.integers(0, T - 1), min_size=1, max_size=T - 2), numbers, numbers)
def test_a_traced_loss_may_mask_tokens_as_it_likes(fn, places, old, advantage):
    example, logprobs_T = draw()

    def run(old: float, advantage: float) -> Any:
        given = {"old": example.inputs["logprobs"], "advantages": example.inputs["advantages"], "weights": [1.0] * T}
        inputs = {name: np.array(column, np.float32).reshape(T) for name, column in given.items()}
        for name, value in (("old", old), ("advantages", advantage), ("weights", 0.0)):
            inputs[name][list(places)] = value
        loss = trace(fn, logprobs=1, old=1, advantages=1, weights=1)
        return custom_loss(loss, replace(example, inputs=inputs), logprobs_T[:, None])

    if fn is multiplied:
        advantage = min(advantage, 50.0)  # in this loss, the input is a factor of counted tokens
        advantage = max(advantage, -50.0)
    loss, slope, metrics = run(old, advantage)
    expected, expected_slope, expected_metrics = run(0.0, advantage if fn is multiplied else 0.0)
    assert np.isfinite(loss) and loss == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(slope, expected_slope, rtol=1e-5, atol=1e-6)
    assert metrics == pytest.approx(expected_metrics, rel=1e-5)


def test_example_without_counted_tokens_trains_nothing():
    def averaged(logprobs, weights):
        return (logprobs * weights).sum() / weights.sum(), {"custom/mean:mean": weights.sum() / weights.sum()}

    example, logprobs_T = draw()
    empty = replace(example, inputs={"weights": np.zeros(T, np.float32)})
    loss, slope, metrics = custom_loss(trace(averaged, logprobs=1, weights=1), empty, logprobs_T[:, None])
    assert (loss, metrics) == (0.0, {"custom/mean:mean": 0.0}) and not slope.any()


@pytest.mark.parametrize("fn", [ppo, gspo, masked, reductions, shapes, elementwise], ids=lambda fn: fn.__name__)
def test_careful_program_matches_the_usual_one(fn):
    loss, (example, logprobs_T) = trace(fn, logprobs=1, old=1, advantages=1), draw()
    graph = orjson.loads(loss.nodes)
    values = (logprobs_T, *(column[:, 0] for column in example.inputs.values()))

    def run(*given: jax.Array) -> Any:
        return evaluate("loss", graph, given)

    expected = jax.jit(jax.value_and_grad(run, has_aux=True))(*values)
    found = jax.jit(lambda *given: value_and_slope(run, given))(*values)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


# ------------------------------------------------------------------ through a model
def test_placeholders_keep_gradients_finite_in_every_loss(executor):
    (example,) = examples((9,))
    example = replace(example, weights_TK=np.abs(example.weights_TK))
    traced = trace(weighted, logprobs=1, old=1, advantages=1, weights=1)
    for spec in LOSSES.values():
        found = []
        for filler in (0.0, -9999.0):
            name = f"{spec.name} {filler}"
            add_adapter(executor, name)
            columns = {"weights": example.weights_TK.copy(), **{k: v.copy() for k, v in example.inputs.items()}}
            columns["logprobs"][:] = -4.0
            columns["logprobs"][:3], columns["weights"][:3] = filler, 0.0
            weights = columns.pop("weights")
            one = replace(example, weights_TK=weights, inputs=columns)
            if spec.traced:
                flat = {"old": columns["logprobs"][:, 0], "advantages": columns["advantages"][:, 0]}
                one = replace(one, inputs={**flat, "weights": weights[:, 0]})
            command = Forward(name, (one,), spec.name, spec.defaults, custom=traced if spec.traced else None)
            result = executor.execute(command)
            found.append((result.loss_sum, gradients(executor, name)))
        (loss, grads), (expected_loss, expected) = found[1], found[0]
        assert loss == pytest.approx(expected_loss, rel=1e-6)
        assert any(array.any() for array in expected.values())
        for key, array in expected.items():
            np.testing.assert_allclose(grads[key], array, rtol=1e-5, atol=1e-6 if spec.traced else 0, err_msg=spec.name)

"""AdamW with decoupled weight decay and global-norm clipping, against NumPy in float64."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from msgspec.structs import asdict
from tests.compute.closeness import close
from tests.compute.conftest import examples, forward, gradients
from tests.compute.training.test_dimuon import matrix_sign

from tinkerflow.backend.compute.training.optimizer import fresh_state, step
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.spec.commands import CreateAdapter, ExportAdapter, LoraSpec, OptimStep
from tinkerflow.backend.spec.optimizers import OPTIMIZERS, check_classes, optimizer_of
from tinkerflow.backend.spec.optimizers.adamw import AdamParams
from tinkerflow.backend.spec.optimizers.dimuon import DimuonParams

STEPS = (
    AdamParams(learning_rate=1e-2),
    AdamParams(learning_rate=3e-3, beta1=0.5, beta2=0.9, eps=1e-6, weight_decay=0.2),
    AdamParams(learning_rate=1e-2, grad_clip_norm=0.5),
    AdamParams(learning_rate=1e-2, grad_clip_norm=1e9),
)


def test_steps_with_changing_parameters(executor):
    executor.execute(CreateAdapter("adam", LoraSpec(4), 7))
    weights = {n: w.astype(np.float64) for n, w in executor.execute(ExportAdapter("adam", False)).weights.items()}
    mu, nu = ({n: np.zeros_like(w) for n, w in weights.items()} for _ in range(2))
    for count, params in enumerate(STEPS, 1):
        forward(executor, "adam", examples((9, 20), seed=count), backward=True)
        grads = {n: g.astype(np.float64) for n, g in gradients(executor, "adam").items()}
        norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
        if 0 < params.grad_clip_norm < norm:
            grads = {n: g * params.grad_clip_norm / norm for n, g in grads.items()}
        for n, g in grads.items():
            mu[n] = params.beta1 * mu[n] + (1 - params.beta1) * g
            nu[n] = params.beta2 * nu[n] + (1 - params.beta2) * g**2
            m, v = mu[n] / (1 - params.beta1**count), nu[n] / (1 - params.beta2**count)
            weights[n] = weights[n] - params.learning_rate * (
                m / (np.sqrt(v) + params.eps) + params.weight_decay * weights[n]
            )
        result = executor.execute(OptimStep("adam", params))
        assert result.step == count
        assert result.grad_norm == pytest.approx(norm, rel=1e-5)
        state = executor.execute(ExportAdapter("adam", True))
        for n, w in weights.items():
            # Gradients near zero are noise of either sign, and Adam makes whole steps of them. Compare the other
            # gradients.
            solid = np.sqrt(nu[n]) > 1e-4
            assert np.abs(state.weights[n] - w)[solid].max(initial=0.0) < 2e-4, n
        weights = {n: w.astype(np.float64) for n, w in state.weights.items()}
        mu = {n: state.moments[f"{n}.mu"].astype(np.float64) for n in weights}
        nu = {n: state.moments[f"{n}.nu"].astype(np.float64) for n in weights}


def test_step_clears_the_gradients(executor):
    executor.execute(CreateAdapter("clear", LoraSpec(4), 0))
    forward(executor, "clear", examples((9,)), backward=True)
    assert any(np.abs(g).max() > 0 for g in gradients(executor, "clear").values())
    executor.execute(OptimStep("clear", AdamParams()))
    assert gradients(executor, "clear") == {}


def test_non_finite_norm_changes_nothing(executor):
    executor.execute(CreateAdapter("nan", LoraSpec(4), 0))
    (example,) = examples((9,))
    huge = type(example)(example.tokens_T, example.targets_TK, np.full_like(example.weights_TK, 3e38))
    forward(executor, "nan", (huge,), backward=True)
    before = executor.execute(ExportAdapter("nan", False))
    with pytest.raises(UserError, match=r"gradient norm is (nan|inf)"):
        executor.execute(OptimStep("nan", AdamParams()))
    after = executor.execute(ExportAdapter("nan", True))
    assert after.step == 0
    assert all((after.weights[n] == w).all() for n, w in before.weights.items())
    assert all((m == 0).all() for m in after.moments.values())
    forward(executor, "nan", (example,), backward=True)
    assert np.isfinite(executor.execute(OptimStep("nan", AdamParams())).grad_norm)


@pytest.mark.parametrize(
    "params",
    [
        AdamParams(eps=1e-50),
        AdamParams(eps=1e-40),
        AdamParams(beta1=1 - 1e-9),
        AdamParams(beta2=1 - 1e-9),
        DimuonParams(1e-3, beta1=1 - 1e-9),
    ],
)
def test_adam_parameters_that_divide_by_zero_in_float32_are_refused(params: AdamParams | DimuonParams) -> None:
    with pytest.raises(UserError, match=r"optim_step: (eps|beta1|beta2) is .+, which is [01] in float32"):
        optimizer_of(params).vector(params)


def test_optimizers_must_have_distinct_parameter_classes() -> None:
    again = replace(OPTIMIZERS["adamw"], name="again")
    with pytest.raises(TypeError, match="optimizer again: AdamParams is also the name of adamw's parameters"):
        check_classes({**OPTIMIZERS, "again": again})


def adamw(w, g, state, count, p):
    mu, nu = p.beta1 * state["mu"] + (1 - p.beta1) * g, p.beta2 * state["nu"] + (1 - p.beta2) * g**2
    m, v = mu / (1 - p.beta1 ** (count + 1)), nu / (1 - p.beta2 ** (count + 1))
    return w - p.learning_rate * (m / (np.sqrt(v) + p.eps) + p.weight_decay * w), {"mu": mu, "nu": nu}


def dimuon(w, g, state, count, p):
    average = p.beta1 * state["momentum"] + (1 - p.beta1) * g
    return w - p.learning_rate * matrix_sign(average), {"momentum": average}


REFERENCE = {  # for each optimizer: a step on one matrix, and parameters other than its defaults
    "adamw": (adamw, {"learning_rate": 3e-2, "beta1": 0.5, "beta2": 0.9, "eps": 1e-6, "weight_decay": 0.2}),
    "dimuon": (dimuon, {"learning_rate": 3e-2, "beta1": 0.5}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_optimizer_steps_equal_the_references(name, clip):
    spec, (reference, values) = OPTIMIZERS[name], REFERENCE[name]
    rng = np.random.default_rng(0)
    wide = rng.normal(size=(4, 24))
    weights, parts = {"w": wide.astype(np.float32)}, {part: np.zeros_like(wide) for part in spec.state}
    state = fresh_state(name, {"w": np.zeros((4, 24), np.float32)})
    for count, params in enumerate([spec.example, spec.params(**values, grad_clip_norm=clip)] * 2):
        grad = rng.normal(size=(4, 24))
        norm = np.linalg.norm(grad)
        factor = clip / norm if 0 < params.grad_clip_norm < norm else 1.0
        stepped = step(weights, {"w": grad.astype(np.float32)}, state, spec.vector(params))
        wide, parts = reference(wide, grad * factor, parts, count, params)
        weights, state = stepped.lora, stepped.state
        close(stepped.norm, norm)
        close(weights["w"], wide)
        for part, expected in parts.items():
            close(state.parts[part]["w"], expected)
        assert (int(state.count), state.name) == (count + 1, name)
        assert not np.asarray(stepped.grads["w"]).any()


@pytest.mark.parametrize(
    ("name", "parameter"), [(name, parameter) for name, spec in OPTIMIZERS.items() for parameter in spec.bounds]
)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_non_finite_optimizer_values_are_refused_with_field_value_and_rule(name, parameter, value):
    spec = OPTIMIZERS[name]
    given = {**asdict(spec.example), parameter: value}
    rule = re.escape(f"{parameter} is {value!r}: must be {spec.bounds[parameter].rule}")
    with pytest.raises(UserError, match=rf"{spec.request_field}\.{rule}"):
        spec.read(given)
    with pytest.raises(UserError, match=f"optim_step: {rule}"):
        spec.vector(spec.params(**given))

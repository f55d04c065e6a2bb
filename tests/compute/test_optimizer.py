"""AdamW with decoupled weight decay and global-norm clipping, against NumPy in float64."""

from __future__ import annotations

import numpy as np
import pytest

from tinkerflow.backend.commands import CreateAdapter, ExportAdapter, LoraSpec, OptimStep
from tinkerflow.backend.errors import UserError
from tinkerflow.backend.spec.optimizers import optimizer_of
from tinkerflow.backend.spec.optimizers.adamw import AdamParams
from tinkerflow.backend.spec.optimizers.dimuon import DimuonParams

STEPS = (
    AdamParams(learning_rate=1e-2),
    AdamParams(learning_rate=3e-3, beta1=0.5, beta2=0.9, eps=1e-6, weight_decay=0.2),
    AdamParams(learning_rate=1e-2, grad_clip_norm=0.5),
    AdamParams(learning_rate=1e-2, grad_clip_norm=1e9),
)


def test_steps_with_changing_parameters(shared_executor, examples, forward, gradients):
    executor = shared_executor
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
            # a gradient near zero is noise of either sign, and Adam makes a whole step of it: compare where it is not
            solid = np.sqrt(nu[n]) > 1e-4
            assert np.abs(state.weights[n] - w)[solid].max(initial=0.0) < 2e-4, n
        weights = {n: w.astype(np.float64) for n, w in state.weights.items()}
        mu = {n: state.moments[f"{n}.mu"].astype(np.float64) for n in weights}
        nu = {n: state.moments[f"{n}.nu"].astype(np.float64) for n in weights}


def test_step_clears_the_gradients(shared_executor, examples, forward, gradients):
    executor = shared_executor
    executor.execute(CreateAdapter("clear", LoraSpec(4), 0))
    forward(executor, "clear", examples((9,)), backward=True)
    assert any(np.abs(g).max() > 0 for g in gradients(executor, "clear").values())
    executor.execute(OptimStep("clear", AdamParams()))
    assert gradients(executor, "clear") == {}


def test_a_norm_that_is_not_finite_changes_nothing(shared_executor, examples, forward, gradients):
    executor = shared_executor
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
def test_what_would_divide_by_zero_in_float32_is_refused(params: AdamParams | DimuonParams) -> None:
    with pytest.raises(UserError, match=r"optim_step: (eps|beta1|beta2) is .+, which is [01] in float32"):
        optimizer_of(params).vector(params)

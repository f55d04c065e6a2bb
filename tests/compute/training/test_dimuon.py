"""Dimuon against NumPy, and errors for mixed optimizers."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from tests.compute.closeness import close
from tests.compute.conftest import examples, forward, gradients

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.spec.commands import CreateAdapter, ExportAdapter, ImportAdapter, LoraSpec, OptimStep
from tinkerflow.backend.spec.optimizers.adamw import AdamParams
from tinkerflow.backend.spec.optimizers.dimuon import COEFFICIENTS, ITERATIONS, DimuonParams, direction


def matrix_sign(m: np.ndarray) -> np.ndarray:
    """Newton-Schulz in float64, scaled to the Frobenius norm sqrt(rank). m: [rank, n]."""
    if not m.any():
        return m
    x = m / np.linalg.norm(m)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x * np.sqrt(len(m)) / np.linalg.norm(x)


@pytest.mark.parametrize("shape", [(4, 32), (4, 4), (64, 16), (3, 4, 40)])
def test_the_direction_is_near_the_polar_factor(shape):
    m = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    found = np.asarray(direction(m))
    norms = np.linalg.norm(found, axis=(-1, -2))
    close(norms, np.full(norms.shape, np.sqrt(shape[-2])))
    u, _, v = np.linalg.svd(m, full_matrices=False)
    polar = u @ v
    cosine = (found * polar).sum((-1, -2)) / np.linalg.norm(found, axis=(-1, -2)) / np.linalg.norm(polar, axis=(-1, -2))
    assert (cosine > 0.95).all()
    assert not np.asarray(direction(np.zeros(shape, np.float32))).any()


@pytest.mark.parametrize("scale", [1e-16, 1e-19, 1e-24, 1e-31])
def test_the_direction_of_a_tiny_gradient_is_that_of_a_large_one(scale):
    m = np.random.default_rng(0).normal(size=(4, 32)).astype(np.float32) * np.float32(scale)
    close(jax.jit(direction)(m), matrix_sign(m.astype(np.float64)))


STEPS = (
    DimuonParams(learning_rate=1e-2),
    DimuonParams(learning_rate=3e-3, beta1=0.5),
    DimuonParams(learning_rate=1e-2, grad_clip_norm=0.5),
    DimuonParams(learning_rate=1e-2, grad_clip_norm=-1.0),
)


def test_steps_with_changing_parameters(executor):
    executor.execute(CreateAdapter("dimuon", LoraSpec(4), 7, "dimuon"))
    weights = {n: w.astype(np.float64) for n, w in executor.execute(ExportAdapter("dimuon", False)).weights.items()}
    momentum = {n: np.zeros_like(w) for n, w in weights.items()}
    for count, params in enumerate(STEPS, 1):
        forward(executor, "dimuon", examples((9, 20), seed=count), backward=True)
        grads = {n: g.astype(np.float64) for n, g in gradients(executor, "dimuon").items()}
        norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
        factor = params.grad_clip_norm / norm if 0 < params.grad_clip_norm < norm else 1.0
        for n, g in grads.items():
            momentum[n] = params.beta1 * momentum[n] + (1 - params.beta1) * factor * g
            m = momentum[n] if "lora_A" in n else momentum[n].T
            step = matrix_sign(m)
            weights[n] = weights[n] - params.learning_rate * (step if "lora_A" in n else step.T)
        result = executor.execute(OptimStep("dimuon", params))
        assert (result.step, result.grad_norm) == (count, pytest.approx(norm, rel=1e-5))
        state = executor.execute(ExportAdapter("dimuon", True))
        assert (state.optimizer, state.moments.keys()) == ("dimuon", {f"{n}.momentum" for n in weights})
        for n, w in weights.items():
            assert np.abs(state.moments[f"{n}.momentum"] - momentum[n]).max() < 1e-4 * max(
                1.0, np.abs(momentum[n]).max()
            )
            assert np.abs(state.weights[n] - w).max() < 2e-4, n
        weights = {n: w.astype(np.float64) for n, w in state.weights.items()}


def test_restored_state_continues_bit_for_bit(executor):
    params = DimuonParams(learning_rate=1e-2)
    executor.execute(CreateAdapter("on", LoraSpec(4), 3, "dimuon"))
    forward(executor, "on", examples((9,)), backward=True)
    executor.execute(OptimStep("on", params))
    forward(executor, "on", examples((12,)), backward=True)  # the export includes accumulated gradients
    executor.execute(ImportAdapter("again", executor.execute(ExportAdapter("on", True))))
    for adapter in ("on", "again"):
        executor.execute(OptimStep(adapter, params))
    first, second = (executor.execute(ExportAdapter(a, True)) for a in ("on", "again"))
    assert first.step == second.step == 2
    assert all((first.weights[n] == w).all() for n, w in second.weights.items())
    assert all((first.moments[n] == m).all() for n, m in second.moments.items())


def test_optimizers_cannot_be_mixed(executor):
    executor.execute(CreateAdapter("a", LoraSpec(4), 3, "adamw"))
    executor.execute(CreateAdapter("d", LoraSpec(4), 3, "dimuon"))
    forward(executor, "d", examples((9,)), backward=True)
    before = executor.execute(ExportAdapter("d", True))
    with pytest.raises(UserError, match="parameters are adamw's, but the model was created with dimuon"):
        executor.execute(OptimStep("d", AdamParams()))
    after = executor.execute(ExportAdapter("d", True))
    assert all((after.moments[n] == m).all() for n, m in before.moments.items())  # gradients are still accumulated
    with pytest.raises(UserError, match="parameters are dimuon's, but the model was created with adamw"):
        executor.execute(OptimStep("a", DimuonParams(1e-3)))
    adamw = executor.execute(ExportAdapter("a", True))
    with pytest.raises(UserError, match=r"\.mu' does not belong to dimuon"):
        executor.execute(ImportAdapter("x", adamw.copy_with(optimizer="dimuon")))
    with pytest.raises(UserError, match=r"\.momentum' does not belong to adamw"):
        executor.execute(ImportAdapter("x", before.copy_with(optimizer="adamw")))

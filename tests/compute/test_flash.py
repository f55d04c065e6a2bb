"""Attention kernels for NVIDIA GPUs and TPUs, interpreted on CPUs, against the attention of CPUs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.compute.closeness import close

from tinkerflow.backend.compute.kernels.flash import flash_attention
from tinkerflow.backend.compute.mesh import make_mesh
from tinkerflow.backend.compute.platforms import CUDA, TPU, compiling_for
from tinkerflow.backend.compute.training.attention import attend_trees

B, H, G = 2, 4, 2


@pytest.mark.parametrize(
    ("target", "T", "d", "window", "sinks"),
    [
        pytest.param(CUDA, 32, 8, None, None, marks=pytest.mark.thorough),
        pytest.param(CUDA, 256, 64, None, None, marks=pytest.mark.thorough),
        (CUDA, 32, 8, 12, [1.0, 0.0, -2.0, 4.0]),
        pytest.param(TPU, 128, 64, None, None, marks=pytest.mark.thorough),
        pytest.param(TPU, 128, 64, 40, None, marks=pytest.mark.thorough),
        (TPU, 128, 64, 40, [1.0, 0.0, -2.0, 4.0]),
    ],
)
def test_packed_rows_equal_the_values_and_gradients_of_cpu_attention(target, T, d, window, sinks):
    q, k, v, slope, ends = drawn(T, d)
    mesh, sinks_H = make_mesh(1, 1), None if sinks is None else jnp.asarray(sinks)
    with compiling_for(target):
        kernel = flash_attention(mesh, T, window, interpret=True)
    assert kernel is not None
    plain = attend_trees(ends, mesh)

    @jax.jit
    def both(*of: Any) -> Any:
        """Values and gradients of the kernel and of CPU attention."""
        attends = (
            lambda q, k, v, sinks_H: kernel(q, k, v, ends, sinks_H),
            lambda q, k, v, sinks_H: plain(q, k, v, window=window, sinks_H=sinks_H),
        )
        made = [jax.vjp(attend, *of) for attend in attends]
        return [jax.tree.leaves((out, pull(slope))) for out, pull in made]

    for found, expected in zip(*both(q, k, v, sinks_H), strict=True):
        close(found, expected, ulps=64)


def test_less_memory_gives_the_same_bits():
    q, k, v, slope, ends = drawn(128, 64)

    def found(*, save_memory: bool) -> Any:
        with compiling_for(TPU):
            kernel = flash_attention(make_mesh(1, 1), 128, 40, save_memory=save_memory, interpret=True)
        assert kernel is not None

        @jax.jit
        def both(q: jax.Array, k: jax.Array, v: jax.Array, slope: jax.Array) -> tuple[jax.Array, ...]:
            out, pull = jax.vjp(lambda q, k, v: kernel(q, k, v, ends, None), q, k, v)
            return out, *pull(slope)

        return both(q, k, v, slope)

    for one, other in zip(found(save_memory=False), found(save_memory=True), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("target", [CUDA, TPU])
@pytest.mark.parametrize("tree", [False, True])
def test_backward_pass_reuses_kept_attention_results(target, tree):
    q, k, v, _, ends = drawn(128, 64)
    rest = (ends, None, ends) if tree else (ends,)
    with compiling_for(target):
        kernel = flash_attention(make_mesh(1, 1), 128, tree=tree)
        for kept, forward_kernels in ((("attended", "log_totals"), 1), ((), 2)):
            policy = jax.checkpoint_policies.save_only_these_names(*kept)
            layer = jax.checkpoint(lambda q, k, v: jnp.sum(kernel(q, k, v, *rest)), policy=policy)
            gradients = jax.make_jaxpr(jax.grad(layer, argnums=(0, 1, 2)))
            assert calls(gradients(q, k, v).jaxpr) == forward_kernels + 2


def test_flash_attention_is_off_for_short_rows_on_tpus_and_on_cpus():
    mesh = make_mesh(1, 1)
    assert flash_attention(mesh, 4096) is None
    with compiling_for(CUDA):
        assert flash_attention(mesh, 256, 128) is not None
        assert flash_attention(mesh, 256, head_dim=512) is None
    with compiling_for(TPU):
        assert flash_attention(mesh, 64) is None


def drawn(T: int, d: int) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    q, k, v, slope = (jnp.asarray(rng.normal(size=(B, T, heads, d)), jnp.float32) for heads in (H, G, G, H))
    examples = np.sort(rng.integers(0, 4, (B, T)), axis=1)
    ends = np.stack([np.searchsorted(row, row, side="right") for row in examples])
    return q, k, v, slope, jnp.asarray(ends, jnp.int32)


def calls(jaxpr: Any) -> int:
    """The number of kernels whose results a program reads. XLA drops the others."""
    total, read = 0, {id(variable) for equation in (*jaxpr.eqns, jaxpr) for variable in ins(equation)}
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            total += any(id(variable) in read for variable in equation.outvars)
            continue
        for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            total += calls(inner) if hasattr(inner, "eqns") else 0
    return total


def ins(equation: Any) -> list[Any]:
    return equation.outvars if hasattr(equation, "eqns") else equation.invars

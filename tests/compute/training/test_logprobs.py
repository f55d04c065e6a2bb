"""Logprobs and gradients by chunk do not depend on the chunk or the kernel, and never need an array [tokens, V]."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.compiled import as_on
from tests.compute.closeness import close

from tinkerflow.backend.compute.kernels import softmax_tpu
from tinkerflow.backend.compute.kernels.softmax import Product
from tinkerflow.backend.compute.mesh import make_mesh
from tinkerflow.backend.compute.models.lora import LoraPair
from tinkerflow.backend.compute.models.transformer import Params
from tinkerflow.backend.compute.platforms import CPU, CUDA, TPU, compiling_for
from tinkerflow.backend.compute.training import logprobs
from tinkerflow.backend.compute.training.token_losses import choose, token_losses
from tinkerflow.backend.spec.losses import packed_inputs

B, T, D, K, V, R = 2, 32, 16, 3, 50, 4


@pytest.fixture(params=["tied", "untied"])
def data(request: pytest.FixtureRequest) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    targets = rng.integers(0, V, (B, T, K)).astype(np.int32)
    targets[..., 1] = targets[..., 0]  # a target that occurs twice counts twice
    drawn = {"weights": draw(B, T, K), "logprobs": draw(B, T, K) - 4, "advantages": draw(B, T, K)}
    inputs = {name: jnp.full((B, T, K), fill) for name, fill in packed_inputs().items()} | drawn
    inputs["clip_high_threshold"] = jnp.full((B, T, K), 1.3)
    params = Params(draw(V, D), {}, draw(D), draw(V, D) if request.param == "untied" else None)
    return params, LoraPair(draw(R, D), draw(R, V)), draw(B, T, D), targets, choose("ppo", {}), inputs


@partial(jax.jit, static_argnums=0)
def compiled(function: Any, *arguments: Any) -> Any:
    """The result of a function that is compiled as a whole. Compiling its operations one by one takes longer."""
    return function(*arguments)


def plain(params, pair, hidden, targets, choice, inputs):
    """The loss and the logprobs, computed without regard to memory."""
    logits = hidden @ params.head.T
    if pair is not None:
        logits += (hidden @ pair.A.T) @ pair.B * (32 / R)
    scored = jnp.take_along_axis(jax.nn.log_softmax(logits), targets, axis=-1)
    return jnp.sum(token_losses(choice, scored, inputs)), scored


EXPECTED = jax.value_and_grad(plain, argnums=(2, 1), has_aux=True)


@pytest.mark.parametrize("adapted", [True, False])
@pytest.mark.parametrize(
    ("most", "target"),
    [
        (1, CPU),
        pytest.param(B * V * 8, CPU, marks=pytest.mark.thorough),
        pytest.param(2**24, CPU, marks=pytest.mark.thorough),
        (V * 16, CUDA),
        (V * 16, TPU),
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_chunks_change_nothing(data, most, adapted, target):
    params, pair, *rest = data
    pair = pair if adapted else None
    (loss, expected), slopes = compiled(EXPECTED, params, pair, *rest)
    how = {"mesh": make_mesh(1, 1), "most_logits": most, "interpret": True}
    with compiling_for(target):
        without = compiled(partial(logprobs.score, **how), params, pair, *rest)
        with_grads, d_hidden, d_pair = compiled(partial(logprobs.score_and_grads, **how), params, pair, *rest)
    for scored in (without, with_grads):
        assert np.allclose(scored.loss, loss, rtol=1e-4)
        close(scored.logprobs_BTK, expected, ulps=16)
    for found, slope in zip(jax.tree.leaves((d_hidden, d_pair)), jax.tree.leaves(slopes), strict=True):
        assert np.abs(found - slope).max() < 1e-4 * max(1.0, np.abs(slope).max())


@pytest.mark.parametrize(
    ("most", "target"), [(B * V * 8, CPU), (V * 16, CUDA), (V * 16, TPU)], ids=lambda x: getattr(x, "name", x)
)
def test_unembedding_gradient_equals_the_plain_formula(data, most, target):
    params, _, *rest = data

    def loss(head):
        return plain(replace(params, unembed_VD=head), None, *rest)[0]

    with compiling_for(target):
        how = partial(logprobs.score_and_grads, mesh=make_mesh(1, 1), most_logits=most, by_head=True, interpret=True)
        _, _, found = compiled(how, params, None, *rest)
    slope = compiled(jax.grad(loss), params.head)
    assert np.abs(found - slope).max() < 1e-4 * np.abs(slope).max()


@pytest.mark.parametrize("target", [CPU, CUDA], ids=lambda target: target.name)
@pytest.mark.parametrize("by_head", [False, True])
def test_a_loss_sees_the_softmax_over_the_support(data, by_head, target):
    """Without a support, the loss sees the whole vocabulary. Logprobs always cover it. Some logits are far apart."""
    params, pair, hidden, targets, choice, inputs = data
    rng = np.random.default_rng(3)
    held_BTV = rng.random((B, T, V)) < 0.2
    held_BTV |= (np.arange(V) == targets[..., :1]) | (np.arange(V) == targets[..., 2:])  # a target is in its support
    held_BTV[:, ::5] = False
    supports = np.full((B, T, V + 3), -1, np.int32)
    for b, t in np.ndindex(B, T):
        ids = rng.permutation(np.flatnonzero(held_BTV[b, t]))
        supports[b, t, : len(ids)] = ids
    hidden, pair = hidden.at[:, 1::4].multiply(40), None if by_head else pair

    def expected(params, pair, hidden):
        logits = hidden @ params.head.T
        if pair is not None:
            logits += (hidden @ pair.A.T) @ pair.B * (32 / R)
        masked = jnp.where(held_BTV | ~held_BTV.any(-1, keepdims=True), logits, -jnp.inf)
        seen, whole = (jnp.take_along_axis(jax.nn.log_softmax(x), targets, axis=-1) for x in (masked, logits))
        return jnp.sum(token_losses(choice, seen, inputs)), (whole, (whole - seen)[..., 0])

    inputs = {**inputs, "logprobs": jnp.full((B, T, K), -1.0)}
    where = (0, 2) if by_head else (1, 2)
    (loss, (whole, mass)), slopes = compiled(
        jax.value_and_grad(expected, argnums=where, has_aux=True), params, pair, hidden
    )
    how = {"mesh": make_mesh(1, 1), "most_logits": B * V * 8, "supports_BTs": supports}
    with compiling_for(target):
        rest = hidden, targets, choice, inputs
        without = compiled(partial(logprobs.score, **how), params, pair, *rest)
        scored, d_hidden, found = compiled(
            partial(logprobs.score_and_grads, **how, by_head=by_head), params, pair, *rest
        )
    for one in (without, scored):
        assert np.allclose(one.loss, loss, rtol=1e-4)
        assert np.allclose(one.logprobs_BTK, whole, rtol=1e-4, atol=1e-4)
        assert np.allclose(one.log_mass_BT, mass, rtol=1e-4, atol=1e-4)
    of_weights = slopes[0]
    if by_head:
        found, of_weights = [found], [slopes[0].head if params.unembed_VD is None else slopes[0].unembed_VD]
    pairs = zip(jax.tree.leaves((found, d_hidden)), jax.tree.leaves((of_weights, slopes[1])), strict=True)
    for one, slope in pairs:
        assert np.isfinite(one).all()
        assert np.abs(one - slope).max() < 5e-4 * max(1.0, np.abs(slope).max())


def test_logits_never_exist_whole(data):
    for function in (logprobs.score, logprobs.score_and_grads):
        program = jax.make_jaxpr(partial(function, most_logits=B * V * 8))(*data).jaxpr
        sizes = [shape for shape in shapes(program) if shape and shape[-1] == V]
        assert (B, 8, V) in sizes
        assert max(np.prod(shape) for shape in sizes) == B * 8 * V


WIDE = 300  # a vocabulary of several tiles of a GPU's kernels, with a remainder


def drawn(rank: int, cap: float, dtype: Any = jnp.float32) -> tuple[Any, ...]:
    """Arguments with a vocabulary of WIDE tokens. Two targets of each position are equal."""
    rng = np.random.default_rng(1)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    targets = rng.integers(0, WIDE, (4, T, K)).astype(np.int32)
    targets[..., 1] = targets[..., 0]
    params = Params(draw(WIDE, D).astype(dtype), {}, draw(D), None, softcap=cap)
    pair = LoraPair(draw(rank, D) / 4, draw(rank, WIDE) / 4) if rank else None
    inputs = {name: draw(4, T, K) for name in packed_inputs()}
    return params, pair, draw(4, T, D).astype(dtype), targets, choose("cross_entropy", {}), inputs


def difference(found: Any, expected: Any) -> float:
    """The largest difference, relative to the largest value of the same array."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    wide = [(np.asarray(one, np.float32), np.asarray(other, np.float32)) for one, other in pairs]
    return max(float(np.abs(one - other).max() / np.abs(other).max()) for one, other in wide)


@pytest.mark.parametrize("target", [CUDA, TPU], ids=lambda target: target.name)
@pytest.mark.parametrize(
    ("rank", "cap"), [(4, 5.0), *(pytest.param(*case, marks=pytest.mark.thorough) for case in ((80, 5.0), (0, 0.0)))]
)
def test_fused_kernels_match_whole_logits(target, rank, cap):
    """Includes partial tiles of rows, ranks and the vocabulary, ranks larger than a kernel's, and capped logits."""
    data = drawn(rank, cap)
    expected = compiled(logprobs.score_and_grads, *data)
    with compiling_for(target):
        found = compiled(partial(logprobs.score_and_grads, mesh=make_mesh(1, 1), interpret=True), *data)
    assert difference(found, expected) < 2e-5


def test_a_kernel_for_gpus_rounds_gradients_and_not_logprobs():
    data = drawn(0, 0.0, jnp.bfloat16)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, data)
    scored, slope, _ = compiled(logprobs.score_and_grads, *wide)
    with compiling_for(CUDA):
        found, rounded, _ = compiled(partial(logprobs.score_and_grads, mesh=make_mesh(1, 1), interpret=True), *data)
    assert rounded.dtype == jnp.bfloat16
    assert difference(found, scored) < 1e-5
    assert difference(rounded, slope) < 2e-2


@pytest.mark.parametrize("target", [CUDA, TPU], ids=lambda target: target.name)
@pytest.mark.parametrize("function", [logprobs.score, logprobs.score_and_grads])
def test_off_cpus_no_float32_logits_are_written_and_nothing_branches_or_scatters(function, target):
    with compiling_for(target):
        program = jax.make_jaxpr(partial(function, mesh=make_mesh(1, 1)))(*drawn(4, 0.0, jnp.bfloat16)).jaxpr
    outside = list(equations(program, kernels=False))
    written = {variable.aval for equation in outside for variable in equation.outvars}
    assert not [one for one in written if one.dtype == jnp.float32 and {4 * T, WIDE} <= set(one.shape)]
    assert (function is logprobs.score) == (not [one for one in written if {4 * T, WIDE} == set(one.shape)])
    names = {equation.primitive.name for equation in outside}
    assert "pallas_call" in names and not {"cond", "scatter-add", "scatter"} & names


@pytest.mark.parametrize(
    ("kind", "rows", "most"),
    [("TPU v5 lite", 4096, 100), ("TPU v6 lite", 4096, 100), ("TPU v5", 2048, 50), ("TPU7x", 2048, 50)],
)
def test_tpus_get_blocks_that_their_memory_on_the_chip_holds(kind, rows, most):
    x_MD, head_VD = jnp.zeros((4096, 2560), jnp.bfloat16), jnp.zeros((512, 2560), jnp.bfloat16)
    given = Product(x_MD, head_VD, None, None, jnp.zeros((4096, 1), jnp.int32))
    with as_on(kind, 1, "tpu"):
        tiling = softmax_tpu._Tiling.of(given)
        assert tiling.r == rows and tiling.how(0)["compiler_params"].vmem_limit_bytes == most * 2**20


SHARDED = """
from tests.compute.training.test_logprobs import *
from tinkerflow.backend.compute.mesh import over
data, found = drawn(4, 0.0), []
for fsdp, tensor in ((1, 1), (2, 2)):
    mesh = over(jax.devices()[: fsdp * tensor], fsdp, tensor, 1)
    for target in (CUDA, TPU):
        with compiling_for(target):
            found.append(compiled(partial(logprobs.score_and_grads, mesh=mesh, interpret=True), *data))
assert len(jax.devices()) == 4 and max(difference(one, found[0]) for one in found) < 2e-5
"""


def test_rows_and_the_vocabulary_are_split_over_devices():
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    subprocess.run([sys.executable, "-c", SHARDED], env=env, check=True)


def equations(jaxpr: Any, *, kernels: bool = True) -> Iterator[Any]:
    """All equations of a program and its inner programs. kernels: include those inside kernels."""
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name == "pallas_call" and not kernels:
            continue
        for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner, kernels=kernels)


def shapes(jaxpr: Any) -> list[tuple[int, ...]]:
    return [variable.aval.shape for equation in equations(jaxpr) for variable in equation.outvars]

"""Logprobs and gradients by chunk: the same whatever the chunk, and never an array of [tokens, V]."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.compute.closeness import close

from tinkerflow.backend.compute import logprobs
from tinkerflow.backend.compute.lora import LoraPair
from tinkerflow.backend.compute.losses import choose, token_losses
from tinkerflow.backend.compute.platforms import CPU, CUDA, TPU, compiling_for
from tinkerflow.backend.compute.transformer import Params

B, T, D, K, V, R = 2, 32, 16, 3, 50, 4


@pytest.fixture(params=["tied", "untied"])
def data(request: pytest.FixtureRequest) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    targets = rng.integers(0, V, (B, T, K)).astype(np.int32)
    targets[..., 1] = targets[..., 0]  # a target named twice counts twice
    inputs = {
        "weights": draw(B, T, K),
        "logprobs": draw(B, T, K) - 4,
        "advantages": draw(B, T, K),
        "clip_low_threshold": jnp.full((B, T, K), jnp.nan),
        "clip_high_threshold": jnp.full((B, T, K), 1.3),
    }
    params = Params(draw(V, D), {}, draw(D), draw(V, D) if request.param == "untied" else None)
    return params, LoraPair(draw(R, D), draw(R, V)), draw(B, T, D), targets, choose("ppo", {}), inputs


@partial(jax.jit, static_argnums=0)
def compiled(function: Any, *arguments: Any) -> Any:
    """The result of a function, compiled whole. Its operations one by one take longer to compile."""
    return function(*arguments)


def plain(params, pair, hidden, targets, choice, inputs):
    """As one would write it without minding memory."""
    logits = hidden @ params.head.T
    if pair is not None:
        logits += (hidden @ pair.A.T) @ pair.B * (32 / R)
    scored = jnp.take_along_axis(jax.nn.log_softmax(logits), targets, axis=-1)
    return jnp.sum(token_losses(choice, scored, inputs)), scored


EXPECTED = jax.value_and_grad(plain, argnums=(2, 1), has_aux=True)


@pytest.mark.parametrize("adapted", [True, False])
@pytest.mark.parametrize(
    ("most", "target"), [(1, CPU), (B * V * 8, CPU), (2**24, CPU), (V * 8, CUDA)], ids=lambda x: getattr(x, "name", x)
)
def test_chunks_change_nothing(data, most, adapted, target):
    params, pair, *rest = data
    pair = pair if adapted else None
    (loss, expected), slopes = compiled(EXPECTED, params, pair, *rest)
    how = {"devices": B, "most_logits": most}
    with compiling_for(target):
        without = compiled(partial(logprobs.score, **how), params, pair, *rest)
        with_grads, d_hidden, d_pair = compiled(partial(logprobs.score_and_grads, **how), params, pair, *rest)
    for scored in (without, with_grads):
        assert np.allclose(scored.loss, loss, rtol=1e-4)
        close(scored.logprobs_BTK, expected, ulps=16)
    for found, slope in zip(jax.tree.leaves((d_hidden, d_pair)), jax.tree.leaves(slopes), strict=True):
        assert np.abs(found - slope).max() < 1e-4 * max(1.0, np.abs(slope).max())


@pytest.mark.parametrize(("most", "target"), [(B * V * 8, CPU), (V * 8, CUDA)], ids=lambda x: getattr(x, "name", x))
def test_the_gradient_by_the_unembedding_is_that_of_the_plain_formula(data, most, target):
    params, _, *rest = data

    def loss(head):
        return plain(replace(params, unembed_VD=head), None, *rest)[0]

    with compiling_for(target):
        how = partial(logprobs.score_and_grads, devices=B, most_logits=most, by_head=True)
        _, _, found = compiled(how, params, None, *rest)
    slope = compiled(jax.grad(loss), params.head)
    assert np.abs(found - slope).max() < 1e-4 * np.abs(slope).max()


def test_logits_never_exist_whole(data):
    for function in (logprobs.score, logprobs.score_and_grads):
        sizes = [shape for shape in shapes(made(function, data)) if shape and shape[-1] == V]
        assert (B, 8, V) in sizes
        assert max(np.prod(shape) for shape in sizes) == B * 8 * V


@pytest.mark.parametrize("target", [CUDA, TPU], ids=lambda target: target.name)
@pytest.mark.parametrize("function", [logprobs.score, logprobs.score_and_grads])
def test_a_chunk_has_many_rows_of_each_device_and_neither_a_branch_nor_a_scatter(data, function, target):
    with compiling_for(target):
        program = made(function, data, devices=B)
    assert (B, 8, V) in shapes(program), "8 rows of each of B devices, whatever rows the batch had"
    names = {equation.primitive.name for equation in equations(program)}
    assert "scan" in names and not {"cond", "scatter-add", "scatter"} & names


def made(function: Any, data: Any, devices: int = 1) -> Any:
    whole = B if devices == 1 else 1  # on CPUs the limit is of all rows
    return jax.make_jaxpr(partial(function, devices=devices, most_logits=whole * V * 8))(*data).jaxpr


def equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def shapes(jaxpr: Any) -> list[tuple[int, ...]]:
    return [variable.aval.shape for equation in equations(jaxpr) for variable in equation.outvars]

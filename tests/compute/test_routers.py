"""Each kind of router with given experts: their shares, and the gradients through these shares.

Letters: B rows, T tokens, D hidden, E experts, k experts of a token.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tinkerflow.backend.compute.models.layers.routers import Router, RouterWeights, SigmoidRouter, SoftmaxRouter
from tinkerflow.backend.compute.models.layers.step import Routing

B, T, D, E, K = 2, 9, 16, 8, 3
ROUTERS: dict[str, Router] = {
    "qwen3_moe": SoftmaxRouter(K, normalized=True),
    "qwen3_moe without norm_topk_prob": SoftmaxRouter(K, normalized=False),
    "gpt_oss": SoftmaxRouter(K, normalized=True, bias=True),
    "gemma4": SoftmaxRouter(K, normalized=True, expert_scales="router.per_expert_scale"),
    "minimax_m2": SigmoidRouter(K),
    "glm4_moe": SigmoidRouter(K, groups=4, groups_per_token=2, scale=1.5),
}


def weights_of(router: Router) -> RouterWeights:
    """Random values for the weights that the router declares."""
    rng = np.random.default_rng(3)
    made = {
        name: jnp.asarray(rng.normal(size=one.shape, scale=0.3), jnp.float32)
        for name, one in router.tensors(E, D).items()
    }
    return RouterWeights(**{name: made.get(name) for name in RouterWeights._fields})


def routed(router: Router, y_BTD: jax.Array, routing: Routing | None) -> Any:
    weights = weights_of(router)
    return router.route(SimpleNamespace(weights=lambda kind: weights, routing=routing), y_BTD)  # type: ignore[arg-type]


def shares_of(router: Router, y_BTD: jax.Array, chosen_BTk: jax.Array) -> jax.Array:
    """The shares of given experts, by their formula."""
    weights = weights_of(router)
    scores_BTE = y_BTD @ weights.router.T + (0 if weights.router_bias is None else weights.router_bias)
    if isinstance(router, SigmoidRouter):
        shares_BTk = jnp.take_along_axis(1 / (1 + jnp.exp(-scores_BTE)), chosen_BTk, axis=-1) * router.scale
    else:
        chances_BTE = jnp.exp(scores_BTE) / jnp.exp(scores_BTE).sum(-1, keepdims=True)
        shares_BTk = jnp.take_along_axis(chances_BTE, chosen_BTk, axis=-1)
    if router.normalized:
        shares_BTk = shares_BTk / shares_BTk.sum(-1, keepdims=True) * getattr(router, "scale", 1.0)
    return shares_BTk if weights.expert_scale is None else shares_BTk * weights.expert_scale[chosen_BTk]


@pytest.fixture
def y_BTD() -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).normal(size=(B, T, D)), jnp.float32)


@pytest.mark.parametrize("kind", ROUTERS)
def test_given_experts_are_chosen_with_the_routers_own_shares_and_gradients(kind: str, y_BTD: jax.Array) -> None:
    router, rng = ROUTERS[kind], np.random.default_rng(2)
    own_BTk, _ = routed(router, y_BTD, None)
    given_BTk = rng.permuted(np.broadcast_to(np.arange(E, dtype=np.int32), (B, T, E)), axis=-1)[..., :K].copy()
    given_BTk[:, ::4] = -1
    routing = Routing(jnp.asarray(given_BTk))
    chosen_BTk, shares_BTk = routed(router, y_BTD, routing)
    assert np.array_equal(chosen_BTk, np.where(given_BTk >= 0, given_BTk, own_BTk))
    assert routing.own_BTk is not None and np.array_equal(routing.own_BTk, own_BTk), "agreement compares with this"
    np.testing.assert_allclose(shares_BTk, shares_of(router, y_BTD, chosen_BTk), rtol=1e-5)
    slopes_BTk = jnp.asarray(rng.normal(size=shares_BTk.shape), jnp.float32)
    found = jax.grad(lambda y: (routed(router, y, Routing(jnp.asarray(given_BTk)))[1] * slopes_BTk).sum())(y_BTD)
    wanted = jax.grad(lambda y: (shares_of(router, y, chosen_BTk) * slopes_BTk).sum())(y_BTD)
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert np.all(np.abs(found).max(-1) > 1e-4), "each token's gradient flows through its shares"


@pytest.mark.parametrize("kind", ROUTERS)
def test_the_routers_own_experts_given_change_no_bit(kind: str, y_BTD: jax.Array) -> None:
    router = ROUTERS[kind]
    plain = routed(router, y_BTD, None)
    given = routed(router, y_BTD, Routing(plain[0]))
    assert all(np.array_equal(*pair) for pair in zip(plain, given, strict=True))

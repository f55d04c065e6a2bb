"""Routers of mixtures of experts: they choose the experts of each token, and the share of each expert's result.

Letters: B rows, T tokens, D hidden, E experts, k experts of a token, g groups of experts, j groups of a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tinkerflow.backend.compute.models.layers.matrices import LayerTensor

if TYPE_CHECKING:
    import jax

    from tinkerflow.backend.compute.models.layers.step import LayerStep

_NOT_ZERO = 1e-20  # added to divisors


class RouterWeights(NamedTuple):
    """One layer's weights. router: [E, D]. The others: [E], or None if the router lacks them. correction is float32."""

    router: jax.Array
    router_bias: jax.Array | None
    router_correction: jax.Array | None
    expert_scale: jax.Array | None


@dataclass(frozen=True)
class SoftmaxRouter:
    """A softmax over all experts in float32; a token goes to the k with the largest shares.

    per_token: k. normalized: a token's shares are scaled to sum to 1. bias: added to the scores (gpt-oss).
    expert_scales: Hugging Face's name of each expert's factor for its shares (Gemma 4); "" = no factors.
    module: Hugging Face's name of the router's matrix.
    """

    per_token: int
    normalized: bool
    bias: bool = False
    expert_scales: str = ""
    module: str = "mlp.gate"

    def tensors(self, experts: int, hidden: int) -> dict[str, LayerTensor]:
        """The router's tensors, by our names."""
        tensors = {"router": LayerTensor(f"{self.module}.weight", (experts, hidden))}
        if self.bias:
            tensors["router_bias"] = LayerTensor(f"{self.module}.bias", (experts,))
        if self.expert_scales:
            tensors["expert_scale"] = LayerTensor(self.expert_scales, (experts,))
        return tensors

    def route(self, step: LayerStep, y_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The experts of every token, int32 [B, T, k], and their shares, float32 [B, T, k]."""
        import jax
        import jax.numpy as jnp

        from tinkerflow.backend.compute.kernels.matmul import matmul

        weights = step.weights(RouterWeights)
        scores_BTE = matmul(y_BTD, weights.router)
        if weights.router_bias is not None:
            scores_BTE = scores_BTE + weights.router_bias
        chances_BTE = jax.nn.softmax(scores_BTE.astype(jnp.float32), axis=-1)
        shares_BTk, own_BTk = jax.lax.top_k(chances_BTE, self.per_token)
        chosen_BTk = own_BTk if step.routing is None else step.routing.replayed(own_BTk)
        if chosen_BTk is not own_BTk:
            shares_BTk = _shares_of(chances_BTE, chosen_BTk)
        if self.normalized:
            shares_BTk = shares_BTk / jnp.sum(shares_BTk, axis=-1, keepdims=True)
        if weights.expert_scale is not None:
            shares_BTk = shares_BTk * weights.expert_scale.astype(jnp.float32)[chosen_BTk]
        return chosen_BTk, shares_BTk


@dataclass(frozen=True)
class SigmoidRouter:
    """DeepSeek V3's routing (arXiv 2412.19437, section 2.1.2), in float32.

    Scores are sigmoids; each expert's correction is added to select experts. Groups are selected by the sum of their
    two largest scores, and then the k best experts in these groups. Shares are the scores without corrections.

    per_token: k. groups, groups_per_token: g and j. normalized: a token's shares are scaled to sum to 1.
    scale: multiplies shares. module, correction: Hugging Face's names of the router's matrix and of the corrections.
    """

    per_token: int
    groups: int = 1
    groups_per_token: int = 1
    normalized: bool = True
    scale: float = 1.0
    module: str = "mlp.gate"
    correction: str = "mlp.gate.e_score_correction_bias"

    def tensors(self, experts: int, hidden: int) -> dict[str, LayerTensor]:
        return {
            "router": LayerTensor(f"{self.module}.weight", (experts, hidden)),
            "router_correction": LayerTensor(self.correction, (experts,), wide=True, frozen=True),
        }

    def route(self, step: LayerStep, y_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        import jax
        import jax.numpy as jnp

        from tinkerflow.backend.compute.kernels.matmul import product

        weights = step.weights(RouterWeights)
        scores_BTE = jax.nn.sigmoid(product(y_BTD.astype(jnp.float32), weights.router.astype(jnp.float32)))
        assert weights.router_correction is not None
        corrected_BTE = scores_BTE + weights.router_correction
        if self.groups > 1:
            by_group_BTgn = corrected_BTE.reshape(*corrected_BTE.shape[:2], self.groups, -1)
            best_BTg = jnp.sum(jax.lax.top_k(by_group_BTgn, 2)[0], axis=-1)
            _, groups_BTj = jax.lax.top_k(best_BTg, self.groups_per_token)
            chosen_BTg = jnp.any(groups_BTj[..., None] == jnp.arange(self.groups), axis=-2)
            corrected_BTE = jnp.where(chosen_BTg[..., None], by_group_BTgn, -jnp.inf).reshape(corrected_BTE.shape)
        _, own_BTk = jax.lax.top_k(corrected_BTE, self.per_token)
        chosen_BTk = own_BTk if step.routing is None else step.routing.replayed(own_BTk)
        shares_BTk = _shares_of(scores_BTE, chosen_BTk)
        if self.normalized:
            shares_BTk = shares_BTk / (jnp.sum(shares_BTk, axis=-1, keepdims=True) + _NOT_ZERO)
        return chosen_BTk, shares_BTk * self.scale


Router = SoftmaxRouter | SigmoidRouter


def _shares_of(scores_BTE: jax.Array, chosen_BTk: jax.Array) -> jax.Array:
    """The scores [B, T, k] of the chosen experts."""
    import jax.numpy as jnp

    is_chosen_BTkE = chosen_BTk[..., None] == jnp.arange(scores_BTE.shape[-1])  # a gather's gradient would be a scatter
    return jnp.sum(jnp.where(is_chosen_BTkE, scores_BTE[..., None, :], 0), axis=-1)

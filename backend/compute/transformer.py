"""Decoder-only transformers as pure functions on pytrees. Flags of `ModelConfig`, set by families, decide the layers.

Training, prefill and decode share one layer, `block`. They differ in two arguments: `attend` (which keys a query sees,
and where keys and values are kept) and `lora_apply` (one adapter for all rows, or one for each row). `block` is called
by `forward` here and by `sampler.decode.layers`, and nowhere else.

Layers may differ (`ModelConfig.kinds`): in their window, their rotary embedding, and the mixer that they are made of.
`layers.over_layers` calls `block` with the layer's kind, which is known when it is traced. A family whose layers have
other matrices gives each `Projection` and `LayerTensor` the numbers of the layers that have it, and a layer is given
those alone. What a mixer keeps for each layer (pages of keys, states) is stacked over the layers with that mixer
(`ModelConfig.numbers`), and the layer's place in it comes with its weights.

Letters: B rows, T tokens, D hidden, H query heads, G key-value heads, d head dimension, F mlp, V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import flax.struct
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh

from tinkerflow.backend.compute.config import LayerKind, ModelConfig
from tinkerflow.backend.compute.experts import mixture
from tinkerflow.backend.compute.layers import LayerParams, over_layers
from tinkerflow.backend.compute.lora import Lora, LoraApply, LoraPair
from tinkerflow.backend.compute.matmul import matmul, product
from tinkerflow.backend.compute.mesh import Array
from tinkerflow.backend.compute.rope import Rope, rope_frequencies

RopeTables = Mapping[Rope, tuple[jax.Array, jax.Array]]


class Attend(Protocol):
    """attend(q_BTHd, k_BTGd, v_BTGd, window=…) -> o_BTHd; queries and keys are rotated, scores are still to be scaled.

    window: how many tokens a query sees, itself included; None = all earlier ones.
    """

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, /, *, window: int | None) -> jax.Array:
        """What each query has seen, [B, T, H, d]."""


# What a layer keeps for its backward pass: the results of matmuls (`low`: an adapter's x @ A.T; attention.py and
# flash.py name `attended` and `log_totals`). Keeping everything took twice the memory, and on CPU more time too, for
# writing it out.
KEPT = ("q", "k", "v", "attended", "log_totals", "o", "gate", "up", "low")


@flax.struct.dataclass
class Params:
    """Frozen base weights in the dtype of the activations. `unembed_VD` is None when the embedding is tied.

    layers, each stacked [L, ...]: q [H*d, D], k and v [G*d, D], o [D, H*d], gate and up [F, D], down [D, F],
    attn_norm and mlp_norm [D]; with qk_norm also q_norm and k_norm [d], with qkv_bias q_bias [H*d], k_bias and v_bias
    [G*d]; with experts gate and up are [E, D, F], down is [E, F, D], and there is router [E, D]. The matrices may be
    `quantized.Int8`. Or a tuple of layers (`params.by_layer`). A matrix that some layers lack is stacked over the rest.
    """

    embed_VD: jax.Array
    layers: LayerParams | tuple[LayerParams, ...]
    final_norm_D: jax.Array
    unembed_VD: jax.Array | None

    @property
    def head(self) -> jax.Array:
        """The matrix of the unembedding, [V, D]."""
        return self.embed_VD if self.unembed_VD is None else self.unembed_VD

    @property
    def apart(self) -> bool:
        """Whether each layer has arrays of its own."""
        return isinstance(self.layers, tuple)


def embed(params: Params, tokens_BT: Array) -> jax.Array:
    """x_BTD, in the dtype of the weights."""
    return params.embed_VD[tokens_BT]


def unembed(params: Params, hidden_BTD: jax.Array) -> jax.Array:
    """Logits [B, T, V] in float32, without the update of an adapter."""
    return product(hidden_BTD, params.head, jnp.float32)


def unembed_pullback(params: Params, d_logits_BTV: jax.Array) -> jax.Array:
    """The gradient by hidden_BTD of what `unembed` gives."""
    return jnp.einsum("btv,vd->btd", d_logits_BTV, params.head)


def final_hidden(cfg: ModelConfig, params: Params, x_BTD: jax.Array) -> jax.Array:
    """What the unembedding (and its adapter) is applied to: the last layer's output, normalised."""
    return rms_norm(x_BTD, params.final_norm_D, cfg.norm_eps)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x over its root mean square along the last axis, in float32, times weight; dtype of x."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return weight * wide.astype(x.dtype)


def rope_tables(cfg: ModelConfig, positions_BT: jax.Array) -> RopeTables:
    """cos and sin [B, T, dims/2] in float32 for `rotate`, by embedding; made once, outside of the scan over layers."""

    def tables(rope: Rope) -> tuple[jax.Array, jax.Array]:
        angles = positions_BT[..., None].astype(jnp.float32) * jnp.asarray(rope_frequencies(rope), jnp.float32)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        return (cos, sin) if rope.attention == 1 else (cos * rope.attention, sin * rope.attention)

    return {rope: tables(rope) for rope in dict.fromkeys(kind.rope for kind in cfg.layer_kinds) if rope}


def rotate(x_BTHd: jax.Array, tables: tuple[jax.Array, jax.Array] | None) -> jax.Array:
    """Rotary position embedding, first half of d against second half (as in Hugging Face's weights).

    tables: for the first dimensions of d, the others stay; None = all stay.
    """
    if tables is None:
        return x_BTHd
    cos, sin = (table[:, :, None, :] for table in tables)
    dims = 2 * cos.shape[-1]
    if dims < x_BTHd.shape[-1]:
        return jnp.concatenate([rotate(x_BTHd[..., :dims], tables), x_BTHd[..., dims:]], axis=-1)
    first, second = jnp.split(x_BTHd.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BTHd.dtype)


def block(
    cfg: ModelConfig,
    mesh: Mesh,
    kind: LayerKind,
    layer_params: LayerParams,
    layer_lora: Mapping[str, LoraPair],
    x_BTD: jax.Array,
    rope: RopeTables,
    attend: Attend,
    lora_apply: LoraApply,
) -> jax.Array:
    """One layer: hidden states in, hidden states out, [B, T, D] in the dtype of the weights.

    cfg: its flags say what the layers are made of. mesh: for the experts, which are split over it. kind: what this
    layer has of its own. layer_params: its weights, as in `Params.layers` without L. layer_lora: the adapter pairs of
    this layer by projection; it may lack some or all. x_BTD: hidden states. rope: from `rope_tables`. attend: the attention; it keeps its cache itself.
    lora_apply: computes the adapters' updates.
    """
    B, T, _ = x_BTD.shape

    def project(x: jax.Array, *names: str) -> tuple[jax.Array, ...]:
        adapted = tuple(name for name in names if name in layer_lora)
        deltas = dict(zip(adapted, lora_apply(x, tuple(layer_lora[name] for name in adapted)), strict=True))
        plain = {name: matmul(x, layer_params[name]) for name in names}
        sums = {name: plain[name] + deltas[name] if name in deltas else plain[name] for name in names}
        return tuple(checkpoint_name(sums[name], name) for name in names)

    y_BTD = rms_norm(x_BTD, layer_params["attn_norm"], cfg.norm_eps)
    q, k, v = project(y_BTD, "q", "k", "v")
    if cfg.qkv_bias:
        q, k, v = (x + layer_params[f"{name}_bias"] for name, x in (("q", q), ("k", k), ("v", v)))
    q_BTHd = q.reshape(B, T, cfg.heads, cfg.head_dim)
    k_BTGd = k.reshape(B, T, cfg.kv_heads, cfg.head_dim)
    v_BTGd = v.reshape(B, T, cfg.kv_heads, cfg.head_dim)
    if cfg.qk_norm:
        q_BTHd = rms_norm(q_BTHd, layer_params["q_norm"], cfg.norm_eps)
        k_BTGd = rms_norm(k_BTGd, layer_params["k_norm"], cfg.norm_eps)
    tables = rope[kind.rope] if kind.rope else None
    o_BTHd = attend(rotate(q_BTHd, tables), rotate(k_BTGd, tables), v_BTGd, window=kind.window)
    (o_BTD,) = project(o_BTHd.reshape(B, T, cfg.heads * cfg.head_dim), "o")
    x_BTD = x_BTD + o_BTD

    y_BTD = rms_norm(x_BTD, layer_params["mlp_norm"], cfg.norm_eps)
    if cfg.experts:
        return x_BTD + mixture(cfg, mesh, layer_params, layer_lora, y_BTD, lora_apply)
    gate_BTF, up_BTF = project(y_BTD, "gate", "up")
    (down_BTD,) = project(jax.nn.silu(gate_BTF) * up_BTF, "down")
    return x_BTD + down_BTD


def forward(
    cfg: ModelConfig,
    mesh: Mesh,
    params: Params,
    lora: Lora,
    tokens_BT: jax.Array,
    positions_BT: jax.Array,
    attend: Attend,
    lora_apply: LoraApply,
    *,
    constrain: Callable[[jax.Array], jax.Array] = lambda x: x,
    remat: bool = False,
) -> jax.Array:
    """Final hidden states [B, T, D] for training, in the dtype of the weights: a loop over the layers.

    cfg, mesh, params: the base model and its devices. lora: one adapter, float32 A and B. tokens_BT int32: token ids.
    positions_BT int32: each token's place in its own sequence, from 0. attend: the attention.
    lora_apply: computes the adapter's updates. constrain: pins the sharding of [B, T, D] activations between layers.
    remat: for a backward pass keep only each layer's input, not `KEPT`, and compute the rest again.
    """
    rope = rope_tables(cfg, positions_BT)

    def layer(kind: LayerKind, x_BTD: jax.Array, stacked: tuple[Any, LayerParams, Mapping[str, LoraPair]]) -> jax.Array:
        _, layer_params, layer_lora = stacked
        return constrain(block(cfg, mesh, kind, layer_params, layer_lora, x_BTD, rope, attend, lora_apply))

    kept = jax.checkpoint_policies.save_only_these_names(*(() if remat else KEPT))
    body: Any = jax.checkpoint(layer, policy=kept, static_argnums=0)
    return final_hidden(
        cfg, params, over_layers(cfg, body, constrain(embed(params, tokens_BT)), params.layers, lora.layers)
    )

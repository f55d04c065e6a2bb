"""Decoder-only transformers as pure functions on pytrees.

Training, prefill and decode share `DecoderLayer`. They differ in the `Mixers`, which decide the tokens that a token
sees and the storage of its keys and values. They also differ in `lora_apply`: one adapter for all rows, or one for each
row. `forward` here and `sampler.decode` loop over the layers with `layer_loop.over_layers`.

The caches of a pool (pages of keys, states) are stacked over the pool's layers (`ModelConfig.numbers`). A layer's place
in the stack is passed with its weights.

Letters: B rows, T tokens, D hidden, V vocabulary, L layers, E vectors of an image's token, P width of a layer's input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tinkerflow.backend.compute.kernels.matmul import product
from tinkerflow.backend.compute.mesh import Array
from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.families import projections
from tinkerflow.backend.compute.models.layer_loop import LayerPairs, LayerParams, over_layers
from tinkerflow.backend.compute.models.layers import EXPERT_MATRICES, DecoderLayer
from tinkerflow.backend.compute.models.layers.embedding import rows_of
from tinkerflow.backend.compute.models.layers.matrices import plain_name
from tinkerflow.backend.compute.models.layers.step import LayerStep, Mixers, RopeTables, Routing
from tinkerflow.backend.compute.models.lora import Lora, LoraApply
from tinkerflow.backend.compute.models.rotary import rope_table
from tinkerflow.backend.compute.platforms import TPU, TURING, platform
from tinkerflow.backend.compute.weights.quantized import FourBit, Int8

Shared = Mapping[str, tuple[jax.Array, jax.Array]]  # keys and values of the last layer of each pool
# From layer to layer: hidden states, shared keys and values, the layer's number, and the agreement (`forward`).
Carry = tuple[jax.Array, Shared, jax.Array, jax.Array | None]


class Keep(Enum):
    """The values that a forward pass saves for the backward pass, from the most memory to the least.

    The backward pass computes all other values again.

    RESULTS: the input of every layer, and the results in `kept_names`.
    INPUTS: the input of every layer.
    GROUPS: the inputs of the layers of one group, and the input of every other group (`layer_loop.groups`). This costs
    one more forward pass.
    """

    RESULTS = 0
    INPUTS = 1
    GROUPS = 2


def kept_names(cfg: ModelConfig) -> tuple[str, ...]:
    """The names of saved results of a layer (`Keep.RESULTS`): the results of matmuls and of attention.

    low: an adapter's x @ A.T. Attention names `attended` and `log_totals`. Saving all values took twice the memory, and
    on CPUs also more time for writing.
    """
    names = {plain_name(name) for name, matrix in projections(cfg).items() if matrix.kept}
    return (*sorted(names), "attended", "log_totals", "low")


@flax.struct.dataclass
class Params:
    """Frozen base weights in the dtype of the activations.

    embed_VD: the embedding.
    layers: arrays by our names, each stacked over the layers that have it (`families.projections`, `layer_tensors`), or
    a tuple of layers (`params.by_layer`). Matrices of experts are transposed. Matrices may be `quantized.Int8` or
    `FourBit`.
    final_norm_D: the norm of the last layer's result.
    unembed_VD: None when the embedding is tied.
    tower: the tensors of `vision_config.tower_tensors`, complete on each device; None in models that take text only.
    inputs: the tensors of `LayerInput.model_tensors`; None in most models.
    softcap: as in the config.
    """

    embed_VD: jax.Array
    layers: LayerParams | tuple[LayerParams, ...]
    final_norm_D: jax.Array
    unembed_VD: jax.Array | None
    tower: Mapping[str, jax.Array] | None = None
    inputs: Mapping[str, jax.Array] | None = None
    softcap: float = flax.struct.field(pytree_node=False, default=0.0)  # type: ignore[no-untyped-call]

    @property
    def head(self) -> jax.Array:
        """The matrix of the unembedding, [V, D]."""
        return self.embed_VD if self.unembed_VD is None else self.unembed_VD

    @property
    def unstacked(self) -> bool:
        """Whether each layer has its own arrays."""
        return isinstance(self.layers, tuple)


@flax.struct.dataclass
class ImageFeatures:
    """The features of the images in a batch. Each token has E vectors: its embedding, and the vectors of DeepStack.

    here_BT bool: whether each token belongs to an image.
    positions_BT3 int32: time, row and column of every token, text included.
    vectors_BTED: in the dtype of the weights, zeros outside of images.
    """

    here_BT: Array
    positions_BT3: Array
    vectors_BTED: Array


@dataclass(frozen=True)
class ForwardInputs:
    """The tokens of a batch, and how `forward` computes with them.

    tokens_BT int32: token ids.
    positions_BT int32: each token's place in its own sequence, from 0.
    mixers: mix the tokens.
    lora_apply: computes the adapter's updates.
    images: the images among the tokens, whose positions replace positions_BT; None = there are none.
    constrain: pins the sharding of [B, T, D] activations between layers.
    keep: the values that are saved for the backward pass.
    tokens_at_once: as in `LayerStep`; a backward pass computes these parts again.
    in_place: names of stacked matrices that kernels read in place; no backward pass computes their gradients.
    routes_BTLk int32: the experts of each token in every layer, -1 = the router chooses; None = it always chooses.
    """

    tokens_BT: jax.Array
    positions_BT: jax.Array
    mixers: Mixers
    lora_apply: LoraApply
    images: ImageFeatures | None = None
    constrain: Callable[[jax.Array], jax.Array] = lambda x: x
    keep: Keep = Keep.RESULTS
    tokens_at_once: int = 0
    in_place: frozenset[str] = frozenset()
    routes_BTLk: jax.Array | None = None


def forward(
    cfg: ModelConfig, mesh: Mesh, params: Params, lora: Lora, inputs: ForwardInputs
) -> tuple[jax.Array, jax.Array | None]:
    """Final hidden states [B, T, D] for training, in the dtype of the weights; and the routers' agreement.

    The agreement, int32 [B, T, 2], counts the given experts in layers whose router chooses exactly these, in any order.
    Its second number is 1 if the router of the first layer with given experts chooses them. None without given experts.
    cfg, mesh, params: the base model and its devices. lora: an adapter, A and B in float32.
    """
    images, mixers, constrain, keep = inputs.images, inputs.mixers, inputs.constrain, inputs.keep
    rope = rope_tables(cfg, inputs.positions_BT if images is None else jnp.asarray(images.positions_BT3))

    def run(layer: DecoderLayer, carry: Carry, stacked: tuple[Any, LayerParams, LayerPairs]) -> Carry:
        (x_BTD, shared, number, equal_BT2), (place, weights, pairs) = carry, stacked
        routing = None
        if inputs.routes_BTLk is not None:
            routing = Routing(jax.lax.dynamic_index_in_dim(inputs.routes_BTLk, number, axis=2, keepdims=False))

        def attend(
            q: jax.Array, k: jax.Array | None, v: jax.Array | None, *, window: int | None, sinks_H: jax.Array | None
        ) -> jax.Array:
            nonlocal shared
            if k is None or v is None:
                k, v = shared[layer.pool]
            elif shared:
                shared = {**shared, layer.pool: (k, v)}
            return mixers.attend(q, k, v, window=window, sinks_H=sinks_H)

        step = LayerStep(
            mesh,
            weights,
            pairs,
            rope,
            replace(mixers, attend=attend, recompute_heads=mixers.recompute_heads and not shared),
            inputs.lora_apply,
            input_of_layer(inputs_LBTP, number),
            inputs.tokens_at_once,
            routing=routing,
        )
        x_BTD = constrain(layer(step, x_BTD))
        if equal_BT2 is not None and first_BT is not None and routing is not None:
            equal_BT = jnp.broadcast_to(_agrees(routing), first_BT.shape)
            equal_BT2 = equal_BT2 + jnp.stack([equal_BT, (equal_BT > 0) & (first_BT == number)], axis=-1)
        x_BTD = x_BTD if images is None else add_deep_features(images, place, x_BTD)
        return x_BTD, shared, number + 1, equal_BT2

    policy = jax.checkpoint_policies.save_only_these_names(*(kept_names(cfg) if keep is Keep.RESULTS else ()))
    kept = partial(jax.checkpoint, policy=policy)
    x_BTD = embed(cfg, params, inputs.tokens_BT, images)
    inputs_LBTP = layer_inputs(cfg, params, inputs.tokens_BT, x_BTD)
    first_BT = equal_BT2 = None
    if inputs.routes_BTLk is not None:
        first_BT = jnp.argmax(inputs.routes_BTLk[..., 0] >= 0, axis=-1)
        equal_BT2 = jnp.zeros((*first_BT.shape, 2), jnp.int32)
    start = (constrain(x_BTD), _nothing_shared(cfg, x_BTD), jnp.int32(0), equal_BT2)
    x_BTD, _, _, equal_BT2 = over_layers(
        cfg, run, start, params.layers, lora.layers, inputs.in_place, kept=kept, grouped=keep is Keep.GROUPS
    )
    return final_hidden(cfg, params, x_BTD), equal_BT2


def experts_in_place(cfg: ModelConfig, params: Params) -> frozenset[str]:
    """The names of the experts' matrices, if kernels read them in place. XLA would copy each layer's for the kernels.

    Matrices of 4 bits are widened, a layer at a time. So are those of 8 bits on TPUs.
    """
    if not platform().kernels or not cfg.experts or isinstance(params.layers, tuple):
        return frozenset()
    widened = Int8 | FourBit if platform() is TPU else FourBit
    return frozenset(name for name in EXPERT_MATRICES if not isinstance(params.layers[name], widened))


def _agrees(routing: Routing) -> jax.Array:
    """For each token [B, T]: k if the given experts are the router's own choice, otherwise 0. int32."""
    if routing.own_BTk is None or routing.given_BTk is None:
        return jnp.int32(0)
    own_BTk, given_BTk = jnp.sort(routing.own_BTk), jnp.sort(routing.given_BTk)
    return jnp.all(own_BTk == given_BTk, axis=-1) * jnp.int32(own_BTk.shape[-1])


def embed(cfg: ModelConfig, params: Params, tokens_BT: Array, images: ImageFeatures | None = None) -> jax.Array:
    """Scaled embeddings x_BTD, in the dtype of the weights. Tokens of images have the images' features instead."""
    x_BTD = rows_of(params.embed_VD, jnp.asarray(tokens_BT))
    x_BTD = x_BTD if cfg.embed_scale == 1 else x_BTD * jnp.asarray(cfg.embed_scale, x_BTD.dtype)
    if images is None:
        return x_BTD
    return jnp.where(jnp.asarray(images.here_BT)[..., None], jnp.asarray(images.vectors_BTED)[:, :, 0], x_BTD)


def rope_tables(cfg: ModelConfig, positions: jax.Array) -> RopeTables:
    """cos and sin of each rotary embedding, computed once, outside the loop over layers.

    positions: int32 [B, T]; or [B, T, 3], time, row and column, in a model that takes images.
    """
    vision = cfg.vision if positions.ndim == len("BT3") else None

    def axes(pairs: int) -> list[int] | None:
        return None if vision is None else [vision.rotated_by(pair) for pair in range(pairs)]

    return {rope: rope_table(rope, positions, axes(rope.dims // 2)) for rope in cfg.ropes}


def layer_inputs(cfg: ModelConfig, params: Params, tokens_BT: Array, x_BTD: jax.Array) -> jax.Array | None:
    """The inputs of all layers, [L, B, T, P] in the dtype of x_BTD; None in most models. x_BTD: the embeddings."""
    if cfg.layer_input is None or params.inputs is None:
        return None
    return cfg.layer_input.all_layers(params.inputs, jnp.asarray(tokens_BT), x_BTD)


def input_of_layer(inputs_LBTP: jax.Array | None, number: jax.Array) -> jax.Array | None:
    """A layer's part of `layer_inputs`."""
    return None if inputs_LBTP is None else jax.lax.dynamic_index_in_dim(inputs_LBTP, number, keepdims=False)


def add_deep_features(images: ImageFeatures, number: Any, x_BTD: jax.Array) -> jax.Array:
    """x_BTD after layer `number`, with the vectors that DeepStack adds there (arXiv 2406.04334)."""
    deep = images.vectors_BTED.shape[2] - 1
    if not deep:
        return x_BTD
    vectors_BTD = jax.lax.dynamic_index_in_dim(
        jnp.asarray(images.vectors_BTED), jnp.minimum(number + 1, deep), axis=2, keepdims=False
    )
    return jnp.where(number < deep, x_BTD + vectors_BTD, x_BTD)


def final_hidden(cfg: ModelConfig, params: Params, x_BTD: jax.Array) -> jax.Array:
    """The input of the unembedding (and of its adapter): the last layer's result, normalized."""
    return cfg.norm(x_BTD, params.final_norm_D)


def unembed(params: Params, hidden_BTD: jax.Array) -> jax.Array:
    """Logits [B, T, V] in float32, without an adapter's update and before `capped`."""
    return product(hidden_BTD, params.head, jnp.float32)


def unembed_pullback(params: Params, d_logits_BTV: jax.Array) -> jax.Array:
    """The gradient of `unembed` with respect to hidden_BTD."""
    if platform() is TURING:
        return product(d_logits_BTV, params.head.T)
    return jnp.einsum("btv,vd->btd", d_logits_BTV, params.head)


def capped(params: Params, logits_BTV: jax.Array) -> jax.Array:
    """The logits, an adapter's update included, after the model's softcap."""
    return logits_BTV if not params.softcap else params.softcap * jnp.tanh(logits_BTV / params.softcap)


def capped_pullback(params: Params, logits_BTV: jax.Array, d_logits_BTV: jax.Array) -> jax.Array:
    """The gradient for the input of `capped`. logits_BTV: the output. d_logits_BTV: the output's gradient."""
    return d_logits_BTV if not params.softcap else d_logits_BTV * (1 - (logits_BTV / params.softcap) ** 2)


def _nothing_shared(cfg: ModelConfig, x_BTD: jax.Array) -> Shared:
    """Zeros for the keys and values of each pool's last layer, in models whose later layers read them."""
    pools = dict.fromkeys(layer.pool for layer in cfg.decoder_layers if layer.shares is not None)
    cells = {pool: cfg.attention_of(pool).cached for pool in pools}
    empty = {
        pool: jnp.zeros((*x_BTD.shape[:2], heads, width), x_BTD.dtype) for pool, (heads, width, _) in cells.items()
    }
    return {pool: (zeros, zeros) for pool, zeros in empty.items()}

"""The forward pass over the KV cache, for decode and prefill: tokens of several sequences go through all layers.

Letters: S rows, Q tokens per row, W pages of a row's table, D hidden, V vocabulary, L layers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tinkerflow.backend.compute.kernels import adapter_gpu
from tinkerflow.backend.compute.mesh import (
    FSDP,
    WEIGHTS,
    Array,
    cache_mesh,
    expert_axes,
    replicated,
    sampling_mesh,
    sharding,
)
from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.families import projections
from tinkerflow.backend.compute.models.layer_loop import over_layers
from tinkerflow.backend.compute.models.layers import DecoderLayer, DeltaRuleWeights
from tinkerflow.backend.compute.models.layers.delta_rule import mix
from tinkerflow.backend.compute.models.layers.step import LayerStep, Mixers, Routing
from tinkerflow.backend.compute.models.lora import Lora, LoraPair
from tinkerflow.backend.compute.models.transformer import (
    ImageFeatures,
    Params,
    add_deep_features,
    capped,
    embed,
    experts_in_place,
    final_hidden,
    input_of_layer,
    layer_inputs,
    rope_tables,
    unembed,
)
from tinkerflow.backend.compute.platforms import TPU, platform
from tinkerflow.backend.compute.sampler.kv_cache import KVCache, attend_cached, by_mixer
from tinkerflow.backend.compute.sampler.latent_attention import attend_latents
from tinkerflow.backend.compute.sampler.snapshot_cache import stack_apply, width_of
from tinkerflow.backend.compute.sampler.states import States, state_of, with_layer

# Passed from layer to layer, with hidden states, the layer's number, and the experts of all layers so far.
Carry = tuple[KVCache, States, jax.Array, jax.Array, jax.Array | None]


@dataclass(frozen=True)
class StepInputs:
    """The tokens of one step, and the place of each row in the cache.

    tokens_SQ int32: Q tokens per row. start_S int32: the position of each row's first token. tables_SW int32: each
    row's pages. columns_S2 int32: each row's columns of the stack. valid_S int32: how many of its tokens the row's
    state includes; None: all. shift_S int32: the rotary position of a token minus its index (`decode.Rows`); None: 0.
    images: the images among the tokens, and the rotary positions of all tokens; None: no images, and shift_S applies.
    """

    tokens_SQ: Array
    start_S: jax.Array
    tables_SW: Array
    columns_S2: Array
    valid_S: Array | None = None
    shift_S: Array | None = None
    images: ImageFeatures | None = None


def run_layers(
    cfg: ModelConfig,
    mesh: Mesh,
    params: Params,
    lora: Lora,
    cache: KVCache,
    states: States,
    inputs: StepInputs,
    routes: bool = False,
) -> tuple[KVCache, States, jax.Array, jax.Array | None]:
    """The cache with the tokens' keys and values, the states after the tokens, and their final hidden states [S, Q, D].

    The last result is the tokens' experts, int16 [S, Q, L, k], -1 in layers without experts; None unless `routes`.
    Hidden states are in the weights' dtype. The cache is carried through the loop over layers, so it is never copied.
    Between layers every device has the hidden states of all rows, but only its own part of the matrices. cfg, mesh,
    params: the base model and its devices. lora: the stack of adapters. cache: the pages. states: the rows' states,
    from `gather_states`. inputs: the tokens. routes: whether to return their experts; requires a model with experts.
    """
    tokens_SQ, start_S, tables_SW, images = inputs.tokens_SQ, inputs.start_S, inputs.tables_SW, inputs.images
    owners, rows = expert_axes(mesh, cfg.experts), cache_mesh(mesh, cfg.split_heads)
    one = mesh if FSDP in owners else sampling_mesh(mesh)
    positions_SQ = start_S[:, None] + jnp.arange(tokens_SQ.shape[1], dtype=jnp.int32)
    if inputs.shift_S is not None:
        positions_SQ = positions_SQ + jnp.asarray(inputs.shift_S)[:, None]
    rope = rope_tables(cfg, positions_SQ if images is None else jnp.asarray(images.positions_BT3))
    apply = stack_apply(inputs.columns_S2, width_of(lora), one_device=mesh.size == 1)
    whole, parts = _in_place(cfg, params), None
    if whole and mesh.size > 1 and platform() is not TPU:
        parts = adapter_gpu.in_place(inputs.columns_S2, width_of(lora) or 0)

    def run(layer: DecoderLayer, state: Carry, stacked: Any) -> Carry:
        cache, states, x_SQD, number, chosen_LSQk = state
        place, weights, pairs = stacked

        def attend(
            q: jax.Array, k: jax.Array | None, v: jax.Array | None, *, window: int | None, sinks_H: Any
        ) -> jax.Array:
            nonlocal cache
            how = {"window": window, "sinks_H": sinks_H}
            own, o = attend_cached(rows, cache.of(layer.pool), place, tables_SW, start_S, q, k, v, **how)
            cache = cache.with_own(layer.pool, own)
            return o

        def delta_rule(weights: DeltaRuleWeights, qkv: jax.Array, decay: jax.Array, beta: jax.Array) -> jax.Array:
            nonlocal states
            assert cfg.delta is not None and states is not None
            own = state_of(states, place, start_S == 0)
            o, own = mix(cfg.delta, rows, weights, own, qkv, decay, beta, rows=FSDP, valid_B=inputs.valid_S)
            states = with_layer(states, place, own)
            return o

        latent_attend = None
        if cfg.latent is not None:
            latent_attend = functools.partial(
                attend_latents, cfg.latent, mesh, attend, inputs.columns_S2, width_of(lora)
            )
        mixers, input_SQP = Mixers(attend, delta_rule, latent_attend), input_of_layer(inputs_LSQP, number)
        routing = None if chosen_LSQk is None else Routing()
        step = LayerStep(
            one,
            weights,
            pairs,
            rope,
            mixers,
            apply,
            input_SQP,
            routing=routing,
            owners=owners,
            updates_in_place=parts,
        )
        x_SQD = layer(step, x_SQD)
        if chosen_LSQk is not None and routing is not None and routing.own_BTk is not None:
            chosen_LSQk = chosen_LSQk.at[number].set(routing.own_BTk.astype(chosen_LSQk.dtype))
        x_SQD = x_SQD if images is None else add_deep_features(images, place, x_SQD)
        return cache, states, everywhere(x_SQD), number + 1, chosen_LSQk

    def everywhere(x_SQD: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x_SQD, replicated(mesh))

    x_SQD = everywhere(embed(cfg, params, tokens_SQ, images))
    inputs_LSQP = layer_inputs(cfg, params, tokens_SQ, x_SQD)
    shape_LSQk = (cfg.layers, *tokens_SQ.shape, cfg.experts_per_token)
    start = (cache, states, x_SQD, jnp.int32(0), jnp.full(shape_LSQk, -1, jnp.int16) if routes else None)
    cache, states, x_SQD, _, chosen_LSQk = over_layers(
        cfg, run, start, params.layers, lora.layers, in_place=whole, pairs_in_place=whole
    )
    chosen_SQLk = None if chosen_LSQk is None else jnp.moveaxis(chosen_LSQk, 0, 2)
    return cache, states, final_hidden(cfg, params, x_SQD), chosen_SQLk


def _in_place(cfg: ModelConfig, params: Params) -> frozenset[str]:
    """The matrices that are used in place, without a copy of each layer's matrix.

    On GPUs, all matrices are used in place. On TPUs, only the matrices of experts are.
    """
    stacks = params.layers
    if platform().kernels != "triton":
        return experts_in_place(cfg, params)
    assert not isinstance(stacks, tuple)  # only CPUs use weights by layer
    # `latent_attention` multiplies by `kv_b` head by head.
    return frozenset(stacks.keys() & projections(cfg).keys() - {"kv_b"})


def unembedded(mesh: Mesh, params: Params, pair: LoraPair | None, x_SQD: jax.Array, columns_S2: Array) -> jax.Array:
    """Logits float32 [S, Q, V] of final hidden states, with each row's own columns of the stack's `pair`.

    The devices of `mesh` split V. A caller that needs unsplit rows moves logits, not the unembedding. params: the
    base model. pair: None without a stack. x_SQD: in the weights' dtype. columns_S2 int32: each row's columns.
    """
    logits = unembed(params, x_SQD)
    if pair is not None:
        apply = stack_apply(columns_S2, int(pair.A.shape[-2]), one_device=mesh.size == 1)
        (update,) = apply(x_SQD, (pair,))
        logits = logits + update.astype(jnp.float32)
    logits = capped(params, logits)
    return jax.lax.with_sharding_constraint(logits, sharding(mesh, logits.shape, None, None, WEIGHTS))


def pin_cache(cfg: ModelConfig, mesh: Mesh, cache: KVCache) -> KVCache:
    """The cache, pinned to the sharding that the next step expects."""
    return by_mixer(cfg, mesh, cache, jax.lax.with_sharding_constraint)

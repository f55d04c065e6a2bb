"""Decode: every slot of the batch gets some more tokens, in one dispatch.

Letters: S slots, C tokens of a chunk, D hidden, V vocabulary, L layers.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tinkerflow.backend.compute.mesh import (
    FSDP,
    WEIGHTS,
    Array,
    by_rows,
    cache_mesh,
    replicated,
    sampling_mesh,
    sharding,
)
from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.families import projections
from tinkerflow.backend.compute.models.layer_loop import over_layers
from tinkerflow.backend.compute.models.layers import EXPERT_MATRICES, DecoderLayer, DeltaRuleWeights
from tinkerflow.backend.compute.models.layers.delta_rule import mix
from tinkerflow.backend.compute.models.layers.step import LayerStep, Mixers
from tinkerflow.backend.compute.models.lora import Lora, LoraPair
from tinkerflow.backend.compute.models.transformer import (
    ImageFeatures,
    Params,
    add_deep_features,
    capped,
    embed,
    final_hidden,
    input_of_layer,
    layer_inputs,
    rope_tables,
    unembed,
)
from tinkerflow.backend.compute.platforms import CUDA, on_cpu, platform
from tinkerflow.backend.compute.sampler.adjustments import AdjustedRows, adjusted, generated
from tinkerflow.backend.compute.sampler.kv_cache import KVCache, attend_cached, by_mixer
from tinkerflow.backend.compute.sampler.latent_attention import attend_latents
from tinkerflow.backend.compute.sampler.sampling import Choice, greedy_choice, sample
from tinkerflow.backend.compute.sampler.snapshot_cache import stack_apply, width_of
from tinkerflow.backend.compute.sampler.states import States, put, state_of, take, with_layer
from tinkerflow.backend.compute.weights.quantized import Int8

Carry = tuple[KVCache, States, jax.Array, jax.Array]  # from layer to layer, with hidden states and the layer's number


@flax.struct.dataclass
class Rows:
    """The start of a chunk, one entry a slot. An unused slot has zeros, and its tokens are never read.

    tokens_S int32: the last token, not yet in the cache, where the host knows it. positions_S int32: where it stands in
    its sequence. tables_SW int32: its pages, as numbers in the slot's own shard of the cache. columns_S2 int32: its
    adapter's columns of the stack. uniform_CS float32: a random number for every token to come. adjusted: how logits
    are changed, None = no slot asks for it. states_S int32: its state, as `tables_SW` has its pages; None in models
    without. before_M int32: the last token of each slot of an earlier chunk, on the devices. from_S int32: the place in
    it of the row's last token, -1 = it is in `tokens_S`. Both None where the host always knows the tokens. shift_S
    int32: how much later a token turns than it stands, because of images before it; None in models that take text.
    """

    tokens_S: Array
    positions_S: Array
    tables_SW: Array
    columns_S2: Array
    uniform_CS: Array
    choice: Choice
    adjusted: AdjustedRows | None = None
    states_S: Array | None = None
    before_M: Array | None = None
    from_S: Array | None = None
    shift_S: Array | None = None


@flax.struct.dataclass
class Decoded:
    """tokens_CS int32 and their logprobs_CS float32; top_CSk int32 and top_logprobs_CSk float32, or None without.

    last_M int32: the last token of each slot, for the `before_M` of the next chunk; None in a chunk without one.
    """

    tokens_CS: Array
    logprobs_CS: Array
    top_CSk: Array | None = None
    top_logprobs_CSk: Array | None = None
    last_M: Array | None = None


def empty_rows(slots: int, pages: int, chunk: int, *, states: bool) -> Rows:
    """Host arrays for a chunk of so many slots, of which none is used. All sequences begin at 0, without images.

    pages: of a row's table. chunk: C. states: whether the model has any.
    """
    return Rows(
        tokens_S=np.zeros(slots, np.int32),
        positions_S=np.zeros(slots, np.int32),
        tables_SW=np.zeros((slots, pages), np.int32),
        columns_S2=np.zeros((slots, 2), np.int32),
        uniform_CS=np.zeros((chunk, slots), np.float32),
        choice=greedy_choice(slots),
        states_S=np.zeros(slots, np.int32) if states else None,
    )


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3), donate_argnums=6)
def decode(
    cfg: ModelConfig,
    mesh: Mesh,
    chunk: int,
    top: int,
    params: Params,
    lora: Lora,
    cache: KVCache,
    rows: Rows,
    steps: jax.Array,
) -> tuple[KVCache, Decoded]:
    """More tokens for every slot: the cache, updated in place, and the tokens [C, S], replicated.

    cfg, mesh: the base model's shape, and the devices. chunk: C, the most tokens of a slot. top: how many of the most
    likely tokens to list at each position, 0 = none.
    params: the base model. lora: the stack of adapters. cache: the pages. If `params` is by layer, the stack and the
    cache must be too. rows: where each of the S slots starts. steps: int32 scalar, tokens to decode, at most C; the
    rest are 0.
    """

    def step(i: jax.Array, state: tuple[KVCache, States, jax.Array, AdjustedRows | None, Decoded]) -> Any:
        cache, states, last_S, adjust, decoded = state
        positions_S = i + rows.positions_S
        tokens_S1, columns_S2 = last_S[:, None], rows.columns_S2
        start = (cache, states, tokens_S1, positions_S)
        tables_SW, shift_S = rows.tables_SW, rows.shift_S
        cache, states, x_S1D = layers(
            cfg, mesh, params, lora, *start, tables_SW=tables_SW, columns_S2=columns_S2, shift_S=shift_S
        )
        logits_SV = unembedded(mesh, params, lora.unembed, x_S1D, rows.columns_S2)[:, 0]
        # Whole rows on each device: then drawing a token needs no collectives.
        logits_SV = by_rows(mesh, logits_SV)
        wanted_SV = logits_SV if adjust is None else adjusted(logits_SV, adjust)
        next_S, logprob_S = sample(logits_SV, rows.choice, rows.uniform_CS[i], wanted_SV)
        adjust = None if adjust is None else generated(adjust, next_S)
        found = Decoded(next_S, logprob_S)
        if top:
            values_Sk, top_Sk = jax.lax.top_k(logits_SV, top)
            chosen_S = jnp.take_along_axis(logits_SV, next_S[:, None], axis=-1)[:, 0]
            spread_S = chosen_S - logprob_S  # so that a listed token has the very logprob that it has when sampled
            found = Decoded(next_S, logprob_S, top_Sk.astype(jnp.int32), values_Sk - spread_S[:, None])
        decoded = jax.tree.map(lambda whole, one: jax.lax.dynamic_update_index_in_dim(whole, one, i, 0), decoded, found)
        return cache, states, next_S, adjust, decoded

    S = rows.tokens_S.shape[0]
    room = Decoded(
        jnp.zeros((chunk, S), jnp.int32),
        jnp.zeros((chunk, S), jnp.float32),
        jnp.zeros((chunk, S, top), jnp.int32) if top else None,
        jnp.zeros((chunk, S, top), jnp.float32) if top else None,
    )
    pool, cache = cache.states, replace(cache, states=None)
    fresh_S = jnp.asarray(rows.positions_S == 0)
    states = take(cfg, mesh, pool, rows.states_S, fresh_S, by_layer=params.unstacked, pooled=_pooled())
    tokens_S = rows.tokens_S
    if rows.before_M is not None and rows.from_S is not None:
        tokens_S = jnp.where(rows.from_S < 0, tokens_S, jnp.asarray(rows.before_M)[rows.from_S])
    begin = (cache, states, tokens_S, rows.adjusted, room)
    cache, states, last_S, _, decoded = jax.lax.fori_loop(0, steps, step, begin)
    if rows.before_M is not None:
        decoded = decoded.replace(last_M=jnp.zeros_like(rows.before_M).at[:S].set(last_S))
    cache = replace(pin_cache(cfg, mesh, cache), states=put(cfg, mesh, pool, states, rows.states_S))
    return cache, jax.lax.with_sharding_constraint(decoded, replicated(mesh))


def layers(
    cfg: ModelConfig,
    mesh: Mesh,
    params: Params,
    lora: Lora,
    cache: KVCache,
    states: States,
    tokens_SQ: Array,
    start_S: jax.Array,
    *,
    tables_SW: Array,
    columns_S2: Array,
    valid_S: Array | None = None,
    shift_S: Array | None = None,
    images: ImageFeatures | None = None,
) -> tuple[KVCache, States, jax.Array]:
    """The cache with the tokens' keys and values, the states after them, and their final hidden states [S, Q, D].

    These are in the weights' dtype. The cache is carried through the loop over layers, so it is never copied. Every
    device has the hidden states of all rows between layers; of matrices it needs no more than it holds. cfg, mesh,
    params: the base model and its devices. lora: the stack of adapters. states: the rows', from `states.take`.
    tokens_SQ int32: Q tokens of each row. start_S int32: where the first of them stands in its sequence. tables_SW
    int32: each row's pages. columns_S2 int32: each row's columns of the stack. valid_S int32: how many of its tokens
    count for its state, None = all. shift_S int32: as in `Rows`, None = tokens turn where they stand. images: those
    among the tokens, and the rotary positions of all tokens; None = as shift_S says.
    """
    one, rows = sampling_mesh(mesh), cache_mesh(mesh, cfg.split_heads)
    positions_SQ = start_S[:, None] + jnp.arange(tokens_SQ.shape[1], dtype=jnp.int32)
    if shift_S is not None:
        positions_SQ = positions_SQ + jnp.asarray(shift_S)[:, None]
    rope = rope_tables(cfg, positions_SQ if images is None else jnp.asarray(images.positions_BT3))
    apply = stack_apply(columns_S2, width_of(lora), one_device=mesh.size == 1)

    def run(layer: DecoderLayer, state: Carry, stacked: Any) -> Carry:
        cache, states, x_SQD, number = state
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
            o, own = mix(cfg.delta, rows, weights, own, qkv, decay, beta, rows=FSDP, valid_B=valid_S)
            states = with_layer(states, place, own)
            return o

        latent_attend = None
        if cfg.latent is not None:
            latent_attend = functools.partial(attend_latents, cfg.latent, mesh, attend, columns_S2, width_of(lora))
        mixers, input_SQP = Mixers(attend, delta_rule, latent_attend), input_of_layer(inputs_LSQP, number)
        x_SQD = layer(LayerStep(one, weights, pairs, rope, mixers, apply, input_SQP), x_SQD)
        x_SQD = x_SQD if images is None else add_deep_features(images, place, x_SQD)
        return cache, states, everywhere(x_SQD), number + 1

    def everywhere(x_SQD: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x_SQD, replicated(mesh))

    x_SQD = everywhere(embed(cfg, params, tokens_SQ, images))
    inputs_LSQP = layer_inputs(cfg, params, tokens_SQ, x_SQD)
    start = (cache, states, x_SQD, jnp.int32(0))
    cache, states, x_SQD, _ = over_layers(cfg, run, start, params.layers, lora.layers, _in_place(cfg, mesh, params))
    return cache, states, final_hidden(cfg, params, x_SQD)


def _in_place(cfg: ModelConfig, mesh: Mesh, params: Params) -> frozenset[str]:
    """The matrices that are multiplied by without a copy of each layer's.

    Those of a GPU that has all of them; on TPUs those of experts, which XLA would copy for the kernel. Int8 is widened
    there, a layer at a time.
    """
    if on_cpu():
        return frozenset()
    stacks = params.layers
    assert not isinstance(stacks, tuple)  # only CPUs have weights by layer
    if platform() is CUDA:
        names = stacks.keys() & projections(cfg).keys() if mesh.size == 1 else set()
        return frozenset(names - {"kv_b"})  # `latent_attention` multiplies by head
    experts = EXPERT_MATRICES if cfg.experts else ()
    return frozenset(name for name in experts if not isinstance(stacks[name], Int8))


def _pooled() -> bool:
    """Whether the matrices of linear attention stay in their pool: kernels change them there for a token."""
    return not on_cpu()


def unembedded(mesh: Mesh, params: Params, pair: LoraPair | None, x_SQD: jax.Array, columns_S2: Array) -> jax.Array:
    """Logits float32 [S, Q, V] of final hidden states, each row with its own columns of the stack's `pair`.

    The devices of `mesh` split V: whoever wants whole rows moves logits, and not the unembedding. params: of the base
    model. pair: None without a stack. x_SQD: in the weights' dtype. columns_S2 int32.
    """
    logits = unembed(params, x_SQD)
    if pair is not None:
        apply = stack_apply(columns_S2, int(pair.A.shape[-2]), one_device=mesh.size == 1)
        (update,) = apply(x_SQD, (pair,))
        logits = logits + update.astype(jnp.float32)
    logits = capped(params, logits)
    return jax.lax.with_sharding_constraint(logits, sharding(mesh, logits.shape, None, None, WEIGHTS))


def pin_cache(cfg: ModelConfig, mesh: Mesh, cache: KVCache) -> KVCache:
    """The cache with its sharding pinned: a step's result must be what the next step was compiled for."""
    return by_mixer(cfg, mesh, cache, jax.lax.with_sharding_constraint)

"""Decoding: every slot of the batch gets several more tokens, in one dispatch.

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

from tinkerflow.backend.compute.mesh import Array, by_rows, replicated
from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.lora import Lora
from tinkerflow.backend.compute.models.transformer import Params
from tinkerflow.backend.compute.platforms import platform
from tinkerflow.backend.compute.sampler.adjustments import AdjustedRows, adjusted, generated
from tinkerflow.backend.compute.sampler.forward import StepInputs, pin_cache, run_layers, unembedded
from tinkerflow.backend.compute.sampler.kv_cache import KVCache
from tinkerflow.backend.compute.sampler.sampling import (
    Choice,
    SupportRows,
    greedy_choice,
    sample,
    sample_with_supports,
)
from tinkerflow.backend.compute.sampler.states import States, gather_states, scatter_states
from tinkerflow.backend.spec.supports import MOST_SUPPORTED


@flax.struct.dataclass
class Rows:
    """The start of a chunk: an entry for each slot. An unused slot has zeros, and its tokens are never read.

    tokens_S int32: the last token, if the host has read it; the cache does not contain it. positions_S int32: its
    position in the sequence. tables_SW int32: the pages, as numbers in the slot's own shard of the cache. columns_S2
    int32: the adapter's columns of the stack. uniform_CS float32: a random number for each token of the chunk.
    adjusted: the adjustments of logits; None: no slot has any. states_S int32: the state, a number like those of pages;
    None in models without states. before_M int32: the last token of each slot of an earlier chunk, on the devices.
    from_S int32: the place of the row's last token in `before_M`; -1: the token is in `tokens_S`. Both are None if the
    host always reads tokens first. shift_S int32: the rotary position of a token minus its index, increased by earlier
    images; None in models without images.
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
    """tokens_CS int32 and their logprobs_CS float32; top_CSk int32 and top_logprobs_CSk float32, None if not listed.

    last_M int32: the last token of each slot, for `before_M` of the next chunk; None in a chunk without `before_M`.
    routes_CSLk int16: the experts of the token before each token. supports: each token's support, [C, S, s] and [C, S].
    Both are None unless requested.
    """

    tokens_CS: Array
    logprobs_CS: Array
    top_CSk: Array | None = None
    top_logprobs_CSk: Array | None = None
    last_M: Array | None = None
    routes_CSLk: Array | None = None
    supports: SupportRows | None = None


def empty_rows(slots: int, pages: int, chunk: int, *, states: bool) -> Rows:
    """Host arrays for a chunk of unused slots. All sequences start at position 0, without images.

    pages: the length of a row's table. chunk: C. states: whether the model has states.
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


def decided(rows: Rows, chunk: int) -> Rows:
    """Choose the branch of the rows' program on the host. chunk: the most tokens of a dispatch.

    Adjusted logits and dispatches of fewer tokens are rare. Their programs always filter, so there are few programs.
    """
    rare = rows.adjusted is not None or len(rows.uniform_CS) < chunk
    return replace(rows, choice=replace(rows.choice, filters=rare or bool(rows.choice.any_filter)))


def recording(*, routes: bool, supports: bool) -> dict[str, bool]:
    """The last arguments of `decode`, without those that are off, because JAX compiles given defaults separately."""
    return {name: True for name, on in (("routes", routes), ("supports", supports)) if on}


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3), static_argnames=("routes", "supports"), donate_argnums=6)
def decode(
    cfg: ModelConfig,
    mesh: Mesh,
    chunk: int,
    top: int,
    params: Params,
    lora: Lora,
    cache: KVCache,
    rows: Rows,
    steps: jax.Array | None,
    routes: bool = False,
    supports: bool = False,
) -> tuple[KVCache, Decoded]:
    """Decode more tokens for every slot: the cache, updated in place, and the tokens [C, S], replicated.

    cfg, mesh: the base model's shape, and the devices. chunk: C, the most tokens of a slot. top: how many of the most
    likely tokens to list at each position; 0: none.
    params: the base model. lora: the stack of adapters. cache: the pages. If `params` is by layer, the stack and the
    cache must also be by layer. rows: the start of each of the S slots. steps: int32 scalar, tokens to decode, at most
    C; the remaining tokens are 0. None: C tokens. On CPUs, each unneeded token costs a step. On GPUs, the host would
    wait for the whole chunk if only the device had the number of iterations. routes, supports: whether to return the
    experts and the supports of tokens.
    """

    def step(i: jax.Array, state: tuple[KVCache, States, jax.Array, AdjustedRows | None, Decoded]) -> Any:
        cache, states, last_S, adjust, decoded = state
        start_S, shift_S = i + rows.positions_S, rows.shift_S
        inputs = StepInputs(last_S[:, None], start_S, rows.tables_SW, rows.columns_S2, shift_S=shift_S)
        cache, states, x_S1D, experts_S1Lk = run_layers(cfg, mesh, params, lora, cache, states, inputs, routes)
        logits_SV = unembedded(mesh, params, lora.unembed, x_S1D, rows.columns_S2)[:, 0]
        # With whole rows on each device, drawing a token needs no collectives.
        logits_SV = by_rows(mesh, logits_SV)
        wanted_SV = logits_SV if adjust is None else adjusted(logits_SV, adjust)
        drawn, own = (logits_SV, rows.choice, rows.uniform_CS[i], wanted_SV), None
        if supports:
            next_S, logprob_S, own = sample_with_supports(*drawn)
        else:
            next_S, logprob_S = sample(*drawn)
        adjust = None if adjust is None else generated(adjust, next_S)
        token = Decoded(next_S, logprob_S)
        if top:
            values_Sk, top_Sk = jax.lax.top_k(logits_SV, top)
            chosen_S = jnp.take_along_axis(logits_SV, next_S[:, None], axis=-1)[:, 0]
            spread_S = chosen_S - logprob_S  # a listed token has exactly the logprob of a sampled token
            token = Decoded(next_S, logprob_S, top_Sk.astype(jnp.int32), values_Sk - spread_S[:, None])
        if experts_S1Lk is not None:
            token = replace(token, routes_CSLk=experts_S1Lk[:, 0])
        token = replace(token, supports=own)
        decoded = jax.tree.map(lambda chunk, new: jax.lax.dynamic_update_index_in_dim(chunk, new, i, 0), decoded, token)
        return cache, states, next_S, adjust, decoded

    S = rows.tokens_S.shape[0]
    no_supports = None
    if supports:
        ids_CSs = jnp.zeros((chunk, S, MOST_SUPPORTED), jnp.int32)
        no_supports = SupportRows(ids_CSs, jnp.zeros((chunk, S), jnp.float32))
    nothing = Decoded(
        jnp.zeros((chunk, S), jnp.int32),
        jnp.zeros((chunk, S), jnp.float32),
        jnp.zeros((chunk, S, top), jnp.int32) if top else None,
        jnp.zeros((chunk, S, top), jnp.float32) if top else None,
        routes_CSLk=jnp.zeros((chunk, S, cfg.layers, cfg.experts_per_token), jnp.int16) if routes else None,
        supports=no_supports,
    )
    pool, cache = cache.states, replace(cache, states=None)
    fresh_S = jnp.asarray(rows.positions_S == 0)
    states = gather_states(cfg, mesh, pool, rows.states_S, fresh_S, by_layer=params.unstacked, pooled=_pooled())
    tokens_S = rows.tokens_S
    if rows.before_M is not None and rows.from_S is not None:
        tokens_S = jnp.where(rows.from_S < 0, tokens_S, jnp.asarray(rows.before_M)[rows.from_S])
    begin = (cache, states, tokens_S, rows.adjusted, nothing)
    cache, states, last_S, _, decoded = jax.lax.fori_loop(0, chunk if steps is None else steps, step, begin)
    if rows.before_M is not None:
        decoded = decoded.replace(last_M=jnp.zeros_like(rows.before_M).at[:S].set(last_S))
    cache = replace(pin_cache(cfg, mesh, cache), states=scatter_states(cfg, mesh, pool, states, rows.states_S))
    return cache, jax.lax.with_sharding_constraint(decoded, replicated(mesh))


def _pooled() -> bool:
    """Whether linear-attention matrices stay in their pool, where kernels update them for a token."""
    return platform().kernels is not None

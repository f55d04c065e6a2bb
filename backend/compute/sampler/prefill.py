"""Prefill: computes a piece of several prompts, and writes it into their pages, in one dispatch.

A prompt that several samples share is computed once, and their page tables contain its pages.

Letters: B rows, Q tokens of a piece, c positions scored together, D hidden, V vocabulary, K given tokens,
A alternatives, S rows of a draw.
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

from tinkerflow.backend.compute.mesh import Array, Scalar, by_rows, replicated
from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.long_rows import join_chunks, split_chunks
from tinkerflow.backend.compute.models.lora import Lora
from tinkerflow.backend.compute.models.transformer import ImageFeatures, Params
from tinkerflow.backend.compute.platforms import on_cpu, platform
from tinkerflow.backend.compute.sampler.forward import StepInputs, pin_cache, run_layers, unembedded
from tinkerflow.backend.compute.sampler.kv_cache import KVCache
from tinkerflow.backend.compute.sampler.prompt_scores import PLAIN, PieceQueries, PieceScores, Widths, empty_queries
from tinkerflow.backend.compute.sampler.sampling import Choice, sample
from tinkerflow.backend.compute.sampler.states import gather_states, scatter_states
from tinkerflow.backend.compute.training.logprobs import MOST_LOGITS, chunk_size

_OF_TRAINING = 4  # on CPUs, a quarter of training's logits exist at a time, because caches are small
_ROWS = 256  # on other devices, positions whose logits exist at a time, because the KV cache takes the memory


@flax.struct.dataclass
class Piece:
    """Tokens [start, start + Q) of every row's prompt, with zeros after its end.

    tokens_BQ int32; start int32 scalar; tables_BW int32: the rows' pages; columns_B2 int32: the rows' adapters. score:
    bool scalar, whether any score of these tokens is wanted. queries: the tokens to score. Both are None for `fill`.
    states_B int32: the rows' states. valid_B int32: how many of the tokens belong to the row. Both are None in models
    without states. images: the images among these tokens, and the rotary positions of all tokens after the first image;
    None if no image begins before the end of the piece.
    """

    tokens_BQ: Array
    start: Scalar
    tables_BW: Array
    columns_B2: Array
    score: Scalar | None
    queries: PieceQueries | None
    states_B: Array | None = None
    valid_B: Array | None = None
    images: ImageFeatures | None = None


def empty_piece(widths: Widths, rows: int, tokens: int, pages: int, *, states: bool) -> Piece:
    """Host arrays for a first piece of `rows` rows with `tokens` tokens each, without prompts and images.

    widths: the program's widths. pages: the length of a row's table. states: whether the model has states.
    """
    return Piece(
        tokens_BQ=np.zeros((rows, tokens), np.int32),
        start=np.int32(0),
        tables_BW=np.zeros((rows, pages), np.int32),
        columns_B2=np.zeros((rows, 2), np.int32),
        score=np.bool_(False),
        queries=empty_queries(widths, rows, tokens),
        states_B=np.zeros(rows, np.int32) if states else None,
        valid_B=np.zeros(rows, np.int32) if states else None,
    )


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=5)
def prefill(
    cfg: ModelConfig, mesh: Mesh, widths: Widths, params: Params, lora: Lora, cache: KVCache, piece: Piece
) -> tuple[KVCache, PieceScores]:
    """Prefill a piece. Returns the cache, updated in place, and the scores, replicated (zeros unless `score`).

    cfg, mesh: the base model's shape, and the devices. widths: how many scores of each kind the program computes.
    params: the base model. lora: the stack of adapters. cache: the pages. If `params` is by layer, the stack and the
    cache must also be by layer. piece: the tokens of B rows. Beyond its prompt's end, a row writes keys that no query
    attends to.
    """
    queries = piece.queries
    assert queries is not None
    cache, x_BQD = _through_layers(cfg, mesh, params, lora, cache, piece)

    def scored() -> PieceScores:
        return score_piece(mesh, widths, params, lora, x_BQD, piece.columns_B2, queries)

    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(scored))
    scores = jax.lax.cond(piece.score, scored, lambda: nothing)
    return cache, jax.lax.with_sharding_constraint(scores, replicated(mesh))


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=4)
def fill(
    cfg: ModelConfig, mesh: Mesh, params: Params, lora: Lora, cache: KVCache, piece: Piece
) -> tuple[KVCache, jax.Array]:
    """Like `prefill`, but without scores, if the host decides. Returns the cache, and final hidden states [B, Q, D] for
    `score`.

    cfg, mesh, params, lora, cache, piece: see `prefill`.
    """
    cache, x_BQD = _through_layers(cfg, mesh, params, lora, cache, piece)
    return cache, by_rows(mesh, x_BQD)


def _scored(mesh: Mesh, widths: Widths, *rest: Any) -> PieceScores:
    """`score_piece`, replicated. mesh, widths, rest: its arguments."""
    return jax.lax.with_sharding_constraint(score_piece(mesh, widths, *rest), replicated(mesh))


score = jax.jit(_scored, static_argnums=(0, 1))  # after `fill`, if scores are wanted


def _through_layers(
    cfg: ModelConfig, mesh: Mesh, params: Params, lora: Lora, cache: KVCache, piece: Piece
) -> tuple[KVCache, jax.Array]:
    """The cache with the piece's keys and values, and the final hidden states."""
    start_B = jnp.full(piece.tokens_BQ.shape[0], piece.start, jnp.int32)
    pool, cache = cache.states, replace(cache, states=None)
    states = gather_states(cfg, mesh, pool, piece.states_B, start_B == 0, by_layer=params.unstacked)
    inputs = StepInputs(
        piece.tokens_BQ, start_B, piece.tables_BW, piece.columns_B2, valid_S=piece.valid_B, images=piece.images
    )
    cache, states, x_BQD, _ = run_layers(cfg, mesh, params, lora, cache, states, inputs)
    return replace(pin_cache(cfg, mesh, cache), states=scatter_states(cfg, mesh, pool, states, piece.states_B)), x_BQD


def score_piece(
    mesh: Mesh,
    widths: Widths,
    params: Params,
    lora: Lora,
    x_BQD: jax.Array,
    columns_B2: Array,
    queries: PieceQueries,
) -> PieceScores:
    """The scores at every position of a piece, a few positions at a time, so that all logits never exist together.

    Q is a power of two. mesh: splits the rows. widths: how many scores of each kind the program computes. params,
    lora: the unembedding and the stack's pair for it. x_BQD: final hidden states. columns_B2 int32: each row's columns
    of the stack. queries: as wide as `widths`.
    """

    def chunk(part: tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]) -> PieceScores:
        x_BcD, next_Bc, targets_BcK, uniform_BcA = part
        logits = unembedded(mesh, params, lora.unembed, x_BcD, columns_B2)
        if widths != PLAIN:  # with whole rows on each device, top-k and draws need no collectives
            logits = by_rows(mesh, logits)
        total_Bc1 = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        scores = PieceScores((_pick(logits, next_Bc[..., None]) - total_Bc1)[..., 0])
        if widths.top:
            values, tokens = jax.lax.top_k(logits, widths.top)
            scores = replace(scores, top=(tokens.astype(jnp.int32), values - total_Bc1))
        if targets_BcK is not None:
            scores = replace(scores, targets_BQK=_pick(logits, targets_BcK) - total_Bc1)
        if uniform_BcA is not None and queries.temperature_B is not None:
            tokens = _drawn(logits, uniform_BcA, queries.temperature_B)
            scores = replace(scores, alternatives=(tokens, _pick(logits, tokens) - total_Bc1))
        return scores

    asked = (x_BQD, queries.next_BQ, queries.targets_BQK, queries.uniform_BQA)
    rows, tokens, _ = x_BQD.shape
    most = MOST_LOGITS // _OF_TRAINING if on_cpu() else _ROWS * params.embed_VD.shape[0]
    parts = split_chunks(asked, chunk_size(rows, tokens, params, most))
    whole: PieceScores = jax.tree.map(join_chunks, jax.lax.map(chunk, parts))
    return whole


def _pick(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    return jnp.take_along_axis(logits, tokens, axis=-1)


def _drawn(logits_BcV: jax.Array, uniform_BcA: jax.Array, temperature_B: Array) -> jax.Array:
    """Tokens int32 [B, c, A], each drawn from the whole distribution at the row's temperature."""
    B, c, V = logits_BcV.shape
    rows = logits_BcV.reshape(B * c, V)
    choice = Choice(
        temperature_S=jnp.repeat(temperature_B, c),
        top_k_S=jnp.full(B * c, -1, jnp.int32),
        top_p_S=jnp.ones(B * c, jnp.float32),
        min_p_S=jnp.zeros(B * c, jnp.float32),
        filters=False if platform().host_decides else None,
    )
    uniform_AS = jnp.moveaxis(uniform_BcA, 2, 0).reshape(-1, B * c)
    tokens_AS = jax.lax.map(lambda uniform_S: sample(rows, choice, uniform_S)[0], uniform_AS)
    return jnp.moveaxis(tokens_AS.reshape(-1, B, c), 0, 2)

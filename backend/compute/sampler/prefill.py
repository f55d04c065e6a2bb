"""Prefill: a piece of several prompts goes through the model and into their pages, in one dispatch.

A prompt that several samples share is computed once: their page tables name its pages.

Letters: B rows, Q tokens of a piece, D hidden.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tinkerflow.backend.compute.mesh import Array, Scalar, replicated
from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.lora import Lora
from tinkerflow.backend.compute.models.transformer import ImageFeatures, Params
from tinkerflow.backend.compute.sampler.decode import layers, pin_cache
from tinkerflow.backend.compute.sampler.kv_cache import KVCache
from tinkerflow.backend.compute.sampler.prompt_scores import PieceQueries, PieceScores, Widths, empty_queries, score
from tinkerflow.backend.compute.sampler.states import put, take


@flax.struct.dataclass
class Piece:
    """Tokens [start, start + Q) of every row's prompt, zeros after its end.

    tokens_BQ int32; start int32 scalar; tables_BW int32: the rows' pages; columns_B2 int32: the rows' adapters.
    score: bool scalar, whether anything is wanted of what follows each token; `wanted` says what. states_B int32: the
    rows' states. valid_B int32: how many of the tokens are the row's. Both
    None in models without states. images: images among these tokens, and where all tokens turn when images came before
    them; None in a piece up to whose end there is no image.
    """

    tokens_BQ: Array
    start: Scalar
    tables_BW: Array
    columns_B2: Array
    score: Scalar
    wanted: PieceQueries
    states_B: Array | None = None
    valid_B: Array | None = None
    images: ImageFeatures | None = None


def empty_piece(widths: Widths, rows: int, tokens: int, pages: int, *, states: bool) -> Piece:
    """Host arrays for a first piece of so many rows and tokens of each, without prompts and images.

    widths: of the program. pages: of a row's table. states: whether the model has any.
    """
    return Piece(
        tokens_BQ=np.zeros((rows, tokens), np.int32),
        start=np.int32(0),
        tables_BW=np.zeros((rows, pages), np.int32),
        columns_B2=np.zeros((rows, 2), np.int32),
        score=np.bool_(False),
        wanted=empty_queries(widths, rows, tokens),
        states_B=np.zeros(rows, np.int32) if states else None,
        valid_B=np.zeros(rows, np.int32) if states else None,
    )


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=5)
def prefill(
    cfg: ModelConfig, mesh: Mesh, widths: Widths, params: Params, lora: Lora, cache: KVCache, piece: Piece
) -> tuple[KVCache, PieceScores]:
    """The cache, updated in place, with the piece's keys and values, and its scores, replicated (zeros unless `score`).

    cfg, mesh: the base model's shape, and the devices. widths: how many scores of each kind the program computes.
    params: the base model. lora: the stack of adapters. cache: the pages. If `params` is by layer, the stack and the
    cache must be too. piece: the tokens of B rows; a row past its prompt's end writes keys that no query attends to.
    """
    start_B = jnp.full(piece.tokens_BQ.shape[0], piece.start, jnp.int32)
    pool, cache = cache.states, replace(cache, states=None)
    states = take(cfg, mesh, pool, piece.states_B, start_B == 0, by_layer=params.unstacked)
    cache, states, x_BQD = layers(
        cfg,
        mesh,
        params,
        lora,
        cache,
        states,
        piece.tokens_BQ,
        start_B,
        tables_SW=piece.tables_BW,
        columns_S2=piece.columns_B2,
        valid_S=piece.valid_B,
        images=piece.images,
    )
    cache = replace(pin_cache(cfg, mesh, cache), states=put(cfg, mesh, pool, states, piece.states_B))

    def scored() -> PieceScores:
        return score(mesh, widths, params, lora, x_BQD, piece.columns_B2, piece.wanted)

    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(scored))
    found = jax.lax.cond(piece.score, scored, lambda: nothing)
    return cache, jax.lax.with_sharding_constraint(found, replicated(mesh))

"""Prefill: a piece of several prompts goes through the model and into a cache of its own, in one dispatch.

Prompts are computed away from the decode batch, in a small cache of their own shape (`staged`), and copied to as many
slots as want them. So its compiled shapes have nothing to do with those of the batch, and prompts shared by several
samples are computed once.

Letters: B rows, Q tokens of a piece, D hidden, V vocabulary, c tokens scored at once.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from backend.compute.config import ModelConfig
from backend.compute.lora import Lora
from backend.compute.mesh import replicated
from backend.compute.sampler.cache import Cache
from backend.compute.sampler.decode import layers, pin_cache, unembedded
from backend.compute.transformer import Params

_LOGITS = 2**22  # logits that exist at once: 16 MiB in float32


@flax.struct.dataclass
class Piece:
    """Tokens [start, start + Q) of every row's prompt, zeros after its end.

    tokens_BQ and targets_BQ (the tokens after them) int32; start int32 scalar; columns_B2 int32: the rows' adapters.
    score: bool scalar, whether the logprobs of the targets are wanted.
    """

    tokens_BQ: Any
    targets_BQ: Any
    start: Any
    columns_B2: Any
    score: Any


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=4)
def prefill(
    cfg: ModelConfig, mesh: Mesh, params: Params, lora: Lora, staged: Cache, piece: Piece
) -> tuple[Cache, jax.Array]:
    """The cache with the piece's keys and values in it, and logprobs_BQ float32 of the targets (zeros unless scored).

    The cache is updated in place; logprobs are replicated. Rows past their prompt's end write what nothing attends to.
    """
    B, Q = piece.tokens_BQ.shape
    start_B = jnp.full((B,), piece.start, jnp.int32)
    staged, x_BQD = layers(cfg, mesh, params, lora, staged, piece.tokens_BQ, start_B, columns_S2=piece.columns_B2)

    def scored() -> jax.Array:
        return _logprobs(params, lora, x_BQD, piece)

    logprobs_BQ = jax.lax.cond(piece.score, scored, lambda: jnp.zeros((B, Q), jnp.float32))
    return pin_cache(cfg, mesh, staged), jax.lax.with_sharding_constraint(logprobs_BQ, replicated(mesh))


def _logprobs(params: Params, lora: Lora, x_BQD: jax.Array, piece: Piece) -> jax.Array:
    B, Q, D = x_BQD.shape
    size = Q
    while size > 1 and size * B * params.embed_VD.shape[0] > _LOGITS:
        size //= 2

    def chunk(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        x_BcD, targets_Bc = part
        logits_BcV = unembedded(params, lora.unembed, x_BcD, piece.columns_B2)
        picked = jnp.take_along_axis(logits_BcV, targets_Bc[..., None], axis=-1)[..., 0]
        return picked - jax.nn.logsumexp(logits_BcV, axis=-1)

    x = jnp.moveaxis(x_BQD.reshape(B, Q // size, size, D), 1, 0)
    targets = jnp.moveaxis(piece.targets_BQ.reshape(B, Q // size, size), 1, 0)
    return jnp.moveaxis(jax.lax.map(chunk, (x, targets)), 0, 1).reshape(B, Q)

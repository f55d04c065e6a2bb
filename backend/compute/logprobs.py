"""From hidden states to logprobs and loss, in chunks of tokens: [tokens, V] never exists whole.

A token's loss depends on no logprob but its own, so each chunk finishes its loss and its gradients while its logits are
at hand: nothing of size V is kept for a backward pass, and the matmul with the unembedding is not done again for one.

Letters: B rows, T tokens, c tokens of a chunk, D hidden, K targets, V vocabulary.
"""

from __future__ import annotations

from typing import Any, TypeVar

import flax.struct
import jax
import jax.numpy as jnp

from tinkerflow.backend.compute.lora import LoraPair, apply_one
from tinkerflow.backend.compute.losses import LossChoice, TokenInputs, token_losses
from tinkerflow.backend.compute.transformer import Params, unembed, unembed_pullback

Tree = TypeVar("Tree")

MOST_LOGITS = 2**24  # of one chunk: 64 MiB in float32


@flax.struct.dataclass
class Scored:
    """loss: float32 scalar, the sum over all tokens; logprobs_BTK: float32, of the full softmax."""

    loss: jax.Array
    logprobs_BTK: jax.Array


def score(
    params: Params,
    pair: LoraPair | None,
    hidden_BTD: jax.Array,
    targets_BTK: jax.Array,
    choice: LossChoice,
    inputs: TokenInputs,
    *,
    most_logits: int = MOST_LOGITS,
) -> Scored:
    """Logprobs of the targets and the loss, without gradients.

    pair: the adapter of the unembedding, or None. hidden_BTD: final hidden states; T is a power of two. targets_BTK
    int32. choice: the loss, of `inputs` by name, each [B, T, K]. most_logits: how many exist at a time.
    """

    def chunk(loss: jax.Array, part: tuple[jax.Array, jax.Array, TokenInputs]) -> tuple[jax.Array, jax.Array]:
        x_BcD, targets_BcK, here = part
        logits_BcV = _logits(params, x_BcD, _update(x_BcD, pair))
        logprobs_BcK = _pick(logits_BcV, targets_BcK) - _log_total(logits_BcV)
        return loss + jnp.sum(token_losses(choice, logprobs_BcK, here)), logprobs_BcK

    parts = split_chunks((hidden_BTD, targets_BTK, inputs), chunk_size(hidden_BTD, params, most_logits))
    loss, logprobs = jax.lax.scan(chunk, jnp.float32(0), parts)
    return Scored(loss=loss, logprobs_BTK=join_chunks(logprobs))


def score_and_grads(
    params: Params,
    pair: LoraPair | None,
    hidden_BTD: jax.Array,
    targets_BTK: jax.Array,
    choice: LossChoice,
    inputs: TokenInputs,
    *,
    most_logits: int = MOST_LOGITS,
) -> tuple[Scored, jax.Array, LoraPair | None]:
    """As `score`, with the gradients of the loss by hidden_BTD (in its dtype) and by `pair` (None when that is)."""

    def chunk(carry: tuple[jax.Array, Any], part: tuple[jax.Array, jax.Array, TokenInputs]) -> tuple[Any, Any]:
        loss, d_pair = carry
        x_BcD, targets_BcK, here = part
        update, pull = jax.vjp(_update, x_BcD, pair)
        logits_BcV = _logits(params, x_BcD, update)
        log_total = _log_total(logits_BcV)
        logprobs_BcK = _pick(logits_BcV, targets_BcK) - log_total
        value, slope_BcK = jax.value_and_grad(lambda lp: jnp.sum(token_losses(choice, lp, here)))(logprobs_BcK)
        # d logprob[t] / d logits = onehot(t) - softmax
        d_logits = jnp.exp(logits_BcV - log_total) * -jnp.sum(slope_BcK, axis=-1, keepdims=True)
        d_logits = _add_at(d_logits, targets_BcK, slope_BcK).astype(x_BcD.dtype)
        d_x, more = pull(None if update is None else d_logits)
        d_x += unembed_pullback(params, d_logits)
        return (loss + value, jax.tree.map(jnp.add, d_pair, more)), (logprobs_BcK, d_x)

    parts = split_chunks((hidden_BTD, targets_BTK, inputs), chunk_size(hidden_BTD, params, most_logits))
    zeros = jax.tree.map(jnp.zeros_like, pair)
    (loss, d_pair), (logprobs, d_hidden) = jax.lax.scan(chunk, (jnp.float32(0), zeros), parts)
    return Scored(loss=loss, logprobs_BTK=join_chunks(logprobs)), join_chunks(d_hidden), d_pair


def _update(x: jax.Array, pair: LoraPair | None) -> jax.Array | None:
    return None if pair is None else apply_one(x, (pair,))[0]


def _logits(params: Params, x: jax.Array, update: jax.Array | None) -> jax.Array:
    logits = unembed(params, x)
    logits = logits if update is None else logits + update.astype(jnp.float32)
    # Least the largest: a logprob near 0 would otherwise have the rounding error of logits that may be near 100.
    return logits - jnp.max(logits, axis=-1, keepdims=True)


def _log_total(logits_BcV: jax.Array) -> jax.Array:
    return jnp.log(jnp.sum(jnp.exp(logits_BcV), axis=-1, keepdims=True))


def _pick(logits_BcV: jax.Array, targets_BcK: jax.Array) -> jax.Array:
    return jnp.take_along_axis(logits_BcV, targets_BcK, axis=-1)


def _add_at(d_logits_BcV: jax.Array, targets_BcK: jax.Array, slope_BcK: jax.Array) -> jax.Array:
    """d_logits[b, c, targets[b, c, k]] += slope[b, c, k]; a target named twice counts twice."""
    B, c, _ = targets_BcK.shape
    rows, columns = jnp.arange(B)[:, None, None], jnp.arange(c)[None, :, None]
    return d_logits_BcV.at[rows, columns, targets_BcK].add(slope_BcK)


def chunk_size(hidden_BTD: jax.Array, params: Params, most_logits: int) -> int:
    """How many tokens of each row go through the unembedding at a time; T is a power of two."""
    B, size, _ = hidden_BTD.shape
    while size > 1 and size * B * params.embed_VD.shape[0] > most_logits:
        size //= 2
    return size


def split_chunks(tree: Tree, size: int) -> Tree:
    """Every leaf [B, T, ...] -> [T / size, B, size, ...]: along T, because the mesh has split B already."""
    return jax.tree.map(lambda x: jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0), tree)


def join_chunks(x: jax.Array) -> jax.Array:
    """The inverse of `split_chunks`, of one array."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])

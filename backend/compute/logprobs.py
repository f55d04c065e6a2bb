"""From hidden states to logprobs and loss, in chunks of tokens: [tokens, V] never exists whole.

A token's loss depends on no logprob but its own, so each chunk finishes its loss and its gradients while its logits are
at hand: nothing of size V is kept for a backward pass, and the matmul with the unembedding is not done again for one.

Every chunk reads the whole unembedding. Off CPUs that is what a chunk costs, so a chunk has as many rows as memory
allows of each device, an adapter of the unembedding is columns of the same matmul, and what devices sum over their rows
is summed once, after the last chunk. On CPUs a chunk's logits stay in the caches.

Letters: B rows, T tokens, c tokens of a chunk, D hidden, K targets, V vocabulary, R rank, W = D + R.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import flax.struct
import jax
import jax.numpy as jnp

from tinkerflow.backend.compute.lora import LoraPair, apply_one, low_rank
from tinkerflow.backend.compute.losses import LossChoice, TokenInputs, losses_and_slopes, token_losses
from tinkerflow.backend.compute.platforms import on_cpu, platform
from tinkerflow.backend.compute.transformer import Params, capped, capped_pullback, unembed, unembed_pullback

Tree = TypeVar("Tree")

MOST_LOGITS = 2**24  # of one chunk on CPUs: 64 MiB in float32


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
    devices: int = 1,
    most_logits: int | None = None,
) -> Scored:
    """Logprobs of the targets and the loss, without gradients.

    params: the base model. pair: the adapter of the unembedding, or None. hidden_BTD: final hidden states; T is a power
    of two. targets_BTK int32. choice: the loss, of `inputs` by name, each [B, T, K]. devices: how many B is split over;
    it divides B. most_logits: how many exist at a time (off CPUs: on each device); None = `most_at_once`.
    """

    def chunk(loss: jax.Array, part: tuple[jax.Array, jax.Array, TokenInputs]) -> tuple[jax.Array, jax.Array]:
        x_BcD, targets_BcK, here = part
        logits_BcV = _from_largest(_logits(params, x_BcD, _update(x_BcD, pair)))
        logprobs_BcK = _pick(logits_BcV, targets_BcK) - _log_total(logits_BcV)
        return loss + jnp.sum(token_losses(choice, logprobs_BcK, here)), logprobs_BcK

    whole = (hidden_BTD, targets_BTK, inputs)
    if not on_cpu():
        wide_BTW = _widened(pair, hidden_BTD)
        params = _with_adapter(params, pair)
        pair, whole = None, by_device((wide_BTW, targets_BTK, inputs), devices)
    most = most_logits or most_at_once(params)
    parts = split_chunks(whole, chunk_size(hidden_BTD.shape[0] if on_cpu() else 1, whole[0].shape[1], params, most))
    loss, logprobs = jax.lax.scan(chunk, jnp.float32(0), parts)
    return Scored(loss=loss, logprobs_BTK=join_chunks(logprobs).reshape(targets_BTK.shape))


def score_and_grads(
    params: Params,
    pair: LoraPair | None,
    hidden_BTD: jax.Array,
    targets_BTK: jax.Array,
    choice: LossChoice,
    inputs: TokenInputs,
    *,
    devices: int = 1,
    most_logits: int | None = None,
    by_head: bool = False,
) -> tuple[Scored, jax.Array, Any]:
    """As `score`, with the gradients of the loss by hidden_BTD (in its dtype) and by `pair` (None when that is).

    params, pair, hidden_BTD, targets_BTK, choice, inputs, devices, most_logits: as of `score`. by_head: the last
    gradient is that by the unembedding, float32 [V, D]; there must be no pair then.
    """
    assert not (by_head and pair is not None)
    most = most_logits or most_at_once(params)
    if not on_cpu():
        return _score_and_grads_by_device(params, pair, hidden_BTD, targets_BTK, choice, inputs, devices, most, by_head)

    def chunk(carry: tuple[jax.Array, Any, Any], part: tuple[jax.Array, jax.Array, TokenInputs]) -> tuple[Any, Any]:
        loss, d_pair, d_head = carry
        x_BcD, targets_BcK, here = part
        update, pull = jax.vjp(_update, x_BcD, pair)
        whole_BcV = _logits(params, x_BcD, update)
        logits_BcV = _from_largest(whole_BcV)
        log_total = _log_total(logits_BcV)
        logprobs_BcK = _pick(logits_BcV, targets_BcK) - log_total
        value, slope_BcK = jax.value_and_grad(lambda lp: jnp.sum(token_losses(choice, lp, here)))(logprobs_BcK)
        d_logits = _d_logits(logits_BcV, log_total, targets_BcK, slope_BcK)
        d_logits = capped_pullback(params, whole_BcV, d_logits).astype(x_BcD.dtype)
        d_x, more = pull(None if update is None else d_logits)
        d_x += unembed_pullback(params, d_logits)
        if by_head:
            d_head += jnp.einsum("bcv,bcd->vd", d_logits, x_BcD, preferred_element_type=jnp.float32)
        return (loss + value, jax.tree.map(jnp.add, d_pair, more), d_head), (logprobs_BcK, d_x)

    parts = split_chunks(
        (hidden_BTD, targets_BTK, inputs), chunk_size(hidden_BTD.shape[0], hidden_BTD.shape[1], params, most)
    )
    zeros = jax.tree.map(jnp.zeros_like, pair), jnp.zeros(params.head.shape) if by_head else None
    (loss, d_pair, d_head), (logprobs, d_hidden) = jax.lax.scan(chunk, (jnp.float32(0), *zeros), parts)
    scored = Scored(loss=loss, logprobs_BTK=join_chunks(logprobs))
    return scored, join_chunks(d_hidden), d_head if by_head else d_pair


def _score_and_grads_by_device(
    params: Params,
    pair: LoraPair | None,
    hidden_BTD: jax.Array,
    targets_BTK: jax.Array,
    choice: LossChoice,
    inputs: TokenInputs,
    devices: int,
    most: int,
    by_head: bool,
) -> tuple[Scored, jax.Array, Any]:
    """`score_and_grads` off CPUs, its arguments in that order. In the chunks B is the devices, T the rows of each."""
    D, V = hidden_BTD.shape[-1], params.head.shape[0]
    wide_BTW, pull = jax.vjp(_widened, pair, hidden_BTD)
    joined = _with_adapter(params, pair)

    def chunk(
        carry: tuple[jax.Array, jax.Array, Any], part: tuple[jax.Array, jax.Array, TokenInputs]
    ) -> tuple[Any, Any]:
        loss_B, d_B_BRV, d_head_BVD = carry
        x_BcW, targets_BcK, here = part
        whole_BcV = _logits(joined, x_BcW, None)
        logits_BcV = _from_largest(whole_BcV)
        log_total = _log_total(logits_BcV)
        logprobs_BcK = _pick(logits_BcV, targets_BcK) - log_total
        losses_BcK, slope_BcK = losses_and_slopes(choice, logprobs_BcK, here)
        d_logits = _d_logits(logits_BcV, log_total, targets_BcK, slope_BcK)
        d_logits = capped_pullback(params, whole_BcV, d_logits).astype(x_BcW.dtype)
        if pair is not None:
            low_BcR = x_BcW[..., D:]
            d_B_BRV += jnp.einsum("bcr,bcv->brv", low_BcR, d_logits, preferred_element_type=jnp.float32)
        if by_head:
            d_head_BVD += jnp.einsum("bcv,bcd->bvd", d_logits, x_BcW, preferred_element_type=jnp.float32)
        loss_B += jnp.sum(losses_BcK, axis=(1, 2))
        return (loss_B, d_B_BRV, d_head_BVD), (logprobs_BcK, unembed_pullback(joined, d_logits))

    whole = by_device((wide_BTW, targets_BTK, inputs), devices)
    d_heads = jnp.zeros((devices, V, D)) if by_head else None
    zeros = jnp.zeros(devices), jnp.zeros((devices, wide_BTW.shape[-1] - D, V)), d_heads
    parts = split_chunks(whole, chunk_size(1, whole[0].shape[1], params, most))
    (loss_B, d_B_BRV, d_head_BVD), (logprobs, d_wide) = jax.lax.scan(chunk, zeros, parts)
    d_pair, d_hidden_BTD = pull(join_chunks(d_wide).reshape(wide_BTW.shape))
    if d_pair is not None:
        d_pair = d_pair.replace(B=jnp.sum(d_B_BRV, axis=0))
    scored = Scored(jnp.sum(loss_B), join_chunks(logprobs).reshape(targets_BTK.shape))
    return scored, d_hidden_BTD, d_pair if d_head_BVD is None else jnp.sum(d_head_BVD, axis=0)


def _with_adapter(params: Params, pair: LoraPair | None) -> Params:
    """The unembedding with its adapter's B beside it, as one matrix [V, W] for what `_widened` gives."""
    if pair is None:
        return params
    head = params.head
    return replace(params, unembed_VD=jnp.concatenate([head, jnp.asarray(pair.B).T.astype(head.dtype)], axis=1))


def _widened(pair: LoraPair | None, x_BTD: jax.Array) -> jax.Array:
    """[B, T, W]: x, and beside it x @ A.T of the unembedding's adapter."""
    return x_BTD if pair is None else jnp.concatenate([x_BTD, low_rank(x_BTD, pair)], axis=-1)


def _update(x: jax.Array, pair: LoraPair | None) -> jax.Array | None:
    return None if pair is None else apply_one(x, (pair,))[0]


def _logits(params: Params, x: jax.Array, update: jax.Array | None) -> jax.Array:
    logits = unembed(params, x)
    return capped(params, logits if update is None else logits + update.astype(jnp.float32))


def _from_largest(logits_BcV: jax.Array) -> jax.Array:
    # A logprob near 0 would otherwise have the rounding error of logits that may be near 100.
    return logits_BcV - jnp.max(logits_BcV, axis=-1, keepdims=True)


def _log_total(logits_BcV: jax.Array) -> jax.Array:
    return jnp.log(jnp.sum(jnp.exp(logits_BcV), axis=-1, keepdims=True))


def _pick(logits_BcV: jax.Array, targets_BcK: jax.Array) -> jax.Array:
    if on_cpu() or targets_BcK.shape[-1] > 1:
        return jnp.take_along_axis(logits_BcV, targets_BcK, axis=-1)
    return jnp.sum(jnp.where(_named(logits_BcV, targets_BcK, 0), logits_BcV, 0), axis=-1, keepdims=True)


def _d_logits(logits_BcV: jax.Array, log_total: jax.Array, targets_BcK: jax.Array, slope_BcK: jax.Array) -> jax.Array:
    """The gradient by the logits: d logprob[t] / d logits = onehot(t) - softmax. A target named twice counts twice."""
    d_logits = jnp.exp(logits_BcV - log_total) * -jnp.sum(slope_BcK, axis=-1, keepdims=True)
    if on_cpu():
        B, c, _ = targets_BcK.shape
        rows, columns = jnp.arange(B)[:, None, None], jnp.arange(c)[None, :, None]
        return d_logits.at[rows, columns, targets_BcK].add(slope_BcK)
    # Not a scatter: that would be a pass of its own over the logits, and NVIDIA GPUs add its cells in no fixed order.
    for k in range(targets_BcK.shape[-1]):
        d_logits += jnp.where(_named(logits_BcV, targets_BcK, k), slope_BcK[..., k, None], 0)
    return d_logits


def _named(logits_BcV: jax.Array, targets_BcK: jax.Array, k: int) -> jax.Array:
    """Which of the logits is that of target k: bool [B, c, V]."""
    return jax.lax.broadcasted_iota(jnp.int32, logits_BcV.shape, 2) == targets_BcK[..., k, None]


def by_device(tree: Tree, devices: int) -> Tree:
    """Every leaf [B, T, ...] -> [devices, B * T / devices, ...]: the tokens of each device in one row."""
    return jax.tree.map(lambda x: x.reshape(devices, -1, *x.shape[2:]), tree)


def most_at_once(params: Params) -> int:
    """How many logits may exist at a time: of the batch on CPUs, of each device elsewhere."""
    rows = platform().scored_rows
    return MOST_LOGITS if rows is None else rows * params.embed_VD.shape[0]


def chunk_size(rows: int, tokens: int, params: Params, most_logits: int) -> int:
    """How many tokens of each row go through the unembedding at a time; `tokens` of a row, a power of two."""
    while tokens > 1 and tokens * rows * params.embed_VD.shape[0] > most_logits:
        tokens //= 2
    return tokens


def split_chunks(tree: Tree, size: int) -> Tree:
    """Every leaf [B, T, ...] -> [T / size, B, size, ...]: along T, because the mesh has split B already."""
    return jax.tree.map(lambda x: jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0), tree)


def join_chunks(x: jax.Array) -> jax.Array:
    """The inverse of `split_chunks`, of one array."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])

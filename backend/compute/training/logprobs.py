"""From hidden states to logprobs and loss, in chunks of tokens: an array [tokens, V] never exists.

A token's loss depends only on its own logprob, so each chunk computes its loss and its gradients while it has the
logits. No array of size V is kept for a backward pass, and the matmul with the unembedding is not repeated.

Every chunk reads the unembedding. On GPUs and TPUs this read dominates the cost of a chunk, so a chunk has as many rows
as memory allows, and kernels keep the logits on the chip. On CPUs a chunk's logits stay in the caches.

With supports (`spec.supports`), a token's loss depends on its log probability under the softmax over its support. The
chunk's logits include those of the support. Kernels do not return logits, so they are not used with supports.

Letters: B rows, T tokens, c tokens of a chunk, D hidden, K targets, V vocabulary, R rank, s tokens of a support. In
kernels: M rows, N parts of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from tinkerflow.backend.compute.kernels import softmax_gpu, softmax_tpu
from tinkerflow.backend.compute.kernels.softmax import Product, Slopes
from tinkerflow.backend.compute.mesh import ROWS, TENSOR
from tinkerflow.backend.compute.models.long_rows import join_chunks, split_chunks
from tinkerflow.backend.compute.models.lora import LoraPair, apply_one, low_rank
from tinkerflow.backend.compute.models.transformer import Params, capped, capped_pullback, unembed, unembed_pullback
from tinkerflow.backend.compute.platforms import SCORED_ROWS, on_cpu, platform
from tinkerflow.backend.compute.training.token_losses import LossChoice, TokenInputs, losses_and_slopes, token_losses

MOST_LOGITS = 2**24  # of one chunk on CPUs: 64 MiB in float32
MOST_LOGITS_OF_GPUS = 2**26  # without kernels


@flax.struct.dataclass
class Scored:
    """The loss and the logprobs of a batch.

    loss: float32 scalar, the sum over all tokens. logprobs_BTK: float32, of the full softmax. equal_BT2: the routers'
    agreement (`transformer.forward`); None without given experts. log_mass_BT: float32, the log of the probability of
    each token's support; None without supports.
    """

    loss: jax.Array
    logprobs_BTK: jax.Array
    equal_BT2: jax.Array | None = None
    log_mass_BT: jax.Array | None = None


class Restricted(NamedTuple):
    """The softmax over the supports of a chunk of tokens.

    ids_Bcs int32: the tokens of the supports, padded with 0. shares_Bcs: their probabilities, 0 in padding.
    log_mass_Bc1: the log of the support's probability under the full softmax; 0 for the whole vocabulary.
    given_Bc1 bool: whether the token has a support.
    """

    ids_Bcs: jax.Array
    shares_Bcs: jax.Array
    log_mass_Bc1: jax.Array
    given_Bc1: jax.Array


def score(
    params: Params,
    pair: LoraPair | None,
    hidden_BTD: jax.Array,
    targets_BTK: jax.Array,
    choice: LossChoice,
    inputs: TokenInputs,
    mesh: Mesh | None = None,
    *,
    supports_BTs: jax.Array | None = None,
    most_logits: int | None = None,
    interpret: bool = False,
) -> Scored:
    """Logprobs of the targets and the loss, without gradients.

    params: the base model. pair: the adapter of the unembedding, or None. hidden_BTD: final hidden states; T is a power
    of two. targets_BTK: int32. choice: the loss. inputs: the loss's inputs, each [B, T, K]. mesh: splits B evenly; CPUs
    need none. supports_BTs: int32, the tokens of each support, padded with -1; a row of -1 is the whole vocabulary.
    None = every support is the whole vocabulary. most_logits: the maximum number of logits computed at a time (in
    kernels: on each device); None = the platform's default. interpret: run the kernels of other platforms on a CPU, for
    tests.
    """
    if platform().kernels and supports_BTs is None:
        whole = (hidden_BTD, targets_BTK, inputs)
        return _by_device(params, pair, whole, choice, mesh, most_logits, interpret, keep=False)[0]

    def chunk(loss: jax.Array, part: tuple[Any, ...]) -> tuple[jax.Array, tuple[jax.Array, jax.Array | None]]:
        x_BcD, targets_BcK, here, supports_Bcs = part
        logits_BcV = _from_largest(_logits(params, x_BcD, _update(x_BcD, pair)))
        picked_BcK, log_total = _pick(logits_BcV, targets_BcK), _log_total(logits_BcV)
        logprobs_BcK = picked_BcK - log_total
        restricted = _restricted(logits_BcV, log_total, supports_Bcs)
        loss = loss + jnp.sum(token_losses(choice, _of_support(logprobs_BcK, restricted), here))
        return loss, (logprobs_BcK, _log_mass(restricted))

    B, T, _ = hidden_BTD.shape
    arrays = hidden_BTD, targets_BTK, inputs, supports_BTs
    parts = split_chunks(arrays, chunk_size(B, T, params, most_logits or _most_logits()))
    loss, found = jax.lax.scan(chunk, jnp.float32(0), parts)
    return _scored(loss, *found)


def score_and_grads(
    params: Params,
    pair: LoraPair | None,
    hidden_BTD: jax.Array,
    targets_BTK: jax.Array,
    choice: LossChoice,
    inputs: TokenInputs,
    mesh: Mesh | None = None,
    *,
    supports_BTs: jax.Array | None = None,
    most_logits: int | None = None,
    by_head: bool = False,
    interpret: bool = False,
) -> tuple[Scored, jax.Array, Any]:
    """The result of `score`, and the gradients of the loss with respect to hidden_BTD and `pair`.

    The first gradient is in the dtype of hidden_BTD; the second is None without a pair. params, pair, targets_BTK,
    choice, inputs, mesh, supports_BTs, most_logits, interpret: see `score`. by_head: the second gradient is with
    respect to the unembedding, float32 [V, D]; `pair` must then be None.
    """
    assert not (by_head and pair is not None)
    if platform().kernels and supports_BTs is None:
        whole = (hidden_BTD, targets_BTK, inputs)
        return _by_device(params, pair, whole, choice, mesh, most_logits, interpret, by_head=by_head)

    def chunk(carry: tuple[jax.Array, Any, Any], part: tuple[Any, ...]) -> tuple[Any, Any]:
        loss, d_pair, d_head = carry
        x_BcD, targets_BcK, here, supports_Bcs = part
        update, pull = jax.vjp(_update, x_BcD, pair)
        whole_BcV = _logits(params, x_BcD, update)
        logits_BcV = _from_largest(whole_BcV)
        log_total = _log_total(logits_BcV)
        logprobs_BcK = _pick(logits_BcV, targets_BcK) - log_total
        restricted = _restricted(logits_BcV, log_total, supports_Bcs)
        seen_BcK = _of_support(logprobs_BcK, restricted)
        value, slope_BcK = jax.value_and_grad(lambda lp: jnp.sum(token_losses(choice, lp, here)))(seen_BcK)
        d_logits = _d_logits(logits_BcV, log_total, targets_BcK, slope_BcK, restricted)
        d_logits = capped_pullback(params, whole_BcV, d_logits).astype(x_BcD.dtype)
        d_x, more = pull(None if update is None else d_logits)
        d_x += unembed_pullback(params, d_logits)
        if by_head:
            d_head += jnp.einsum("bcv,bcd->vd", d_logits, x_BcD, preferred_element_type=jnp.float32)
        found = logprobs_BcK, _log_mass(restricted)
        return (loss + value, jax.tree.map(jnp.add, d_pair, more), d_head), (found, d_x)

    B, T, _ = hidden_BTD.shape
    arrays = hidden_BTD, targets_BTK, inputs, supports_BTs
    parts = split_chunks(arrays, chunk_size(B, T, params, most_logits or _most_logits()))
    zeros = jax.tree.map(jnp.zeros_like, pair), jnp.zeros(params.head.shape) if by_head else None
    (loss, d_pair, d_head), (found, d_hidden) = jax.lax.scan(chunk, (jnp.float32(0), *zeros), parts)
    return _scored(loss, *found), join_chunks(d_hidden), d_head if by_head else d_pair


def _by_device(
    params: Params,
    pair: LoraPair | None,
    whole: tuple[jax.Array, jax.Array, TokenInputs],
    choice: LossChoice,
    mesh: Mesh | None,
    most_logits: int | None,
    interpret: bool,
    *,
    keep: bool = True,
    by_head: bool = False,
) -> tuple[Scored, jax.Array, Any]:
    """`score_and_grads` on GPUs and TPUs; the gradients are None unless `keep`.

    Every device scores its own rows. The tensor axis splits the vocabulary if it divides it. Sums over the rows of all
    devices are computed once, after the last chunk.

    params, pair, choice, mesh, most_logits, interpret, by_head: see `score_and_grads`. whole: hidden_BTD, targets_BTK
    and inputs.
    """
    assert mesh is not None
    hidden_BTD, targets_BTK, inputs = whole
    low_BTR, pull = (None, None) if pair is None else jax.vjp(low_rank, hidden_BTD, pair)
    axis = TENSOR if params.head.shape[0] % mesh.shape[TENSOR] == 0 else None
    kernels = softmax_gpu if platform().kernels == "triton" else softmax_tpu

    def over_vocabulary(summed: Callable[[jax.Array, str], jax.Array], x: jax.Array) -> jax.Array:
        return x if axis is None else summed(x, axis)

    def of_device(head_VD: jax.Array, B_RV: jax.Array | None, choice: LossChoice, *rows: Any) -> tuple[Any, ...]:
        V, (b, T, _) = head_VD.shape[0], rows[0].shape
        first = 0 if axis is None else jax.lax.axis_index(axis) * V

        def chunk(sums: tuple[jax.Array, Any, Any], part: tuple[Any, ...]) -> tuple[Any, Any]:
            loss, d_B_RV, d_head_VD = sums
            x_MD, low_MR, targets_MK, here = part
            targets_MK -= first
            given = Product(x_MD, head_VD, low_MR, B_RV, targets_MK, params.softcap, interpret)
            totals = kernels.totals(given, keep=keep)
            largest_M = over_vocabulary(jax.lax.pmax, jnp.max(totals.largest_NM, axis=0))
            total_M = jnp.sum(totals.total_NM * jnp.exp(totals.largest_NM - largest_M), axis=0)
            log_total_M = jnp.log(over_vocabulary(jax.lax.psum, total_M))
            picked_MK = jnp.where((targets_MK >= 0) & (targets_MK < V), totals.picked_MK, 0)
            picked_MK = over_vocabulary(jax.lax.psum, picked_MK)
            # Otherwise a logprob near 0 would have the rounding error of logits that may be near 100.
            logprobs_MK = picked_MK - largest_M[:, None] - log_total_M[:, None]
            losses_MK, slope_MK = losses_and_slopes(choice, logprobs_MK, here)
            loss += jnp.sum(losses_MK)
            if not keep:
                return (loss, None, None), (logprobs_MK, None, None)
            slopes = kernels.slopes(given, totals, largest_M, log_total_M, slope_MK)
            if by_head:
                d_head_VD += jnp.einsum("mv,md->vd", slopes.d_MV, x_MD, preferred_element_type=jnp.float32)
            d_x_MD = over_vocabulary(jax.lax.psum, jnp.einsum("mv,vd->md", slopes.d_MV, head_VD))
            if low_MR is None:
                return (loss, None, d_head_VD), (logprobs_MK, d_x_MD, None)
            d_low_MR, more_RV = _by_adapter(given, slopes)
            d_low_MR = over_vocabulary(jax.lax.psum, d_low_MR).astype(low_MR.dtype)
            return (loss, d_B_RV + more_RV, d_head_VD), (logprobs_MK, d_x_MD, d_low_MR)

        size = chunk_size(1, b * T, params, most_logits or SCORED_ROWS * params.embed_VD.shape[0])
        parts = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[2:]), rows)
        zeros = jnp.zeros_like(B_RV) if keep and B_RV is not None else None
        d_head = jnp.zeros(head_VD.shape, jnp.float32) if by_head else None
        sums, of_rows = jax.lax.scan(chunk, (jnp.float32(0), zeros, d_head), parts)
        return *jax.tree.map(lambda x: x[None], sums), *jax.tree.map(lambda x: x.reshape(b, T, -1), of_rows)

    each, B_RV = PartitionSpec(ROWS), None if pair is None else jnp.asarray(pair.B)
    local = jax.shard_map(
        of_device,
        mesh=mesh,
        in_specs=(PartitionSpec(axis), PartitionSpec(None, axis), PartitionSpec(), each, each, each, each),
        out_specs=(each, PartitionSpec(ROWS, None, axis), PartitionSpec(ROWS, axis), each, each, each),
        check_vma=False,
    )
    results = local(params.head, B_RV, choice, hidden_BTD, low_BTR, targets_BTK, inputs)
    loss, d_B_RV, d_head_VD, logprobs_BTK, d_hidden_BTD, d_low_BTR = results
    scored = Scored(jnp.sum(loss), logprobs_BTK)
    if not keep or pull is None:
        return scored, d_hidden_BTD, jnp.sum(d_head_VD, axis=0) if by_head else None
    d_more_BTD, d_pair = pull(d_low_BTR)
    return scored, d_hidden_BTD + d_more_BTD, d_pair.replace(B=jnp.sum(d_B_RV, axis=0))


def _by_adapter(given: Product, slopes: Slopes) -> tuple[jax.Array, jax.Array]:
    """The gradients with respect to low [M, R] and B [R, V], float32."""
    if slopes.d_low_MR is not None and slopes.d_B_RV is not None:
        return slopes.d_low_MR, slopes.d_B_RV
    assert given.low_MR is not None and given.B_RV is not None
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    by_low = product("mv,rv->mr", slopes.d_MV, given.B_RV.astype(slopes.d_MV.dtype))
    return by_low, product("mr,mv->rv", given.low_MR, slopes.d_MV)


def _update(x: jax.Array, pair: LoraPair | None) -> jax.Array | None:
    return None if pair is None else apply_one(x, (pair,))[0]


def _logits(params: Params, x: jax.Array, update: jax.Array | None) -> jax.Array:
    logits = unembed(params, x)
    return capped(params, logits if update is None else logits + update.astype(jnp.float32))


def _from_largest(logits_BcV: jax.Array) -> jax.Array:
    # Otherwise a logprob near 0 would have the rounding error of logits that may be near 100.
    return logits_BcV - jnp.max(logits_BcV, axis=-1, keepdims=True)


def _log_total(logits_BcV: jax.Array) -> jax.Array:
    return jnp.log(jnp.sum(jnp.exp(logits_BcV), axis=-1, keepdims=True))


def _restricted(logits_BcV: jax.Array, log_total: jax.Array, supports_Bcs: jax.Array | None) -> Restricted | None:
    """The softmax over the supports. log_total: the log-sum-exp of the logits, [B, c, 1]."""
    if supports_Bcs is None:
        return None
    held_Bcs = supports_Bcs >= 0
    given_Bc1 = jnp.any(held_Bcs, axis=-1, keepdims=True)
    ids_Bcs = jnp.maximum(supports_Bcs, 0)
    own_Bcs = jnp.where(held_Bcs, _pick(logits_BcV, ids_Bcs), -jnp.inf)
    # All logits of the support may be so far below the largest one that exp would return 0.
    largest_Bc1 = jnp.where(given_Bc1, jnp.max(own_Bcs, axis=-1, keepdims=True), 0)
    weights_Bcs = jnp.exp(own_Bcs - largest_Bc1)
    total_Bc1 = jnp.where(given_Bc1, jnp.sum(weights_Bcs, axis=-1, keepdims=True), 1)
    log_mass_Bc1 = jnp.where(given_Bc1, largest_Bc1 + jnp.log(total_Bc1) - log_total, 0)
    return Restricted(ids_Bcs, weights_Bcs / total_Bc1, log_mass_Bc1, given_Bc1)


def _log_mass(restricted: Restricted | None) -> jax.Array | None:
    return None if restricted is None else restricted.log_mass_Bc1


def _of_support(logprobs_BcK: jax.Array, restricted: Restricted | None) -> jax.Array:
    """The log probabilities for the loss."""
    return logprobs_BcK if restricted is None else logprobs_BcK - restricted.log_mass_Bc1


def _scored(loss: jax.Array, logprobs: jax.Array, log_mass: jax.Array | None) -> Scored:
    log_mass_BT = None if log_mass is None else join_chunks(log_mass)[..., 0]
    return Scored(loss, join_chunks(logprobs), log_mass_BT=log_mass_BT)


def _pick(logits_BcV: jax.Array, targets_BcK: jax.Array) -> jax.Array:
    return jnp.take_along_axis(logits_BcV, targets_BcK, axis=-1)


def _d_logits(
    logits_BcV: jax.Array,
    log_total: jax.Array,
    targets_BcK: jax.Array,
    slope_BcK: jax.Array,
    restricted: Restricted | None,
) -> jax.Array:
    """The gradient with respect to the logits: d logprob[t] / d logits = onehot(t) - softmax.

    A repeated target counts twice. logits_BcV: minus their maximum. log_total: their log-sum-exp, [B, c, 1]. slope_BcK:
    the loss's derivative with respect to each target's logprob. restricted: the softmax of tokens with a support.
    """
    d_logits = jnp.exp(logits_BcV - log_total) * -jnp.sum(slope_BcK, axis=-1, keepdims=True)
    B, c, _ = targets_BcK.shape
    rows, columns = jnp.arange(B)[:, None, None], jnp.arange(c)[None, :, None]
    if restricted is not None:
        d_logits = jnp.where(restricted.given_Bc1, 0, d_logits)
        d_own_Bcs = restricted.shares_Bcs * -jnp.sum(slope_BcK, axis=-1, keepdims=True)
        d_logits = d_logits.at[rows, columns, restricted.ids_Bcs].add(d_own_Bcs)
    return d_logits.at[rows, columns, targets_BcK].add(slope_BcK)


def _most_logits() -> int:
    """The logits of one chunk without kernels."""
    return MOST_LOGITS if on_cpu() else MOST_LOGITS_OF_GPUS


def chunk_size(rows: int, tokens: int, params: Params, most_logits: int) -> int:
    """The tokens of each row that pass through the unembedding at a time. tokens: a row's length, a power of two."""
    while tokens > 1 and tokens * rows * params.embed_VD.shape[0] > most_logits:
        tokens //= 2
    return tokens

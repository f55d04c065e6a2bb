"""Gated DeltaNet, the linear attention of Qwen3-Next and Qwen3.5: one matrix for each head instead of keys and values.

A token changes the matrix S of its head by the gated delta rule (Yang, Kautz and Hatamizadeh, arXiv 2412.06464,
equation 10). First S decays by exp(g). Then the value stored for the token's key moves toward the token's value, by the
share beta. The token's query reads S. Queries, keys and values come from a short causal convolution.

Training and prefill compute the tokens of a chunk together (section 3.3 of the paper). Within a chunk, the tokens'
changes are the solution of one triangular system. Only S is passed from chunk to chunk. Chunks begin at multiples of
their size, and so do the pieces of a prompt, so another division of a prompt changes only the last bits. Examples in
one row do not affect each other, because a chunk's decays and the convolution's terms are 0 between segments.

Examples with a common prefix form a tree in their row (`training.packing`). Each branch begins and ends with a chunk,
so a chunk's tokens are all on one path. A chunk starts from the state after the previous chunk, or from a state that an
earlier chunk saved because a branch begins there.

Letters: B rows, T tokens, C channels of the convolution, W its taps, h key heads, r value heads of each key head.
H = h * r value heads, k and v the dimensions of a key and a value head, n chunks, c and s tokens of a chunk.
L layers, N states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

from tinkerflow.backend.compute.kernels import delta_chunks_gpu, delta_gpu, delta_tpu
from tinkerflow.backend.compute.kernels.delta_chunks_gpu import ChunkBranches, ChunkParts
from tinkerflow.backend.compute.mesh import ROWS, TENSOR, Array, sharding
from tinkerflow.backend.compute.models.layers.gated_deltanet import DeltaRuleWeights, GatedDeltaNet
from tinkerflow.backend.compute.models.layers.step import DeltaRuleFn
from tinkerflow.backend.compute.platforms import TPU, on_cpu, platform

_EPS = 1e-6  # in the norms of queries and keys


@flax.struct.dataclass
class Pooled:
    """The pool with the states of all layers and sequences, and the rows' places in it. A kernel updates it in place.

    S float32 [L, N, H, k, v]. layer: int32 scalar. places_B int32: the state of each row; 0 = none. fresh_B bool: the
    rows that have no token yet.
    """

    S: jax.Array
    layer: jax.Array
    places_B: jax.Array
    fresh_B: jax.Array


@flax.struct.dataclass
class DeltaState:
    """A layer's state after earlier tokens: the convolution's last inputs conv [B, W-1, C], float32 S [B, H, k, v]."""

    conv: jax.Array
    S: jax.Array | Pooled


def chunk_tokens() -> int:
    """The number of tokens in a chunk. The smallest piece of a prompt is a multiple of this number.

    On GPUs and TPUs, reading and writing the state twice as often costs more than a larger triangular system.
    """
    return 32 if on_cpu() else 64


def empty_state(shape: GatedDeltaNet, rows: int, dtype: Any) -> DeltaState:
    """The state before the first token. dtype: of the activations."""
    conv = jnp.zeros((rows, shape.taps - 1, shape.channels), dtype)
    return DeltaState(conv, jnp.zeros((rows, shape.value_heads, shape.key_dim, shape.value_dim), jnp.float32))


@flax.struct.dataclass
class Branches:
    """The paths of rows with shared tokens. positions_BT: each token's position in its example.

    entries_Bn: the column of the token that precedes each chunk in its example; -1 = none, or padding.
    """

    positions_BT: jax.Array
    entries_Bn: jax.Array


def delta_rule_in_segments(
    shape: GatedDeltaNet,
    segments_BT: jax.Array,
    mesh: Mesh,
    positions_BT: jax.Array | None = None,
    parents_BT: jax.Array | None = None,
) -> DeltaRuleFn:
    """The recurrence in training, over earlier tokens of the same segment. Rows are split over ROWS.

    positions_BT, parents_BT: see `MicroBatch`; given for rows with shared tokens, which ignore the segments.
    """
    rows = sharding(mesh, segments_BT.shape, ROWS).spec[0]
    branches = None
    if positions_BT is not None and parents_BT is not None:
        branches = Branches(positions_BT, parents_BT[:, :: chunk_tokens()])

    def run(weights: DeltaRuleWeights, qkv_BTC: jax.Array, decay_BTH: jax.Array, beta_BTH: jax.Array) -> jax.Array:
        fresh = empty_state(shape, qkv_BTC.shape[0], qkv_BTC.dtype)
        given = (shape, mesh, weights, fresh, qkv_BTC, decay_BTH, beta_BTH)
        o_BTHv, _ = mix(*given, rows=rows, segments_BT=segments_BT, branches=branches)
        return checkpoint_name(o_BTHv, "attended")

    return run


def mix(
    shape: GatedDeltaNet,
    mesh: Mesh,
    weights: DeltaRuleWeights,
    state: DeltaState,
    qkv_BTC: jax.Array,
    decay_BTH: jax.Array,
    beta_BTH: jax.Array,
    *,
    rows: Any = None,
    segments_BT: jax.Array | None = None,
    valid_B: Array | None = None,
    branches: Branches | None = None,
) -> tuple[jax.Array, DeltaState]:
    """The values that the tokens read, [B, T, H, v] in the dtype of qkv, and the state after these tokens.

    shape: of the layer. mesh: heads are split over its tensor axis if that divides the key heads. weights: conv
    [C, 1, W] in the dtype of qkv, A_log and dt_bias float32 [H]. state: before the first token; `Pooled` only for one
    token. qkv_BTC: queries, keys and values side by side, before the convolution. decay_BTH and beta_BTH: the results
    of `in_a` and `in_b`. rows: the mesh axes that rows are split over. segments_BT: the segment of each token; None =
    all tokens are in one. valid_B: the number of real tokens in each row, before the padding; None = all. branches: the
    paths of rows with shared tokens, which replace the segments.
    """
    B, T, _ = qkv_BTC.shape
    if branches is None:
        mixed_BTC, conv = _convolved(weights.conv[:, 0], state.conv, qkv_BTC, segments_BT, valid_B)
    else:
        mixed_BTC, conv = _convolved_by_branch(weights.conv[:, 0], qkv_BTC, branches), state.conv
    queries = shape.key_heads * shape.key_dim
    q, k, v = jnp.split(mixed_BTC.astype(jnp.float32), (queries, 2 * queries), axis=-1)
    q_BThk, k_BThk = (_unit(x.reshape(B, T, shape.key_heads, shape.key_dim)) for x in (q, k))
    v_BTHv = v.reshape(B, T, shape.value_heads, shape.value_dim)
    g_BTH = -jnp.exp(weights.A_log) * jax.nn.softplus(decay_BTH.astype(jnp.float32) + weights.dt_bias)
    beta_BTH = jax.nn.sigmoid(beta_BTH.astype(jnp.float32))
    if valid_B is not None:
        counts_BT1 = (jnp.arange(T) < valid_B[:, None])[..., None]
        g_BTH, beta_BTH = (jnp.where(counts_BT1, x, 0) for x in (g_BTH, beta_BTH))
    if segments_BT is None:
        segments_BT = jnp.zeros((B, T), jnp.int32)
    heads = TENSOR if shape.key_heads % mesh.shape[TENSOR] == 0 else None
    tokens, each = PartitionSpec(rows, None, heads), PartitionSpec(rows)
    held: Any = PartitionSpec(rows, heads)
    mixed: Callable[..., tuple[jax.Array, Any]] = _step if T == 1 else partial(_chunks, dtype=qkv_BTC.dtype)
    if isinstance(state.S, Pooled):
        held = Pooled(PartitionSpec(None, rows, heads), PartitionSpec(), each, each)  # type: ignore[arg-type]
        mixed = _step_in_pool
    local = jax.shard_map(
        mixed,
        mesh=mesh,
        in_specs=(held, tokens, tokens, tokens, tokens, tokens, each),
        out_specs=(tokens, held),
        check_vma=False,
    )
    entries = None if branches is None else branches.entries_Bn
    o_BTHv, S = local(state.S, q_BThk * shape.key_dim**-0.5, k_BThk, v_BTHv, g_BTH, beta_BTH, (segments_BT, entries))
    return o_BTHv.astype(qkv_BTC.dtype), DeltaState(conv, S)


def _unit(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _EPS)


def _convolved(
    conv_CW: jax.Array,
    before: jax.Array,
    x_BTC: jax.Array,
    segments_BT: jax.Array | None,
    valid_B: Array | None,
) -> tuple[jax.Array, jax.Array]:
    """silu of the causal convolution of each channel, in the dtype of x; and the last W - 1 real inputs."""
    T, past = x_BTC.shape[1], before.shape[1]
    inputs = jnp.concatenate([before, x_BTC], axis=1)
    total = jnp.zeros(x_BTC.shape, jnp.float32)
    for tap in range(past + 1):
        term = inputs[:, tap : tap + T].astype(jnp.float32) * conv_CW[:, tap].astype(jnp.float32)
        if segments_BT is not None and tap < past:
            earlier = jnp.pad(segments_BT, ((0, 0), (past - tap, 0)), constant_values=-1)[:, :T]
            term = jnp.where((earlier == segments_BT)[..., None], term, 0)
        total = total + term
    if valid_B is None:
        after = inputs[:, T:]
    else:
        after = jnp.take_along_axis(inputs, (valid_B[:, None] + jnp.arange(past))[..., None], axis=1)
    return jax.nn.silu(total).astype(x_BTC.dtype), after


def _convolved_by_branch(conv_CW: jax.Array, x_BTC: jax.Array, branches: Branches) -> jax.Array:
    """The first result of `_convolved`, in rows with shared tokens: a chunk's first taps read tokens before it."""
    (B, T, C), c, past = x_BTC.shape, chunk_tokens(), conv_CW.shape[1] - 1
    n = -(-T // c)
    x_BncC = jnp.pad(x_BTC, ((0, 0), (0, n * c - T), (0, 0))).reshape(B, n, c, C)
    # A product selects the inputs before each chunk. A gather's derivative may not add in a fixed order.
    chosen_Bnm = (branches.entries_Bn[..., None] // c == jnp.arange(n)).astype(x_BTC.dtype)
    inputs = jnp.concatenate([jnp.einsum("bnm,bmpc->bnpc", chosen_Bnm, x_BncC[:, :, c - past :]), x_BncC], axis=2)
    total = jnp.zeros((B, T, C), jnp.float32)
    for tap in range(past + 1):
        term = inputs[:, :, tap : tap + c].reshape(B, n * c, C)[:, :T].astype(jnp.float32)
        known_BT = branches.positions_BT >= past - tap
        total = total + jnp.where(known_BT[..., None], term * conv_CW[:, tap].astype(jnp.float32), 0)
    return jax.nn.silu(total).astype(x_BTC.dtype)


def _step(
    S_BHkv: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, _: Any
) -> tuple[jax.Array, jax.Array]:
    """One token: float32 throughout."""
    H, h = v.shape[2], k.shape[2]
    q_BHk1, k_BHk1 = (jnp.repeat(x[:, 0], H // h, axis=1)[..., None] for x in (q, k))
    S_BHkv = S_BHkv * jnp.exp(g[:, 0])[..., None, None]
    held_BHv = jnp.sum(S_BHkv * k_BHk1, axis=2)
    change_BHv = (v[:, 0] - held_BHv) * beta[:, 0, :, None]
    S_BHkv = S_BHkv + k_BHk1 * change_BHv[:, :, None, :]
    return jnp.sum(S_BHkv * q_BHk1, axis=2)[:, None], S_BHkv


def _step_in_pool(
    pool: Pooled, q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, _: Any
) -> tuple[jax.Array, Pooled]:
    """Like `_step`, but computed by a kernel."""
    q_BHk, k_BHk = (jnp.repeat(x[:, 0], v.shape[2] // k.shape[2], axis=1) for x in (q, k))
    decay_BH = jnp.where(pool.fresh_B[:, None], 0, jnp.exp(g[:, 0]))
    step = delta_tpu.step if platform() is TPU else delta_gpu.step
    o_BHv, S = step(pool.S, pool.layer, pool.places_B, q_BHk, k_BHk, v[:, 0], decay_BH, beta[:, 0])
    return o_BHv[:, None], replace(pool, S=S)


def _chunks(
    S_BHkv: jax.Array,
    q_BThk: jax.Array,
    k_BThk: jax.Array,
    v_BTHv: jax.Array,
    g_BTH: jax.Array,
    beta_BTH: jax.Array,
    places: tuple[jax.Array, jax.Array | None],
    *,
    dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    """All tokens, chunk by chunk, in float32.

    places: segments_BT, and `Branches.entries_Bn` if rows share tokens. dtype: of the values that kernels return.
    """
    B, T, h, k = k_BThk.shape
    (H, v), c = v_BTHv.shape[2:], chunk_tokens()
    r, n = H // h, -(-T // c)
    fill = n * c - T

    def by_chunk(x: jax.Array, *heads: int) -> jax.Array:
        """[B, T, heads, ...] -> [n, B, *heads, c, ...]; zeros fill the last chunk."""
        x = jnp.pad(x, ((0, 0), (0, fill), *((0, 0) for _ in x.shape[2:])))
        x = x.reshape(B, n, c, *heads, *x.shape[3:])
        return jnp.moveaxis(x, (1, 2), (0, 2 + len(heads)))

    q, k_, v_ = by_chunk(q_BThk, h), by_chunk(k_BThk, h), by_chunk(v_BTHv, h, r)
    g, beta = by_chunk(g_BTH, h, r), by_chunk(beta_BTH, h, r)
    segments_BT, entries_Bn = places
    earlier = jnp.tril(jnp.ones((c, c), bool))
    if entries_Bn is None:
        # Padding belongs to the last segment, so that the state passes through it.
        segments = jnp.pad(segments_BT, ((0, 0), (0, fill)), mode="edge").reshape(B, n, c).swapaxes(0, 1)
        before = jnp.concatenate([segments_BT[None, :, 0], segments[:-1, :, -1]])  # the segment that S comes from
        seen = (earlier & (segments[..., :, None] == segments[..., None, :]))[:, :, None, None]
        entered = segments == before[..., None]
    else:
        seen, entered = earlier[None, None, None, None], (entries_Bn.T >= 0)[..., None]
    log = jnp.sum(jnp.where(seen, g[..., None, :], 0), axis=-1)  # since the segment or the chunk began
    decay = jnp.exp(jnp.where(seen, log[..., :, None] - log[..., None, :], -jnp.inf))  # [n, B, h, r, c, s]
    kept = jnp.where(entered[:, :, None, None], jnp.exp(log), 0)  # share of S, by token

    alike = jnp.einsum("nbhck,nbhsk->nbhcs", k_, k_)[:, :, :, None]
    system = jnp.tril(alike * decay * beta[..., None], -1)
    wanted, readers = v_ * beta[..., None], k_[:, :, :, None] * (beta * kept)[..., None]
    reads = jnp.einsum("nbhck,nbhsk->nbhcs", q, k_)[:, :, :, None] * decay
    turns = None
    if entries_Bn is not None:
        branches_Bn = (entries_Bn >= 0) & (entries_Bn != c * jnp.arange(n) - 1)
        saved_by_Bnm = branches_Bn[..., None] & (entries_Bn[..., None] == c * jnp.arange(1, n + 1) - 1)
        turns = branches_Bn.T, saved_by_Bnm.any(axis=1).T
    mixed = partial(_by_kernel, dtype=dtype) if platform().kernels == "triton" else _in_loop
    parts = q, k_, (_inverse if on_cpu() else _solved)(system), wanted, readers, reads, decay[..., -1, :], kept
    o_BTHv, S = mixed(S_BHkv.reshape(B, h, r, k, v), parts, turns)
    return o_BTHv[:, :T], S.reshape(B, H, k, v)


def _in_loop(S: jax.Array, parts: tuple[jax.Array, ...], turns: tuple[jax.Array, jax.Array] | None) -> Any:
    """The values that tokens read, [B, n c, H, v], and the last state: one chunk after the other.

    parts: queries and keys [n, B, h, c, k], inverses of the systems [n, B, h, r, c, c], wanted values [n, B, h, r, c,
    v], keys that read S [n, B, h, r, c, k], the weights of earlier tokens' changes [n, B, h, r, c, s], the decay to the
    chunk's end and the share of S that each token sees [n, B, h, r, c]. turns: which chunks of rows with branches start
    from the saved state, and after which chunks the state is saved, [n, B].
    """
    q, k_, inverse, wanted, readers, reads, last, kept = parts
    (n, B, h, r, c, v), solved = wanted.shape, inverse @ jnp.concatenate([wanted, readers], axis=-1)

    def chunk(S: jax.Array, parts: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k_, solved, reads, last, kept = parts
        change = solved[..., :v] - jnp.einsum("bhrck,bhrkv->bhrcv", solved[..., v:], S)
        o = jnp.einsum("bhck,bhrkv->bhrcv", q, S) * kept[..., None] + jnp.einsum("bhrcs,bhrsv->bhrcv", reads, change)
        S = S * kept[..., -1, None, None] + jnp.einsum("bhsk,bhrs,bhrsv->bhrkv", k_, last, change)
        return S, o

    def branching_chunk(
        states: tuple[jax.Array, jax.Array], parts: tuple[tuple[jax.Array, ...], jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        (S, saved), (plain, branches_B, saves_B) = states, parts
        S, o = chunk(jnp.where(branches_B[:, None, None, None, None], saved, S), plain)
        return (S, jnp.where(saves_B[:, None, None, None, None], S, saved)), o

    by_chunk: Callable[..., Any] = jax.checkpoint if on_cpu() else lambda body: body
    each = q, k_, solved, reads, last, kept
    if turns is None:
        S, o = jax.lax.scan(by_chunk(chunk), S, each)
    else:
        (S, _), o = jax.lax.scan(by_chunk(branching_chunk), (S, jnp.zeros_like(S)), (each, *turns))
    return jnp.moveaxis(o, (0, 4), (1, 2)).reshape(B, n * c, h * r, v), S


def _by_kernel(
    S: jax.Array, parts: tuple[jax.Array, ...], turns: tuple[jax.Array, jax.Array] | None, *, dtype: Any
) -> Any:
    """Like `_in_loop`, but the loop is in a kernel, and the values are in `dtype`."""
    q, k_, inverse, wanted, readers, reads, last, kept = parts
    n, B, h, r, *_ = wanted.shape

    def by_head(x: jax.Array) -> jax.Array:
        return x.reshape(n, B, h * r, *x.shape[4:])

    factors = ChunkParts(q, k_, *map(by_head, (inverse @ wanted, inverse @ readers, reads, last, kept)))
    numbers = turns and ChunkBranches(*(turn.astype(jnp.int32) for turn in turns))
    return delta_chunks_gpu.mix_chunks(S.reshape(B, h * r, *S.shape[3:]), factors, numbers, dtype)


_exact = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)  # a rounded inverse would be useless


def _inverse(below: jax.Array) -> jax.Array:
    """The inverse of 1 + `below` [..., c, c], where `below` is strictly lower triangular; c is a power of two.

    Pairs of inverted blocks on the diagonal are combined into blocks of twice the size, by matmuls on every platform.
    A sum of powers of `below` would lose all digits if keys are alike.
    """
    c = below.shape[-1]
    inverse, size = jnp.ones((*below.shape[:-1], 1, 1), below.dtype), 1  # [..., blocks, size, size]
    while size < c:
        n = c // (2 * size)
        lower = below.reshape(*below.shape[:-2], n, 2, size, n, 2, size)[..., 1, :, :, 0, :]
        # The blocks on the diagonal. `jnp.diagonal` would sort millions of indices in the backward pass on GPUs.
        corners = jnp.sum(jnp.where(jnp.eye(n, dtype=bool)[:, None, :, None], lower, 0), axis=-2)
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        above = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        inverse = jnp.concatenate(
            [above, jnp.concatenate([-_exact(_exact(second, corners), first), second], axis=-1)], axis=-2
        )
        size *= 2
    return inverse[..., 0, :, :]


@jax.custom_vjp
def _solved(below: jax.Array) -> jax.Array:
    """`_inverse`, whose backward pass is two products instead of products for each size of blocks."""
    return _inverse(below)


def _solved_forward(below: jax.Array) -> tuple[jax.Array, jax.Array]:
    inverse = _inverse(below)
    return inverse, inverse


def _solved_backward(inverse: jax.Array, slopes: jax.Array) -> tuple[jax.Array]:
    return (jnp.tril(-_exact(_exact(inverse.mT, slopes), inverse.mT), -1),)


_solved.defvjp(_solved_forward, _solved_backward)

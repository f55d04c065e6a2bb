"""Flash attention of a packed training batch on NVIDIA GPUs and TPUs: kernels that come with JAX.

Scores never leave the chip, forward or backward. Both kernels add in a fixed order, so the same batch gives the same
bits. Each program of the backward pass writes rows of dQ, or of dK and dV, that no other program writes, and loops over
the other rows. The devices split rows over fsdp and heads over tensor. The module `whole_rows` splits long rows.

Sequences with equal beginnings can share them in a row. The module `tree` has the kernels for such rows.

Letters: B rows, T tokens, H query heads, G key-value heads, d head dimension, r = H / G.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.experimental.pallas.ops.gpu import attention as gpu
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import Mesh, PartitionSpec

from tinkerflow.backend.compute.kernels import tree_gpu, tree_tpu
from tinkerflow.backend.compute.kernels.tree import How, Kernels, attend
from tinkerflow.backend.compute.kernels.triton_calls import triton_call
from tinkerflow.backend.compute.kernels.whole_rows import in_whole_rows
from tinkerflow.backend.compute.mesh import PIECES, ROWS, TENSOR, sharding, split_rows
from tinkerflow.backend.compute.platforms import TPU, platform

# (q_BTHd, k_BTGd, v_BTGd, segments_BT, sinks_H or None) -> o_BTHd
# For rows of trees: (q_BTHd, k_BTGd, v_BTGd, ends_BT, sinks_H or None, positions_BT) -> o_BTHd
Kernel = Callable[..., jax.Array]
Kept = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]

_TPU_BLOCK = 512  # tokens; TPUs want multiples of 128
_TPU_LEAST = 128
_GPU_QUERIES, _GPU_KEYS, _GPU_BACKWARD = 128, 64, 64  # tokens of a block; half of that in float32, for shared memory
_GPU_WARPS = 8
_GPU_LEAST, _GPU_MOST = 16, 256  # of the head dimension: a tile of the tensor cores, and the limit of shared memory


def flash_attention(
    mesh: Mesh,
    tokens: int,
    window: int | None = None,
    *,
    head_dim: int = 128,
    save_memory: bool = False,
    tree: bool = False,
    interpret: bool = False,
    pieces: int = 1,
) -> Kernel | None:
    """The kernel for rows of `tokens` tokens on the platform that programs are made for; None where there is none.

    mesh: rows and heads are split over it. window: how many tokens a query sees, None = all before it. head_dim: of
    queries and keys. save_memory: a backward pass takes less memory and a little more time; the results are the same.
    tree: for rows of trees, as in the module `tree`, whose backward pass always takes less memory.
    interpret: compute with plain operations, for tests without the device. pieces: of a row; see `by_device`. The
    kernel for GPUs supports no wide heads, and windows shorter than a row only in trees.
    """
    chosen, window = platform(), None if window is None or window >= tokens else window
    if chosen is TPU and tokens % _TPU_LEAST == 0:
        trees = partial(_in_trees, tree_tpu.KERNELS, interpret, window)
        return partial(by_device, mesh, pieces, trees if tree else partial(_splash, interpret, save_memory, window))
    if chosen.kernels == "triton" and on_gpus(tokens, window, head_dim, tree=tree):
        trees = partial(_in_trees, tree_gpu.KERNELS, interpret, window)
        return partial(by_device, mesh, pieces, trees if tree else partial(_triton, interpret, save_memory))
    return None


def on_gpus(tokens: int, window: int | None, head_dim: int, *, tree: bool = False) -> bool:
    """Whether the kernel for GPUs supports rows of `tokens` tokens. The arguments are as in `flash_attention`."""
    return (tree or window is None or window >= tokens) and head_dim <= _GPU_MOST


def by_device(
    mesh: Mesh,
    pieces: int,
    kernel: Kernel,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array,
    sinks_H: jax.Array | None = None,
    *positions: jax.Array,
) -> jax.Array:
    """The kernel on each device's rows and heads. Heads are not split if the tensor axis does not divide them.

    pieces: where rows are split over devices, the number of pieces of a row. The arguments have a row for each piece.
    """
    heads = TENSOR if k.shape[2] % mesh.shape[TENSOR] == 0 else None
    rows = sharding(mesh, q.shape, ROWS).spec[0]
    if pieces > 1:
        mesh, rows, kernel = split_rows(mesh, pieces), PIECES, partial(in_whole_rows, kernel, pieces)
    cells, of_row = PartitionSpec(rows, None, heads, None), PartitionSpec(rows, None)
    local = jax.shard_map(
        kernel,
        mesh=mesh,
        in_specs=(cells, cells, cells, of_row, PartitionSpec(heads), *(of_row for _ in positions)),
        out_specs=cells,
        check_vma=False,
    )
    o_BTHd: jax.Array = local(q, k, v, segments, sinks_H, *positions)
    return o_BTHd


def _in_trees(
    kernels: Kernels,
    interpret: bool,
    window: int | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *rest: jax.Array | None,
) -> jax.Array:
    own = partial(attend, kernels, How(interpret, window, q.shape[-1] ** -0.5))
    return _padded(own, q, k, v, *rest) if kernels is tree_gpu.KERNELS else own(q, k, v, *rest)


# ------------------------------------------------------------------ TPU
def _splash(
    interpret: bool,
    save_memory: bool,
    window: int | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array,
    sinks_H: jax.Array | None,
) -> jax.Array:
    _, T, H, d = q.shape
    block = min(_TPU_BLOCK, T)
    mask: Any = masks.CausalMask((T, T)) if window is None else masks.LocalMask((T, T), (window - 1, 0), 0)
    kernel = splash.make_splash_mha(
        masks.MultiHeadMask([mask] * H),
        block_sizes=splash.BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_q_dq=block,
            block_kv_dq=block,
        ),
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name="attended",  # of the output, and of the logarithms of the softmax's denominators
        interpret=interpret,
    )
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q * d**-0.5, k, v))
    o_BHTd = (_with_barrier if save_memory else _each_row)(kernel, q, k, v, segments, sinks_H)
    return jnp.swapaxes(o_BHTd, 1, 2)


def _each_row(
    kernel: Any, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, sinks_H: jax.Array | None
) -> jax.Array:
    """The kernel's result [B, H, T, d] for queries, keys and values of this layout."""
    with_sinks = kernel if sinks_H is None else partial(kernel, sinks=sinks_H.astype(jnp.float32))
    o_BHTd: jax.Array = jax.vmap(with_sinks)(q, k, v, splash.SegmentIds(segments, segments))
    return o_BHTd


def _forward_with_barrier(kernel: Any, q: jax.Array, k: jax.Array, v: jax.Array, *rest: Any) -> tuple[jax.Array, Any]:
    """The result, and the values that the backward pass needs.

    The kernel writes the logarithm of each query 128 times in float32, which is twice the bytes of its result. Without
    the barrier, XLA may keep all copies until the backward pass.
    """
    return jax.lax.optimization_barrier(jax.vjp(lambda q, k, v: _each_row(kernel, q, k, v, *rest), q, k, v))


_with_barrier = jax.custom_vjp(_each_row)
_with_barrier.defvjp(_forward_with_barrier, lambda pull, d_o: (None, *pull(d_o), None, None))


# ------------------------------------------------------------------ NVIDIA
def _triton(
    interpret: bool,
    save_memory: bool,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array,
    sinks_H: jax.Array | None,
) -> jax.Array:
    return _padded(partial(_attend, interpret, save_memory, q.shape[-1] ** -0.5), q, k, v, segments, sinks_H)


def _padded(kernel: Kernel, q: jax.Array, k: jax.Array, v: jax.Array, *rest: jax.Array | None) -> jax.Array:
    """The kernel's result. The kernel gets heads of one dimension, which Triton supports."""
    d = max(q.shape[-1], v.shape[-1])
    wide = max(_GPU_LEAST, pl.next_power_of_2(d))
    padded = (
        jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, wide - x.shape[-1]))) if x.shape[-1] < wide else x for x in (q, k, v)
    )
    return kernel(*padded, *rest)[..., : v.shape[-1]]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attend(
    interpret: bool,
    save_memory: bool,
    scale: float,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array,
    sinks_H: jax.Array | None,
) -> jax.Array:
    return _forward(interpret, save_memory, scale, q, k, v, segments, sinks_H)[0]


def _forward(
    interpret: bool,
    save_memory: bool,
    scale: float,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array,
    sinks_H: jax.Array | None,
) -> tuple[jax.Array, Kept]:
    B, T, H, d = q.shape
    r, (block_q, block_k) = H // k.shape[2], (_block(most, q) for most in (_GPU_QUERIES, _GPU_KEYS))
    queries = pl.BlockSpec((None, block_q, None, d), lambda i, b, h: (b, i, h, 0))
    keys = pl.BlockSpec((None, T, None, d), lambda i, b, h: (b, 0, h // r, 0))
    o, log_totals = triton_call(
        partial(gpu.mha_forward_kernel, sm_scale=scale, causal=True, block_q=block_q, block_k=block_k, head_dim=d),
        grid=(T // block_q, B, H),
        in_specs=[queries, keys, keys, pl.BlockSpec((None, T), lambda i, b, h: (b, 0))],
        out_shape=[q, jax.ShapeDtypeStruct((B, H, T), jnp.float32)],
        out_specs=[queries, pl.BlockSpec((None, None, block_q), lambda i, b, h: (b, h, i))],
        compiler_params=triton.CompilerParams(num_warps=_GPU_WARPS, num_stages=2),
        interpret=interpret,
        name="attention_forward",
    )(q, k, v, segments)
    if sinks_H is not None:  # a sink is one more term of the denominator, whose logarithm is to base 2 here
        more_BHT = jnp.exp2(sinks_H.astype(jnp.float32)[:, None] * math.log2(math.e) - log_totals)
        o = (o / jnp.swapaxes(1 + more_BHT, 1, 2)[..., None]).astype(o.dtype)
        log_totals = log_totals + jnp.log2(1 + more_BHT)
    o, log_totals = checkpoint_name(o, "attended"), checkpoint_name(log_totals, "log_totals")
    return o, (q, k, v, segments, o, log_totals)


def _backward(interpret: bool, save_memory: bool, scale: float, kept: Kept, d_o: jax.Array) -> tuple[Any, ...]:
    q, k, v, segments, o, log_totals = kept
    means = jnp.einsum("bthd,bthd->bht", d_o, o, preferred_element_type=jnp.float32)
    if not save_memory:
        return *_slopes(interpret, scale, q, k, v, segments, o, d_o, log_totals, means), None, None
    G = k.shape[2]

    def of_head(g: jax.Array, found: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """The gradients of head g in the place of its queries, keys and values."""

        def own(x: jax.Array, axis: int) -> jax.Array:
            size = x.shape[axis] // G
            return jax.lax.dynamic_slice_in_dim(x, g * size, size, axis)

        q, k, v, slope = (own(x, 2) for x in (*found, d_o))
        # The kernel has an argument for the result, but does not read it. Another array of its shape replaces it.
        given = (q, k, v, segments, slope, slope, own(log_totals, 1), own(means, 1))
        slopes = _slopes(interpret, scale, *given)
        place = jax.lax.dynamic_update_slice_in_dim
        return tuple(place(x, new, g * new.shape[2], 2) for x, new in zip(found, slopes, strict=True))

    return *jax.lax.fori_loop(0, G, of_head, (q, k, v)), None, None


def _slopes(
    interpret: bool,
    scale: float,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array,
    o: jax.Array,
    d_o: jax.Array,
    log_totals: jax.Array,
    means: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients by q, k and v."""
    B, T, H, d = q.shape
    G, block = k.shape[2], _block(_GPU_BACKWARD, q)
    r = H // G
    queries = pl.BlockSpec((None, T, None, d), lambda b, h, i: (b, 0, h, 0))
    keys = pl.BlockSpec((None, T, None, d), lambda b, h, i: (b, 0, h // r, 0))
    numbers = pl.BlockSpec((None, None, T), lambda b, h, i: (b, h, 0))
    block_of_head = pl.BlockSpec((None, block, None, d), lambda b, h, i: (b, i, h, 0))
    d_q, d_k, d_v = triton_call(
        partial(
            gpu.mha_backward_kernel,
            sm_scale=scale,
            causal=True,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_q_dq=block,
            block_kv_dq=block,
            head_dim=d,
        ),
        grid=(B, H, T // block),
        in_specs=[
            queries,
            keys,
            keys,
            pl.BlockSpec((None, T), lambda b, h, i: (b, 0)),
            queries,
            queries,
            numbers,
            numbers,
        ],
        out_shape=[q, q, q],
        out_specs=[block_of_head, block_of_head, block_of_head],
        compiler_params=triton.CompilerParams(num_warps=_GPU_WARPS, num_stages=2),
        interpret=interpret,
        name="attention_backward",
    )(q, k, v, segments, o, d_o, log_totals, means)
    d_k, d_v = (jnp.sum(x.reshape(B, T, G, r, d), axis=3, dtype=jnp.float32).astype(k.dtype) for x in (d_k, d_v))
    return d_q, d_k, d_v


_attend.defvjp(_forward, _backward)


def _block(most: int, q_BTHd: jax.Array) -> int:
    """Tokens of a block, of `most` in two bytes a number."""
    return min(2 * most // q_BTHd.dtype.itemsize, q_BTHd.shape[1])

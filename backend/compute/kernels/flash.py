"""Flash attention of a packed training batch on NVIDIA GPUs and TPUs.

Scores never leave the chip, forward or backward. All kernels add in a fixed order, so the same batch gives the same
bits. Each program of the backward pass writes rows of dQ, or of dK and dV, that no other program writes, and loops over
the other rows. The devices split rows over fsdp and heads over tensor. The module `whole_rows` splits long rows.

On GPUs, the kernels of `tree` compute all rows, with or without shared prefixes. On TPUs, they compute the rows whose
sequences share a prefix, and JAX's splash attention computes the other rows.

Letters: B rows, T tokens, H query heads, G key-value heads, d head dimension, r = H / G.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import Mesh, PartitionSpec

from tinkerflow.backend.compute.kernels import tree_gpu, tree_tpu
from tinkerflow.backend.compute.kernels.tree import How, attend
from tinkerflow.backend.compute.kernels.whole_rows import in_whole_rows
from tinkerflow.backend.compute.mesh import PIECES, ROWS, TENSOR, sharding, split_rows
from tinkerflow.backend.compute.platforms import TPU, platform

# (q_BTHd, k_BTGd, v_BTGd, ends_BT, sinks_H or None) -> o_BTHd
# For rows of trees: (q_BTHd, k_BTGd, v_BTGd, ends_BT, sinks_H or None, positions_BT) -> o_BTHd
Kernel = Callable[..., jax.Array]

_TPU_BLOCK = 512  # tokens; TPUs want multiples of 128
_TPU_LEAST = 128
_GPU_LEAST, _GPU_MOST = 16, 256  # of the head dimension: a tile of tensor cores, and the limit of shared memory


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
    """The kernel for rows of `tokens` tokens on the target platform of programs; None if there is none.

    mesh: rows and heads are split over it. window: how many tokens a query sees, including its own; None = all earlier
    tokens. head_dim: of queries and keys. save_memory: the backward pass of splash attention takes less memory and a
    little more time; the results are the same. tree: whether rows contain trees, as in the module `tree`. interpret:
    compute with plain operations, for tests without the device. pieces: of a row; see `by_device`.
    """
    chosen, window = platform(), None if window is None or window >= tokens else window
    if chosen is TPU and tokens % _TPU_LEAST == 0:
        kernel = partial(_trees_on_tpus, interpret) if tree else partial(_splash, interpret, save_memory)
        return partial(by_device, mesh, pieces, partial(kernel, window))
    if chosen.kernels == "triton" and on_gpus(head_dim):
        return partial(by_device, mesh, pieces, partial(_on_gpus, interpret, window))
    return None


def on_gpus(head_dim: int) -> bool:
    """Whether the kernel for GPUs supports heads of this dimension."""
    return head_dim <= _GPU_MOST


def by_device(
    mesh: Mesh,
    pieces: int,
    kernel: Kernel,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    ends_BT: jax.Array,
    sinks_H: jax.Array | None = None,
    *positions: jax.Array,
) -> jax.Array:
    """Run the kernel on each device's rows and heads. Heads are not split if the tensor axis does not divide them.

    pieces: the number of pieces of a row, if rows are split over devices. The arguments have a row for each piece.
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
    o_BTHd: jax.Array = local(q, k, v, ends_BT, sinks_H, *positions)
    return o_BTHd


# ------------------------------------------------------------------ TPU
def _trees_on_tpus(
    interpret: bool, window: int | None, q: jax.Array, k: jax.Array, v: jax.Array, *rest: jax.Array | None
) -> jax.Array:
    return attend(tree_tpu.KERNELS, How(interpret, window, q.shape[-1] ** -0.5), q, k, v, *rest)


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
    """The kernel's result [B, H, T, d], for queries, keys and values in the same layout."""
    with_sinks = kernel if sinks_H is None else partial(kernel, sinks=sinks_H.astype(jnp.float32))
    o_BHTd: jax.Array = jax.vmap(with_sinks)(q, k, v, splash.SegmentIds(segments, segments))
    return o_BHTd


def _forward_with_barrier(
    kernel: Any, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, sinks_H: jax.Array | None
) -> tuple[jax.Array, Any]:
    """The result, and the values that the backward pass needs.

    The kernel writes the logarithm of each query 128 times in float32, which is twice the bytes of its result. Without
    the barrier, XLA may keep all copies until the backward pass.
    """
    return jax.lax.optimization_barrier(
        jax.vjp(lambda q, k, v, sinks_H: _each_row(kernel, q, k, v, segments, sinks_H), q, k, v, sinks_H)
    )


def _backward_with_barrier(pull: Any, d_o: jax.Array) -> tuple[Any, ...]:
    d_q, d_k, d_v, d_sinks_H = pull(d_o)
    return None, d_q, d_k, d_v, None, d_sinks_H


_with_barrier = jax.custom_vjp(_each_row)
_with_barrier.defvjp(_forward_with_barrier, _backward_with_barrier)


# ------------------------------------------------------------------ NVIDIA
def _on_gpus(
    interpret: bool,
    window: int | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    ends_BT: jax.Array,
    sinks_H: jax.Array | None,
    positions_BT: jax.Array | None = None,
) -> jax.Array:
    """The kernel's result. Heads are padded to one dimension that Triton supports."""
    d = max(q.shape[-1], v.shape[-1])
    wide = max(_GPU_LEAST, pl.next_power_of_2(d))
    padded = (
        jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, wide - x.shape[-1]))) if x.shape[-1] < wide else x for x in (q, k, v)
    )
    if positions_BT is None:  # without shared tokens, positions in an example are as far apart as columns
        positions_BT = jnp.broadcast_to(jnp.arange(ends_BT.shape[1], dtype=jnp.int32), ends_BT.shape)
    how = How(interpret, window, q.shape[-1] ** -0.5)
    return attend(tree_gpu.KERNELS, how, *padded, ends_BT, sinks_H, positions_BT)[..., : v.shape[-1]]

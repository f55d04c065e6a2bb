"""Grouped matmuls on TPUs: JAX's megablox kernels, for any shapes.

XLA:TPU computes `jax.lax.ragged_dot` as a product of every row with every expert's matrix. Rows without an expert are
not written, so their contents are undefined.

Letters: M rows, E experts, i in, o out.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

_ROWS, _LEAST_ROWS = 128, 16  # of a tile
_LANES = 128  # a tile's side is a multiple of this, or the array's own side
_MOST_OUT = 512  # of a tile
_TILE_BYTES = 4 * 2**20  # of tiles of rows and of a matrix; if they hold all inputs, a matrix is read once


def product(
    x_Mi: jax.Array,
    weight: jax.Array,
    sizes_E: jax.Array,
    layer: jax.Array | None = None,
    *,
    transposed: bool,
    interpret: bool = False,
) -> jax.Array:
    """Each row times its expert's matrix, like `grouped_gpu.product`: [M, o] in the dtype of x.

    x_Mi: rows sorted by expert. weight: [E, i, o], or [E, o, i] if transposed, of any dtype; int8 is copied in the
    dtype of x. sizes_E: int32, rows of each expert. layer: int32 scalar if `weight` holds the matrices of all layers,
    [L, E, ...]; else None. interpret: run the kernel on a CPU, for tests.
    """
    M, rows = x_Mi.shape[0], _rows(x_Mi.shape[0])
    before = None
    if layer is not None:  # the kernel subtracts the offset of its groups, which follow those of earlier layers
        before, weight = -layer * len(sizes_E), weight.reshape(-1, *weight.shape[2:])
    weight = weight.astype(x_Mi.dtype)
    # XLA stores a matrix transposed if its rows would leave lanes empty. The kernel reads it as it is stored.
    if weight.shape[2] % _LANES and weight.shape[1] > weight.shape[2]:
        weight, transposed = weight.swapaxes(1, 2), not transposed
    outs, ins = weight.shape[1:] if transposed else weight.shape[:0:-1]
    out = _side(outs, _MOST_OUT)
    tile = rows, _side(ins, _TILE_BYTES // ((rows + max(out, _LANES)) * weight.dtype.itemsize)), out
    y_Mo: jax.Array = gmm(
        _padded(x_Mi, rows), weight, sizes_E, x_Mi.dtype, tile, before, transpose_rhs=transposed, interpret=interpret
    )
    return y_Mo[:M]


def outer(x_Mi: jax.Array, y_Mo: jax.Array, sizes_E: jax.Array, *, interpret: bool = False) -> jax.Array:
    """[E, i, o] float32: the sum over an expert's rows of their outer products; zeros for an expert without rows."""
    rows = _rows(x_Mi.shape[0])
    tile = rows, _side(x_Mi.shape[1], _MOST_OUT), _side(y_Mo.shape[1], _MOST_OUT)
    x_Mi, y_Mo = _padded(x_Mi, rows), _padded(y_Mo, rows)
    sums: jax.Array = tgmm(x_Mi.T, y_Mo, sizes_E, jnp.float32, tile, interpret=interpret)
    return sums


def _rows(M: int) -> int:
    return max(_LEAST_ROWS, min(_ROWS, 1 << (M - 1).bit_length()))


def _padded(x: jax.Array, rows: int) -> jax.Array:
    """`x` padded to a multiple of `rows` rows."""
    return jnp.pad(x, ((0, -len(x) % rows), (0, 0)))


def _side(size: int, most: int) -> int:
    """The length of a tile along a dimension of `size`: the whole dimension, or the largest divisor up to `most`."""
    if size <= most:
        return size
    parts = (part for part in range(most // _LANES * _LANES, 0, -_LANES) if size % part == 0)
    return next(parts, most // _LANES * _LANES)

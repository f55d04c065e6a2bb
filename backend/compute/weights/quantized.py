"""Base weights stored in 8 or 4 bits.

Int8 has one scale for each output: a quarter of float32's memory, half of bfloat16's. For a matrix as Hugging Face
stores it, W [out, in], scale[o] = max|W[o]| / 127, rounded to the dtype of the activations. values[o, i] =
W[o, i] / scale[o] in float32, rounded to the nearest integer (halves to even) and clipped to +-127. A row of zeros has
scale 0 and values 0. A product is computed as x @ values.T * scale; the matrix values * scale is never made.

FourBit stores two numbers in a byte, and a scale for each block of inputs. A number is an index into a table:

- NF4 (QLoRA, arXiv 2305.14314, section 3): quantiles of the normal distribution, between -1 and 1. A block has 64
  inputs, and its scale is its largest absolute value, rounded to the dtype of the activations. A weight is divided by
  the scale in float32, and rounded to the nearest number of the table. Scales are not quantized again.
- MXFP4 (`mxfp4`), as files store it.

A matrix is dequantized wherever it is used: number * scale in float32, then rounded to the dtype of the activations. So
training and sampling multiply by the same bits.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from tinkerflow.backend.compute.platforms import on_nvidia
from tinkerflow.backend.compute.weights import mxfp4

BLOCK = 64  # inputs that share a scale in NF4
_AT_ONCE = 2**18  # numbers that are rounded at a time, which fit the processor's cache
# Appendix E of the paper, as in bitsandbytes.
NF4 = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    np.float32,
)
TABLES = {"nf4": NF4, "mxfp4": mxfp4.VALUES}


@flax.struct.dataclass
class Int8:
    """A frozen matrix: values int8 [..., out, in], scale [..., out] in the dtype of the activations.

    The values of experts are transposed, [..., in, out].
    """

    values: jax.Array
    scale: jax.Array

    @property
    def size(self) -> int:
        """How many parameters the matrix has."""
        return int(self.values.size)


@flax.struct.dataclass
class FourBit:
    """A frozen matrix: packed uint8 [..., out, in / 2], the number of the first of two inputs in the lower four bits.

    scale: [..., out, blocks], in the dtype of the activations; in MXFP4 uint8, an exponent of two with a bias of 127.
    The matrices of experts are transposed: packed [..., in / 2, out] and scale [..., blocks, out].
    """

    packed: jax.Array
    scale: jax.Array
    table: Literal["nf4", "mxfp4"] = flax.struct.field(pytree_node=False, default="nf4")  # type: ignore[no-untyped-call]

    @property
    def size(self) -> int:
        """How many parameters the matrix has."""
        return 2 * int(self.packed.size)

    def dense(self, dtype: Any, *, of_experts: bool = False) -> jax.Array:
        """The matrix in `dtype`: [..., out, in], or [..., in, out] for experts.

        All operations are elementwise. No program holds the matrices of two layers at a time: loops over layers take a
        layer's part out of the stack first, and backward passes compute the matrix again (`jax.checkpoint`).
        """
        axis = self.packed.ndim - (2 if of_experts else 1)
        before, after, blocks = self.packed.shape[:axis], self.packed.shape[axis + 1 :], self.scale.shape[axis]
        pairs = self.packed.reshape(*before, blocks, -1, 1, *after)
        shifts = jnp.arange(0, 8, 4, dtype=jnp.uint8).reshape(2, *(1 for _ in after))
        codes = (pairs >> shifts) & 15
        # XLA:GPU would keep a constant matrix for each number of a selection from experts, or in a loop over several
        # layers: 26 GB for Qwen3-30B-A3B, and 10 GB for Gemma-3-12B.
        if on_nvidia():
            numbers = jnp.asarray(TABLES[self.table]).at[codes].get(mode="promise_in_bounds")
        else:
            numbers = numbers_of(codes, self.table)
        scale = scale_of(self.scale).reshape(*before, blocks, 1, 1, *after)
        return (numbers * scale).astype(dtype).reshape(*before, -1, *after)


Weight = jax.Array | Int8 | FourBit


def numbers_of(codes: jax.Array, table: str) -> jax.Array:
    """The numbers that `codes` (integers from 0 to 15) stand for, float32.

    They are found by selections, which vectorize, and fuse except on GPUs (`FourBit.dense`). TPUs would gather the
    numbers one by one.
    """
    codes, found = codes.astype(jnp.int32), list(TABLES[table])
    for bit in range(4):
        odd = codes & (1 << bit) != 0
        found = [jnp.where(odd, high, low) for low, high in zip(found[::2], found[1::2], strict=True)]
    numbers: jax.Array = found[0]
    return numbers


def scale_of(scale: jax.Array) -> jax.Array:
    """The scales in float32."""
    if scale.dtype != jnp.uint8:
        return scale.astype(jnp.float32)
    return jax.lax.bitcast_convert_type(scale.astype(jnp.int32) << 23, jnp.float32)  # the exponent of a float32


def scales(rows: npt.NDArray[Any], dtype: Any) -> npt.NDArray[Any]:
    """The scale of each row of `rows` [out, in], [out] in `dtype`. The rows must be complete."""
    return np.asarray(np.max(np.abs(np.asarray(rows, np.float32)), axis=1) / np.float32(127), dtype)


def rounded(rows: npt.NDArray[Any], scale: npt.NDArray[Any]) -> npt.NDArray[np.int8]:
    """The int8 values of `rows`, [out, any part of in]. scale: the scale of the complete rows."""
    wide = np.asarray(scale, np.float32)[:, None]
    steps = np.asarray(rows, np.float32) / np.where(wide > 0, wide, 1)
    return np.clip(np.rint(steps), -127, 127).astype(np.int8)


def block_of(inputs: int) -> int:
    """The inputs that share a scale in NF4: 64, or the largest smaller power of two that divides `inputs`."""
    return math.gcd(inputs, BLOCK)


def block_scales(rows: npt.NDArray[Any], block: int, dtype: Any) -> npt.NDArray[Any]:
    """The NF4 scale of each block of `rows` [out, any blocks of in], [out, blocks] in `dtype`."""
    return np.asarray(np.abs(rows.reshape(len(rows), -1, block)).max(axis=-1), dtype)


def packed(rows: npt.NDArray[Any], block: int, dtype: Any) -> npt.NDArray[np.uint8]:
    """The NF4 numbers of `rows` [out, any blocks of in], [out, in / 2]: two in a byte, the lower four bits first.

    dtype: the scales' dtype.
    """
    between = (NF4[1:] + NF4[:-1]) / 2
    found = np.empty((len(rows), rows.shape[1] // 2), np.uint8)
    step = max(1, _AT_ONCE // rows.shape[1])
    for first in range(0, len(rows), step):
        blocks = np.asarray(rows[first : first + step], np.float32).reshape(-1, block)
        scale = np.asarray(block_scales(blocks, block, dtype), np.float32)
        steps = blocks / np.where(scale > 0, scale, 1)
        codes = np.zeros(steps.shape, np.uint8)
        for border in between:
            codes += (steps > border).view(np.uint8)
        found[first : first + step] = (codes[:, ::2] | codes[:, 1::2] << 4).reshape(-1, found.shape[1])
    return found

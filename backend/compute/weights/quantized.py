"""Base weights kept as int8 with one scale for each output: a quarter of float32's memory, half of bfloat16's.

For a matrix as Hugging Face stores it, W [out, in], scale[o] = max|W[o]| / 127, rounded to the dtype of the
activations. values[o, i] = W[o, i] / scale[o] in float32, rounded to the nearest integer (halves to even) and clipped
to +-127. A row of zeros has scale 0 and values 0. A product is computed as x @ values.T * scale; the matrix
values * scale is never made.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import numpy as np
import numpy.typing as npt


@flax.struct.dataclass
class Int8:
    """A frozen matrix: values int8 [..., out, in], scale [..., out] in the dtype of the activations.

    The values of experts lie the other way, [..., in, out].
    """

    values: jax.Array
    scale: jax.Array

    @property
    def size(self) -> int:
        """How many parameters it has."""
        return int(self.values.size)


Weight = jax.Array | Int8


def scales(rows: npt.NDArray[Any], dtype: Any) -> npt.NDArray[Any]:
    """The scale of each row of `rows` [out, in], [out] in `dtype`. The rows must be complete."""
    return np.asarray(np.max(np.abs(np.asarray(rows, np.float32)), axis=1) / np.float32(127), dtype)


def rounded(rows: npt.NDArray[Any], scale: npt.NDArray[Any]) -> npt.NDArray[np.int8]:
    """The int8 values of `rows`, [out, any part of in]. scale: of the complete rows."""
    wide = np.asarray(scale, np.float32)[:, None]
    steps = np.asarray(rows, np.float32) / np.where(wide > 0, wide, 1)
    return np.clip(np.rint(steps), -127, 127).astype(np.int8)

"""FP8 in blocks, as DeepSeek V3 publishes its matrices: e4m3 numbers, one scale for each block of 128 x 128. No JAX.

DeepSeek V3's report, arXiv 2412.19437, section 3.3.2. The scales are called `weight_scale_inv`, but multiply
the numbers. A number is a sign, an exponent of four bits with a bias of 7, and a fraction of three (arXiv 2209.05433).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

BLOCK = 128
_SMALL = [fraction * 2.0**-9 for fraction in range(8)]  # with exponent 0
_LARGE = [(8 + fraction) * 2.0 ** (exponent - 10) for exponent in range(1, 16) for fraction in range(8)]
_MAGNITUDES = [*_SMALL, *_LARGE[:-1], np.nan]
_VALUES = np.array([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], np.float32)


def scales_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """How many blocks a matrix of this shape has along each side. The last blocks may be smaller."""
    return tuple(-(-size // BLOCK) for size in shape)


def dequantized(bits: npt.NDArray[np.uint8], scales: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """The matrix [rows, columns] in float32. bits: the e4m3 numbers, of that shape. scales: [blocks, blocks]."""
    whole = np.empty(bits.shape, np.float32)
    for place, scales_of_row in enumerate(np.asarray(scales, np.float32)):
        rows = slice(place * BLOCK, (place + 1) * BLOCK)
        np.multiply(_VALUES[bits[rows]], np.repeat(scales_of_row, BLOCK)[: bits.shape[1]], out=whole[rows])
    return whole

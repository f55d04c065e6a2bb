"""Matrices in FP8: e4m3 numbers, and scales that multiply them. No JAX.

DeepSeek V3's files have a scale for each block of 128 x 128 (arXiv 2412.19437, section 3.3.2). Other files have a scale
for each matrix or row. The scales are called `weight_scale_inv` or `weight_scale`, and multiply the numbers in both
cases. A number is a sign, an exponent of four bits with a bias of 7, and a fraction of three (arXiv 2209.05433).
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


def scales_shapes(shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The supported shapes of the scales of a matrix of this shape, by blocks first. The last blocks may be smaller."""
    return tuple(-(-size // BLOCK) for size in shape), (), (1,), (1, 1), (*shape[:1], 1)


def dequantized(bits: npt.NDArray[np.uint8], scales: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """The matrix [rows, columns] in float32. bits: the e4m3 numbers. scales: in a shape of `scales_shapes`."""
    whole, wide = np.empty(bits.shape, np.float32), np.asarray(scales, np.float32)
    by_block = wide.size > 1 and wide.shape != (len(bits), 1)
    for place in range(-(-len(bits) // BLOCK)):
        rows = slice(place * BLOCK, (place + 1) * BLOCK)
        factors = np.repeat(wide[place], BLOCK)[: bits.shape[1]] if by_block else wide[rows] if wide.size > 1 else wide
        np.multiply(_VALUES[bits[rows]], factors, out=whole[rows])
    return whole

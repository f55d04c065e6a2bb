"""MXFP4, as gpt-oss stores its experts: blocks of 32 numbers of 4 bits that share a power of two (OCP MX 1.0). No JAX.

A byte holds two numbers, the lower four bits first. A number is a sign and one of eight magnitudes. A block's scale is
an exponent with a bias of 127.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = np.array([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], np.float32)
_BIAS = 127
BLOCK = 32  # numbers that share a scale


def dequantized(blocks: npt.NDArray[Any], scales: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """The matrix [rows, 32 * blocks] of blocks uint8 [rows, blocks, 16] and scales uint8 [rows, blocks]; exact."""
    pairs = np.stack([VALUES[blocks & 15], VALUES[blocks >> 4]], axis=-1)
    wide = np.ldexp(pairs.reshape(*scales.shape, -1), scales.astype(np.int32)[..., None] - _BIAS)
    whole: npt.NDArray[np.float32] = wide.reshape(len(blocks), -1)
    return whole

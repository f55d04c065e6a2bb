"""Tensors as safetensors bytes and back."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load as load_safetensors
from safetensors.numpy import save as save_safetensors

from tinkerflow.backend.errors import StoreError

Floats = npt.NDArray[np.float32]


def encode(tensors: Mapping[str, Floats]) -> bytes:
    """float32 tensors by name as one safetensors file; StoreError names a tensor of another dtype."""
    for name, array in tensors.items():
        if array.dtype != np.float32:
            raise StoreError(f"tensor {name!r} is {array.dtype}; checkpoints hold float32")
    # safetensors 0.8.0 silently writes wrong bytes for arrays that are not contiguous, such as transposes and slices.
    data: bytes = save_safetensors({k: np.ascontiguousarray(a) for k, a in tensors.items()}, metadata={"format": "pt"})
    return data


def decode(data: bytes) -> dict[str, Floats]:
    """The inverse of `encode`; StoreError when the bytes are not a safetensors file of float32 tensors."""
    try:
        tensors: dict[str, Floats] = load_safetensors(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise StoreError(f"not a safetensors file ({error})") from error
    for name, array in tensors.items():
        if array.dtype != np.float32:
            raise StoreError(f"not of a checkpoint: tensor {name!r} is {array.dtype}; checkpoints hold float32")
    return tensors

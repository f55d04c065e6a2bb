"""Tensors as safetensors bytes and back."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, deserialize
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


def decode_any(data: bytes) -> dict[str, Floats]:
    """The tensors of a safetensors file that others wrote, as float32; StoreError when it has others than floats."""
    try:
        found = deserialize(data)  # type: ignore[no-untyped-call]
    except (SafetensorError, ValueError) as error:
        raise StoreError(f"not a safetensors file ({error})") from error
    return {name: _widened(name, each["dtype"], each["data"]).reshape(each["shape"]) for name, each in found}


def _widened(name: str, dtype: str, raw: bytearray) -> Floats:
    if dtype == "BF16":  # the first half of a float32
        return (np.frombuffer(raw, "<u2").astype("<u4") << 16).view(np.float32)
    if dtype == "F16":
        return np.frombuffer(raw, "<f2").astype(np.float32)
    if dtype == "F32":
        return np.frombuffer(raw, "<f4")
    raise StoreError(f"not of an adapter: tensor {name!r} is {dtype}; it must be F32, F16 or BF16")

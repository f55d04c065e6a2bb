"""The safetensors files of a Hugging Face folder, and the tensors in them. No JAX."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import numpy.typing as npt
import safetensors

from tinkerflow.backend.compute.weights.fp8 import BLOCK, dequantized, scales_shapes
from tinkerflow.backend.core.errors import UserError

Read = TypeVar("Read")
WEIGHTS = "model.safetensors"
_FP8, _SCALES = "F8_E4M3", ("_scale_inv", "_scale")  # the tensor named `key` + one of _SCALES holds a matrix's scales
_OF_INPUTS = ("input_scale", "activation_scale")  # scales with which other programs round a matrix's inputs to FP8
INDEX = "model.safetensors.index.json"
# The supported dtypes of weights, by safetensors' names.
DTYPES: Mapping[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F64": np.float64}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file. dtype: safetensors' name of its dtype, such as "BF16". raw: its bytes, in a memory map."""

    shape: tuple[int, ...]
    dtype: str
    raw: npt.NDArray[np.uint8]

    def view(self, dtype: Any) -> npt.NDArray[Any]:
        """The elements as an array. dtype: the NumPy dtype that matches. Reading the array reads the file."""
        elements: npt.NDArray[Any] = self.raw.view(dtype)
        return elements.reshape(self.shape)


@dataclass(frozen=True)
class MadeTensor:
    """A tensor that is computed from other tensors when it is read: a part of a fused tensor, or dequantized blocks.

    make: takes the matching NumPy dtype, and returns the elements. packed: returns a matrix that the file stores
    in MXFP4, as uint8: [rows, columns / 2], two numbers in a byte, and scales [rows, blocks]; None = it is not MXFP4.
    """

    shape: tuple[int, ...]
    dtype: str
    make: Callable[[Any], npt.NDArray[Any]]
    packed: Callable[[], tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]] | None = None

    def view(self, dtype: Any) -> npt.NDArray[Any]:
        """The elements. dtype: the NumPy dtype that matches."""
        made = self.make(dtype)
        assert made.shape == self.shape
        assert made.dtype == np.dtype(dtype)
        return made


Tensor = StoredTensor | MadeTensor


def read_object(path: Path, name: str) -> Mapping[str, Any]:
    """The JSON object in a file of the base model `name`. UserError: the file is missing or unreadable, or has none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"base model {name!r}: {path} cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise UserError(f"base model {name!r}: {path} contains a {type(value).__name__}, not an object")
    return value


def open_tensors(folder: Path, name: str) -> dict[str, Tensor]:
    """Every tensor of the base model `name`, by Hugging Face's name. Files stay mapped while a tensor is referenced.

    Matrices in FP8 (`fp8`) appear as float32 matrices.
    UserError: a file is missing, or is not a safetensors file.
    """
    tensors: dict[str, Tensor] = {}
    for file in _files(folder, name):
        stored = _read(folder / file, name, _open_file)
        if twice := sorted(tensors.keys() & stored.keys()):
            raise _broken(name, f"tensor {twice[0]!r} is in {file} and in another file")
        tensors |= stored
    return _without_fp8(tensors, name)


def stored_names(folder: Path, name: str) -> Collection[str]:
    """The names of the tensors of the base model `name`, from its index or its only file; () if it has neither."""
    if (folder / WEIGHTS).is_file():
        return _read(folder / WEIGHTS, name, _names)
    return _weight_map(folder, name) if (folder / INDEX).is_file() else ()


def modified(folder: Path) -> tuple[int, ...]:
    """When the weights file and the index of the model in `folder` were last modified, in nanoseconds."""
    return tuple(path.stat().st_mtime_ns for path in (folder / WEIGHTS, folder / INDEX) if path.is_file())


def _read(path: Path, name: str, read: Callable[[Path], Read]) -> Read:
    """read(path). UserError: the file is missing, or is not a safetensors file."""
    try:
        return read(path)
    except FileNotFoundError as error:
        raise _broken(name, f"there is no {path}; weights must be safetensors") from error
    except (OSError, safetensors.SafetensorError) as error:
        raise _broken(name, f"{path} is not a safetensors file ({error})") from error


def _without_fp8(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """The tensors with plain matrices instead of FP8 matrices and their scales."""
    found = dict(tensors)
    for key, matrix in tensors.items():
        scaled = next((key + end for end in _SCALES if key + end in tensors), None)
        if matrix.dtype != _FP8 or len(matrix.shape) != 2 or scaled is None:
            continue  # reported later, as a tensor that the model does not use
        scales, shapes = tensors[scaled], scales_shapes(matrix.shape)
        if scales.shape not in shapes or scales.dtype not in ("F32", "BF16"):
            raise _broken(
                name,
                f"tensor {scaled!r} is {scales.dtype} of shape {scales.shape}; must be F32 or BF16 of shape "
                f"{shapes[0]}, a scale for each {BLOCK} x {BLOCK} of {key!r}, {shapes[-1]} for each row, or () for all",
            )
        for other in (scaled, *(key.removesuffix("weight") + end for end in _OF_INPUTS)):
            found.pop(other, None)
        found[key] = MadeTensor(matrix.shape, "F32", partial(_widened, matrix, scales))
    return found


def _widened(matrix: Tensor, scales: Tensor, _: Any) -> npt.NDArray[Any]:
    if scales.dtype == "F32":
        return dequantized(matrix.view(np.uint8), scales.view(np.float32))
    wide = scales.view(np.uint16).astype(np.uint32) << 16  # BF16 is the first half of F32
    return dequantized(matrix.view(np.uint8), wide.view(np.float32))


def _open_file(path: Path) -> dict[str, StoredTensor]:
    # safetensors reads the header, and refuses files whose tensors do not follow each other up to the end. Its own
    # slices are copies: loading a model with them took twice the CPU time of a memory map.
    opened: Any = safetensors.safe_open(path, framework="numpy")
    data = np.memmap(path, dtype=np.uint8, mode="r")
    tensors: dict[str, StoredTensor] = {}
    end = len(data)
    for key in reversed(opened.offset_keys()):
        stored = opened.get_slice(key)
        shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
        begin = end - prod(shape) * _bits(dtype) // 8
        tensors[key] = StoredTensor(shape, dtype, data[begin:end])
        end = begin
    return tensors


def _names(path: Path) -> list[str]:
    opened: Any = safetensors.safe_open(path, framework="numpy")
    return list(opened.keys())


def _bits(dtype: str) -> int:
    """The size of an element: the first number in safetensors' name, as in "BF16" and "F8_E4M3"; 8 for "BOOL"."""
    size = re.search(r"\d+", dtype)
    return int(size[0]) if size else 8


def _files(folder: Path, name: str) -> list[str]:
    """The files with weights. A single file takes precedence over an index, as in transformers."""
    if (folder / WEIGHTS).is_file() or not (folder / INDEX).is_file():
        return [WEIGHTS]
    return sorted(set(_weight_map(folder, name).values()))


def _weight_map(folder: Path, name: str) -> Mapping[str, str]:
    """The file of each tensor, from the index."""
    weight_map = read_object(folder / INDEX, name).get("weight_map")
    if not isinstance(weight_map, dict):
        raise _broken(name, f"{folder / INDEX} has no object 'weight_map'")
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or "\0" in file or ".." in (path := Path(file)).parts or path.is_absolute():
            raise _broken(name, f"{folder / INDEX}: weight_map[{tensor!r}] is {file!r}: must be a path below the index")
    return weight_map


def _broken(name: str, why: str) -> UserError:
    return UserError(f"base model {name!r}: its safetensors cannot be read: {why}")

"""Tensors of a forward_backward request as NumPy arrays: dense and CSR, 1-D and 2-D. No loop runs per token."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from tinkerflow.backend.errors import UserError, broken
from tinkerflow.backend.wire import tinker_pb2 as pb

_DTYPES: dict[int, np.dtype[Any]] = {
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_INT64: np.dtype("<i8"),
    pb.DTYPE_INT32: np.dtype("<i4"),
}
_INT64 = np.dtype("<i8")


def shape_of(tensor: pb.Tensor, name: str) -> tuple[int, ...]:
    """The declared shape, [T] or [T, K]; an empty one means 1-D. Nothing is allocated, so it can be checked first."""
    shape = tuple(tensor.shape)
    if not shape:
        if tensor.WhichOneof("encoding") == "sparse_csr":
            raise broken(f"{name}.shape", [], "given for a sparse tensor")
        return (len(tensor.dense) // dtype_of(tensor, name).itemsize,)
    if len(shape) > 2 or min(shape) < 0:
        raise broken(f"{name}.shape", list(shape), "[T] or [T, K]")
    return shape


def dtype_of(tensor: pb.Tensor, name: str) -> np.dtype[Any]:
    """The tensor's dtype: float32, int64 or int32."""
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise broken(f"{name}.dtype", tensor.dtype, "FLOAT32 (1), INT64 (2) or INT32 (3)")
    return dtype


def to_array(tensor: pb.Tensor, shape: tuple[int, ...], name: str) -> npt.NDArray[Any]:
    """The tensor as an array of its dtype and of `shape` (see shape_of); sparse cells that are not listed are 0.

    `name` is how errors call it, such as data[3].loss_fn_inputs['weights'].
    """
    dtype = dtype_of(tensor, name)
    if tensor.WhichOneof("encoding") == "sparse_csr":
        return _from_csr(tensor.sparse_csr, shape, dtype, name)
    return _read(tensor.dense, dtype, math.prod(shape), name).reshape(shape)


def _read(data: bytes, dtype: np.dtype[Any], count: int, name: str) -> npt.NDArray[Any]:
    if len(data) != count * dtype.itemsize:
        raise UserError(
            f"{name} has {len(data)} bytes of data: {count} values of {dtype.name} need {count * dtype.itemsize}"
        )
    return np.frombuffer(data, dtype)


def _from_csr(csr: pb.SparseCsr, shape: tuple[int, ...], dtype: np.dtype[Any], name: str) -> npt.NDArray[Any]:
    if len(shape) != 2:
        raise broken(f"{name}.shape", list(shape), "[T, K] for a sparse tensor")
    rows, columns = shape
    stored = len(csr.values) // dtype.itemsize
    values = _read(csr.values, dtype, stored, f"{name}.values")
    crow = _read(csr.crow_indices, _INT64, rows + 1, f"{name}.crow_indices")
    cols = _read(csr.col_indices, _INT64, stored, f"{name}.col_indices")
    counts = np.diff(crow)
    if crow[0] != 0 or crow[-1] != stored or (counts < 0).any():
        raise UserError(f"{name}.crow_indices must start at 0, never fall, and end at {stored}, the number of values")
    if stored and (cols.min() < 0 or cols.max() >= columns):
        raise UserError(
            f"{name}.col_indices has values from {cols.min()} to {cols.max()}: must be >= 0 and < {columns}"
        )
    cells = np.repeat(np.arange(rows) * columns, counts) + cols
    if (np.diff(cells) <= 0).any():
        raise UserError(f"{name}.col_indices must rise strictly within each row")
    dense = np.zeros(rows * columns, dtype)
    dense[cells] = values
    return dense.reshape(shape)

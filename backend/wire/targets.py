"""target_prompt_logprobs: tokens to be scored at each place of a prompt, and the answer in the layout of the question.

The JSON tensor is `{data, dtype, shape}`, dense and row-major, or CSR with sparse_crow_indices and sparse_col_indices.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tinkerflow.backend.commands import Float32, Int32
from tinkerflow.backend.errors import UserError, broken
from tinkerflow.backend.wire import tinker_pb2 as pb
from tinkerflow.backend.wire.requests import MAX_LISTED, TargetTensor

_NAME = "target_prompt_logprobs"
_Int64 = npt.NDArray[np.int64]


def target_tokens(tensor: TargetTensor | None, prompt: int, vocab_size: int) -> Int32 | None:
    """The tokens as int32 [prompt - 1, K], -1 = none, or None when nothing is asked.

    prompt: tokens of the prompt. vocab_size: of the model. UserError names what is wrong with the tensor.
    """
    if tensor is None:
        return None
    if tensor.dtype != "int64":
        raise broken(f"{_NAME}.dtype", tensor.dtype, "'int64'")
    rows, columns = _shape(tensor.shape)
    if rows != prompt - 1 or not 1 <= columns <= MAX_LISTED:
        rule = f"[{prompt - 1}, K], the prompt's length less one, with K from 1 to {MAX_LISTED}"
        raise broken(f"{_NAME}.shape", [rows, columns], rule)
    data = _whole_numbers("data", tensor.data)
    outside = np.flatnonzero((data < -1) | (data >= vocab_size))
    if len(outside):
        place = int(outside[0])
        raise broken(f"{_NAME}.data[{place}]", int(data[place]), f"-1 (nothing) or a token, >= 0 and < {vocab_size}")
    if tensor.crow is not None or tensor.cols is not None:
        crow, cols = _csr(tensor, rows, columns, len(data))
        tokens = np.full((rows, columns), -1, np.int32)
        tokens[np.repeat(np.arange(rows), np.diff(crow)), cols] = data
        return tokens
    if len(data) != rows * columns:
        raise UserError(f"{_NAME}.data has {len(data)} values: the shape [{rows}, {columns}] needs {rows * columns}")
    return data.astype(np.int32).reshape(rows, columns)


def encode_targets(tensor: TargetTensor, logprobs_TK: Float32) -> pb.Tensor:
    """The logprobs [T - 1, K] as a float32 tensor of the shape and layout of the request's `tensor`."""
    answer = pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=list(logprobs_TK.shape))
    if tensor.crow is None:
        answer.dense = logprobs_TK.astype("<f4", copy=False).tobytes()
        return answer
    crow, cols = _indices(tensor)
    cells = logprobs_TK[np.repeat(np.arange(len(crow) - 1), np.diff(crow)), cols]
    answer.sparse_csr.values = cells.astype("<f4", copy=False).tobytes()
    answer.sparse_csr.crow_indices = crow.astype("<i8", copy=False).tobytes()
    answer.sparse_csr.col_indices = cols.astype("<i8", copy=False).tobytes()
    return answer


def _shape(shape: Any) -> tuple[int, int]:
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(size) is int and size >= 0 for size in shape):
        raise broken(f"{_NAME}.shape", shape, "[T, K]")
    return shape[0], shape[1]


def _whole_numbers(name: str, given: Any) -> _Int64:
    if not isinstance(given, list) or not all(type(value) is int and -(2**63) <= value < 2**63 for value in given):
        raise broken(f"{_NAME}.{name}", given, "a flat list of whole numbers")
    return np.array(given, np.int64)


def _indices(tensor: TargetTensor) -> tuple[_Int64, _Int64]:
    return _whole_numbers("sparse_crow_indices", tensor.crow), _whole_numbers("sparse_col_indices", tensor.cols)


def _csr(tensor: TargetTensor, rows: int, columns: int, stored: int) -> tuple[_Int64, _Int64]:
    crow, cols = _indices(tensor)
    if len(crow) != rows + 1 or crow[0] != 0 or crow[-1] != stored or (np.diff(crow) < 0).any():
        raise UserError(f"{_NAME}.sparse_crow_indices must be {rows + 1} numbers from 0 to {stored} that never fall")
    if len(cols) != stored or (stored and (cols.min() < 0 or cols.max() >= columns)):
        raise UserError(f"{_NAME}.sparse_col_indices must be {stored} numbers, >= 0 and < {columns}")
    if (np.diff(np.repeat(np.arange(rows) * columns, np.diff(crow)) + cols) <= 0).any():
        raise UserError(f"{_NAME}.sparse_col_indices must rise strictly within each row")
    return crow, cols

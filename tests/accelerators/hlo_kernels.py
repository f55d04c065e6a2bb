"""Bytes and flops of kernels for `hlo_text`, by parts of their names. A program's text shows only their operands."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

_FLOATS, _HEADS = ("bf16", "f32"), 3  # dtypes and fewest dimensions of queries and keys
_BITS = {"pred": 8, "bf16": 16, "c64": 64, "c128": 128, "token": 0, "opaque": 0}


@dataclass(frozen=True)
class Shape:
    """One array of the text. space: the memory space, 0 = the device's main memory."""

    dtype: str
    dims: tuple[int, ...]
    space: int = 0

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def nbytes(self) -> int:
        """Bytes without padding."""
        bits = _BITS.get(self.dtype) or int((re.search(r"\d+", self.dtype) or [8])[0])
        return self.size * bits // 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


def _attention(products: int, keys: int) -> Callable[[list[Shape], Shape], int]:
    """Flops of causal attention with `products` matmuls of the size of its scores. keys: the axis of k's tokens."""

    def flops(operands: list[Shape], result: Shape) -> int:
        q, k, *_ = [one for one in operands if one.dtype in _FLOATS and len(one.dims) >= _HEADS]  # no mask tables
        return products * q.size * k.dims[keys]

    return flops


def _pages(operands: list[Shape], label: str) -> int:
    """Bytes of keys and values in GPUs' [L, N, ...], and of queries. label: names the positions of a window, if any."""
    _, tables, _, q, *pages = operands  # values have no pages if they are a part of keys
    (rows, wide), window = tables.dims, re.search(r"paged_attention_of_(\d+)", label)
    seen = wide if window is None else min(wide, 1 + -(-(int(window[1]) - 1) // pages[0].dims[4]))
    return rows * seen * sum(part.nbytes for part in pages) // (pages[0].dims[0] * pages[0].dims[1]) + q.nbytes


def _stacks(operands: list[Shape]) -> list[Shape]:
    """Stacks [L, ..., out, in] of matrices that share rows. Other operands are tables, with fewer axes."""
    return [one for one in operands if len(one.dims) > len("Mi")]


def _one_layer(operands: list[Shape], _: str) -> int:
    """Bytes of rows, and of one layer of each stack."""
    rows, *others = operands
    return rows.nbytes + sum(stack.nbytes // stack.dims[0] for stack in _stacks(others))


def _products(operands: list[Shape], _: Shape) -> int:
    """Flops of rows [..., M, in] times a matrix of each stack."""
    rows, *others = operands
    return 2 * rows.dims[-2] * sum(stack.size // math.prod(stack.dims[:-2]) for stack in _stacks(others))


def _packed_layer(operands: list[Shape], label: str) -> int:
    """Bytes of both halves of rows, and of one layer of each stack and of its scales."""
    return operands[0].nbytes + _one_layer(operands[1:], label)


def _packed_products(operands: list[Shape], result: Shape) -> int:
    """Flops of both halves of rows times a matrix of each stack. Each stack is followed by its scales."""
    even, _, *others = operands
    return 2 * _products([even, *_stacks(others)[::2]], result)


def _of_adapted(
    figure: Callable[..., int], updates: Callable[..., int], operands: list[Shape], more: Shape | str
) -> int:
    """A figure of a kernel that also adds updates.

    Its operands are those of the kernel without them, then the parts of the products with A [P, M, S K], S stacks of B
    [L, K, out], and tables. updates: the figure of the operands from the parts on.
    """
    (low,) = (
        place
        for place, one in enumerate(operands)
        if one.dtype == "f32" and len(one.dims) == len("PMK") and one.dims[1] == operands[0].dims[0]
    )
    return figure(operands[:low], more) + updates(operands[low:], more)


def _one_matrix_each(operands: list[Shape], _: str) -> int:
    """Bytes of rows, and of the experts' matrices of one layer, out of [L E, ...]. `ends` has E + 1 elements."""
    ends, rows, matrices = operands[1], *operands[-2:]
    return rows.nbytes + matrices.nbytes * (ends.size - 1) // matrices.dims[0]


def _ragged_pages(operands: list[Shape], _label: str) -> int:
    """Bytes of keys and values in TPUs' [L N, P, 2 G, d], and of queries."""
    _, tables, _, _, _, q, pages = operands
    return tables.size * pages.nbytes // pages.dims[0] + q.nbytes


def _states(operands: list[Shape], _: str) -> int:
    """Bytes of linear attention's states [L, N, H, k, v], read and written, and of tokens' arrays [B, H, ...]."""
    pool = next(one for one in operands if len(one.dims) == len("LNHkv"))
    tokens = [one for one in operands if one.dtype == "f32" and one is not pool]
    rows = tokens[0].dims[0]
    return 2 * rows * pool.nbytes // (pool.dims[0] * pool.dims[1]) + sum(one.nbytes for one in tokens)


def _chunks(state: Shape, readers: Shape, reads: Shape) -> int:
    """Flops of three products with the state [B, H, k, v], and of one with the changes of a chunk's tokens."""
    return 2 * (3 * readers.size + reads.size) * state.dims[3]


_OF_A_LAYER = ("layer_product", "grouped_product", "adapter_low", "adapter_update")  # rows times matrices of stacks

# Bytes read, and written in place, by kernels that get the stack of all layers and use one layer.
READ: dict[str, Callable[[list[Shape], str], int]] = {
    "delta_step": _states,
    "(gmm)": _one_matrix_each,  # `tgmm` takes no stack
    "ragged_paged_attention": _ragged_pages,
    "paged_attention": _pages,
    "layer_product_adapted": partial(_of_adapted, _one_layer, _one_layer),
    "packed_product_adapted": partial(_of_adapted, _packed_layer, _one_layer),
    "packed_product": _packed_layer,
    **dict.fromkeys(_OF_A_LAYER, _one_layer),
}

LOGITS = {"softmax_totals": True, "softmax_again": True}  # kernels that multiply rows by the unembedding

# Flops of kernels that state no cost: Triton kernels cannot, and JAX's splash attention does not. Attention has
# [B, T, H, d] on GPUs and [B, H, T, d] on TPUs. The backward pass recomputes the scores, on GPUs in both loops.
KERNELS: dict[str, Callable[[list[Shape], Shape], int]] = {
    "delta_chunks_backward": lambda operands, _: _chunks(operands[0], *operands[3:5]),
    "delta_chunk_states": lambda operands, _: 4 * operands[3].size * operands[0].dims[3],
    "delta_chunks": lambda operands, _: _chunks(operands[0], *operands[4:6]),
    "delta_step": lambda operands, result: 8 * result.size * operands[0].dims[3],
    "tree_attention_forward": _attention(2, 1),  # trees with branches have fewer
    "tree_attention_dq": _attention(3, 1),
    "tree_attention_dkv": _attention(4, 1),
    "ragged_paged_attention": lambda operands, result: 4 * operands[5].size * operands[1].dims[1] * operands[6].dims[1],
    "paged_attention": lambda operands, result: 4 * operands[3].size * operands[1].dims[1] * operands[4].dims[4],
    "layer_product_adapted": partial(_of_adapted, _products, _products),
    "packed_product_adapted": partial(_of_adapted, _packed_products, _products),
    "packed_product": _packed_products,
    **dict.fromkeys(_OF_A_LAYER, _products),
    "splash_mha_fwd": _attention(2, -2),
    "splash_mha_dkv": _attention(4, -2),
    "splash_mha_dq": _attention(3, -2),
    "softmax_slopes_by_adapter": lambda operands, result: 4 * result.size * operands[-1].dims[0],
    "softmax_slopes": lambda operands, result: 0,
    "grouped_outer": lambda operands, result: 2 * operands[0].size * operands[1].dims[-1],
}

"""Calls Pallas kernels through Triton so that they read and write the right places in arrays of every size.

JAX 0.10 and 0.11 count a kernel's offsets in elements, but choose their width by bytes: 64 bits for arrays of more than
2**32 bytes. In an array of one-byte numbers with more than 2**31 and up to 2**32 elements, offsets of 32 bits wrap, and
the kernel reads other memory without an error. Int8 weights and float8 pages have such sizes. Therefore JAX's function
gets the shape of such an array with a wider dtype; it uses only the dtype's size. If JAX has no such function, arrays
of these sizes are refused.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

LEAST_SIDE = 16  # of a tile; tensor cores multiply 16 x 16
MULTIPROCESSORS = 132  # of an H100
_OFFSETS = "_compute_offsets_from_indices"  # of JAX's lowering
_MOST = 2**31  # elements of an array that offsets of 32 bits reach; also the limit of the first axis of a grid
_MOST_BYTES = 2**32  # of an array for which JAX uses offsets of 32 bits
_MOST_OTHER = 2**16 - 1  # programs along the second and the third axis of CUDA's grids


def triton_call(
    kernel: Callable[..., None], *, grid: tuple[int, ...], name: str, interpret: bool, **how: Any
) -> Callable[..., Any]:
    """`pl.pallas_call` of a kernel for NVIDIA GPUs. The returned function takes the kernel's arrays.

    kernel, how: as for `pl.pallas_call`. grid: at most three axes. name: the kernel's name, also used in errors.
    interpret: run the kernel on a CPU, for tests. The call raises ValueError for a grid that CUDA does not support, and
    NotImplementedError for an array in which offsets would wrap.
    """
    call = pl.pallas_call(kernel, grid=grid, name=name, interpret=interpret, **how)

    def checked(*arrays: jax.Array) -> Any:
        if not interpret:
            _check_grid(name, grid)
            for array in (*arrays, *jax.tree.leaves(how["out_shape"])):
                _check_size(name, array)
        return call(*arrays)

    return checked


def _check_grid(name: str, grid: tuple[int, ...]) -> None:
    first, *others = grid
    if first >= _MOST or any(programs > _MOST_OTHER for programs in others):
        rule = f"at most {_MOST - 1} programs along the first axis, and {_MOST_OTHER} along the others"
        raise ValueError(f"kernel {name}: grid {grid}: CUDA takes {rule}")


def _check_size(name: str, array: Any) -> None:
    if _wraps(array) and not _widened():
        rule = f"offsets of 32 bits reach {_MOST} elements, and this JAX does not let us choose wider ones"
        raise NotImplementedError(f"kernel {name}: array {array.dtype}{list(array.shape)}: {rule}")


def _wraps(array: Any) -> bool:
    """Whether JAX would use offsets of 32 bits for more elements than they reach."""
    elements = math.prod(array.shape)
    return elements > _MOST and elements * jnp.dtype(array.dtype).itemsize <= _MOST_BYTES


@functools.cache
def _widened() -> bool:
    """Make JAX use offsets of 64 bits for arrays that wrap. False if this JAX has no function for that."""
    from jax._src.pallas.triton import lowering

    original = getattr(lowering, _OFFSETS, None)
    if original is None:
        return False

    def offsets(block_info: Any, indices: Any) -> Any:
        whole = block_info.full_shape_dtype
        if _wraps(whole):
            block_info = replace(block_info, full_shape_dtype=jax.ShapeDtypeStruct(whole.shape, jnp.int16))
        return original(block_info, indices)

    setattr(lowering, _OFFSETS, offsets)
    return True

"""The shape of each op's result in a traced loss, from the shapes of its arguments, without values and without JAX.

The engine uses shapes to bound the work of a loss before a worker gets it. `compute/training/custom_loss/ops.py`
implements the same ops on arrays, and a test compares the shapes. An op without a rule is elementwise: its operands
broadcast.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

LONGEST_RANGE = 2**20  # of an arange
MAX_DIFFERENCES = 64  # of diff: each is a separate operation


@dataclass(frozen=True)
class Shaped:
    """The shape of a tensor, without its values."""

    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of cells."""
        return math.prod(self.shape)


class Extremes(NamedTuple):
    """The result of max or min along a dimension."""

    values: Any
    indices: Any


Rule = Callable[..., Any]


def shape_of(op: str, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """The result of an op: Shaped for a tensor, the value itself for sizes and other numbers.

    args, named: Shaped for tensors, everything else unchanged. TypeError, ValueError or IndexError: they do not fit.
    """
    rule: Rule = RULES.get(op) or (_numeric(op) if op.startswith(("operator.", "math.")) else _elementwise)
    return rule(*args, **named)


def _elementwise(*args: Any, **named: Any) -> Shaped:
    shapes = [x.shape for x in (*args, *named.values()) if isinstance(x, Shaped)]
    if not shapes:
        raise TypeError("an argument must be a tensor")
    return Shaped(np.broadcast_shapes(*shapes))


def _numeric(op: str) -> Rule:
    """The rule of an operator or a math function, which takes tensors, or numbers such as sizes."""
    module, name = op.split(".")
    function: Rule = getattr(operator if module == "operator" else math, name)

    def number(*args: Any) -> Any:
        if any(isinstance(arg, Shaped) for arg in args):
            return _elementwise(*args)
        for arg in args:
            if not isinstance(arg, bool | int | float):
                raise TypeError(f"{type(arg).__name__} is neither a tensor nor a number")
        return float(args[0]) ** float(args[1]) if op == "operator.pow" else function(*args)

    return number


def same(x: Shaped, *_: Any, **__: Any) -> Shaped:
    """The shape of the first argument."""
    return Shaped(x.shape)


def _axes(dim: Any, rank: int) -> set[int]:
    dims = range(rank) if dim is None else dim if isinstance(dim, list | tuple) else (dim,)
    for each in dims:
        if not -rank <= each < rank:
            raise IndexError(f"dimension {each} of a tensor with {rank}")
    return {each % rank for each in dims}


def _axis(dim: Any, rank: int) -> int:
    (axis,) = _axes((dim,), rank)
    return axis


def _reduce(
    x: Shaped, dim: Any = None, keepdim: bool = False, dtype: Any = None, *, empty: Any = None, **named: Any
) -> Shaped:
    """The shape of a reduction. empty: the dimensions of an empty list of them, None = all."""
    dim, keepdim = named.get("axis", dim), named.get("keepdims", keepdim)
    axes = _axes(empty if isinstance(dim, list | tuple) and not dim else dim, len(x.shape))
    kept = ((1 if i in axes else size) for i, size in enumerate(x.shape) if keepdim or i not in axes)
    return Shaped(tuple(kept))


def _spread(x: Shaped, dim: Any = None, unbiased: bool = True, keepdim: bool = False, correction: Any = None) -> Shaped:
    return _reduce(x, None if isinstance(dim, bool) else dim, keepdim)


def _extreme(x: Shaped, dim: Any = None, keepdim: bool = False, other: Any = None) -> Any:
    other = dim if isinstance(dim, Shaped) else other
    if other is not None:
        return _elementwise(x, other)
    if dim is None:
        return Shaped(())
    return Extremes(_reduce(x, dim, keepdim), _reduce(x, dim, keepdim))


def _reduced(
    x: Any,
    target: Any,
    reduction: str = "mean",
    *_: Any,
    weight: Shaped | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    **__: Any,
) -> Shaped:
    if size_average is not None or reduce is not None:
        raise ValueError("size_average and reduce are not supported: must be left out, in favor of reduction")
    if weight is not None and weight.shape != x.shape:
        raise ValueError(f"weight of shape {list(weight.shape)} for a tensor of shape {list(x.shape)}")
    whole = _elementwise(x, target)
    return whole if reduction == "none" else Shaped(())


def _sizes(sizes: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], list | tuple) else tuple(sizes)


def _reshape(x: Shaped, *shape: Any, **named: Any) -> Shaped:
    sizes = _sizes(shape or (named["shape"],))
    if not all(isinstance(size, int) for size in sizes):
        return Shaped(x.shape)  # view(dtype)
    known = math.prod(size for size in sizes if size != -1)
    free = x.size // known if sizes.count(-1) == 1 and known else 0
    wanted = tuple(free if size == -1 else size for size in sizes)
    if min(wanted, default=0) < 0 or math.prod(wanted) != x.size:
        raise ValueError(f"shape {list(x.shape)} does not fit into {list(sizes)}")
    return Shaped(wanted)


def _flatten(x: Shaped, start_dim: int = 0, end_dim: int = -1) -> Shaped:
    rank = max(len(x.shape), 1)
    start, end = start_dim % rank, end_dim % rank
    return _reshape(x, *x.shape[:start], -1, *x.shape[end + 1 :])


def _squeeze(x: Shaped, dim: Any = None) -> Shaped:
    gone = _axes(dim, len(x.shape))
    return Shaped(tuple(size for i, size in enumerate(x.shape) if size != 1 or i not in gone))


def _unsqueeze(x: Shaped, dim: int) -> Shaped:
    at = _axis(dim, len(x.shape) + 1)
    return Shaped((*x.shape[:at], 1, *x.shape[at:]))


def _transpose(x: Shaped, dim0: int, dim1: int) -> Shaped:
    shape, first, second = list(x.shape), _axis(dim0, len(x.shape)), _axis(dim1, len(x.shape))
    shape[first], shape[second] = shape[second], shape[first]
    return Shaped(tuple(shape))


def _permute(x: Shaped, *sizes: Any, dims: Any = ()) -> Shaped:
    order = [_axis(dim, len(x.shape)) for dim in _sizes(sizes or (dims,))]
    if sorted(order) != list(range(len(x.shape))):
        raise ValueError(f"dims {order} of a tensor with {len(x.shape)} dimensions")
    return Shaped(tuple(x.shape[i] for i in order))


def _expand(x: Shaped, *sizes: Any) -> Shaped:
    wanted = _sizes(sizes)
    padded = (1,) * (len(wanted) - len(x.shape)) + x.shape
    target = tuple(n if size == -1 else size for size, n in zip(wanted, padded, strict=True))
    if np.broadcast_shapes(x.shape, target) != target:
        raise ValueError(f"shape {list(x.shape)} does not expand to {list(wanted)}")
    return Shaped(target)


def _resized(x: Shaped, dim: int, size: int) -> Shaped:
    """The tensor with `size` as the size of dimension `dim`."""
    axis = _axis(dim, len(x.shape))
    return Shaped((*x.shape[:axis], size, *x.shape[axis + 1 :]))


def _narrow(x: Shaped, dim: int, start: int, length: int) -> Shaped:
    first = start + x.shape[dim] if start < 0 else start
    if not 0 <= first <= first + length <= x.shape[dim]:
        raise ValueError(f"start {start} and length {length} of a dimension with {x.shape[dim]}")
    return _resized(x, dim, length)


def _index_select(x: Shaped, dim: int, index: Shaped) -> Shaped:
    axis = _axis(dim, len(x.shape))
    return Shaped((*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]))


def _gather(x: Shaped, dim: int, index: Shaped, **_: Any) -> Shaped:
    read = _resized(x, dim, index.shape[dim])
    if len(index.shape) != len(x.shape) or any(size > most for size, most in zip(index.shape, read.shape, strict=True)):
        raise ValueError(f"index of shape {list(index.shape)} for a tensor of shape {list(x.shape)}, dim {dim}")
    return Shaped(index.shape)


def _diff(x: Shaped, n: int = 1, dim: int = -1) -> Shaped:
    if not 0 <= n <= MAX_DIFFERENCES:
        raise ValueError(f"n is {n}: must be 0 to {MAX_DIFFERENCES}")
    return _resized(x, dim, max(0, x.shape[dim] - n))


def contracted(x: Shaped) -> int:
    """The length of the dimension over which a matrix product with `x` on its left sums."""
    return x.shape[-1] if x.shape else 1


def _matmul(x: Shaped, other: Shaped) -> Shaped:
    left = x.shape if len(x.shape) > 1 else (1, *x.shape)
    right = other.shape if len(other.shape) > 1 else (*other.shape, 1)
    if not x.shape or not other.shape or left[-1] != right[-2]:
        raise ValueError(f"shapes {list(x.shape)} and {list(other.shape)} do not multiply")
    rows, columns = left[-2:-1] if len(x.shape) > 1 else (), right[-1:] if len(other.shape) > 1 else ()
    return Shaped((*np.broadcast_shapes(left[:-2], right[:-2]), *rows, *columns))


def _dot(x: Shaped, other: Shaped) -> Shaped:
    if len(x.shape) > 2 or len(other.shape) > 2:
        raise ValueError("more than two dimensions")
    return _matmul(x, other) if x.shape and other.shape else _elementwise(x, other)


def _stack(tensors: Sequence[Shaped], dim: int = 0) -> Shaped:
    return _cat([_unsqueeze(tensor, dim) for tensor in tensors], dim)


def _cat(tensors: Sequence[Shaped], dim: int = 0) -> Shaped:
    first = tensors[0]
    if any(_resized(tensor, dim, 0) != _resized(first, dim, 0) for tensor in tensors):
        raise ValueError(
            f"shapes {[list(tensor.shape) for tensor in tensors][:4]} must be equal except in dimension {dim}"
        )
    return _resized(first, dim, sum(tensor.shape[dim] for tensor in tensors))


def range_bounds(*given: Any, start: Any = 0, end: Any = None, step: Any = 1, **_: Any) -> tuple[Any, Any, Any]:
    """The start, end and step of an arange. given: the end; or the start, the end and perhaps the step."""
    return (start, given[0], step) if len(given) == 1 else (*given, *(start, end, step)[len(given) :])


def _arange(*given: Any, **named: Any) -> Shaped:
    bounds = range_bounds(*given, **named)
    if (length := len(range(*bounds))) > LONGEST_RANGE:
        raise ValueError(f"arange{bounds} is longer than {LONGEST_RANGE}")
    return Shaped((length,))


def _getattr(x: Any, name: str) -> Any:
    match name:
        case "device" | "dtype":
            return name
        case "ndim":
            return len(x.shape)
        case "T":
            return Shaped(x.shape[::-1])
    return getattr(x, name)


def _getitem(x: Any, index: Any) -> Any:
    """The shape of `x[index]`, by torch's rules: those of NumPy, except that integers select first."""
    if not isinstance(x, Shaped):
        return x[index]
    items = list(index) if isinstance(index, tuple) else [index]
    taken = sum(item is not None and item is not ... for item in items)
    if taken > len(x.shape):
        raise IndexError(f"{taken} indices of a tensor with {len(x.shape)} dimensions")
    at = items.index(...) if ... in items else len(items)
    items[at : at + 1] = [slice(None)] * (len(x.shape) - taken)
    sizes = iter(x.shape)
    kept: list[int] = []
    selected: list[tuple[int, ...]] = []
    places: list[tuple[int, int]] = []  # of index tensors: in the index without integers, and in the result
    place = 0
    for item in items:
        if item is None:
            kept.append(1)
        elif isinstance(item, slice):
            kept.append(len(range(*item.indices(next(sizes)))))
        else:
            size = next(sizes)
            if isinstance(item, int) and not -size <= item < size:
                raise IndexError(f"index {item} of a dimension with {size}")
            shape = np.shape(item) if isinstance(item, list) else getattr(item, "shape", ())
            if not shape:
                continue
            selected.append(shape)
            places.append((place, len(kept)))
        place += 1
    together = all(after[0] == before[0] + 1 for before, after in pairwise(places))
    at = places[0][1] if places and together else 0
    return Shaped((*kept[:at], *np.broadcast_shapes(*selected), *kept[at:]))


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("sum", "mean", "prod", "amax", "amin", "logsumexp", "count_nonzero"), _reduce),
    **dict.fromkeys(("argmax", "argmin"), _reduce),
    **dict.fromkeys(("any", "all"), partial(_reduce, empty=())),
    **dict.fromkeys(("var", "std"), _spread),
    **dict.fromkeys(("max", "min"), _extreme),
    **dict.fromkeys(("softmax", "log_softmax", "cumsum", "cumprod", "roll", "flip", "to", "type_as"), same),
    **dict.fromkeys(("zeros_like", "ones_like", "full_like", "clone", "contiguous", "relu", "silu", "gelu"), same),
    **dict.fromkeys(("mse_loss", "l1_loss", "huber_loss", "smooth_l1_loss"), _reduced),
    **dict.fromkeys(("reshape", "view"), _reshape),
    **dict.fromkeys(("view_as", "reshape_as"), lambda x, other: _reshape(x, *other.shape)),
    **dict.fromkeys(("matmul", "operator.matmul"), _matmul),
    **dict.fromkeys(("cat", "concat"), _cat),
    "flatten": _flatten,
    "squeeze": _squeeze,
    "unsqueeze": _unsqueeze,
    "transpose": _transpose,
    "t": lambda x: Shaped(x.shape[::-1]),
    "permute": _permute,
    "narrow": _narrow,
    "index_select": _index_select,
    "gather": _gather,
    "diff": _diff,
    "dot": _dot,
    "expand": _expand,
    "expand_as": lambda x, other: _expand(x, *other.shape),
    "stack": _stack,
    "arange": _arange,
    "numel": lambda x: x.size,
    "size": lambda x, dim=None: x.shape if dim is None else x.shape[dim],
    "dim": lambda x: len(x.shape),
    "getattr": _getattr,
    "operator.getitem": _getitem,
}

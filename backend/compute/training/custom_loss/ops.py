"""The torch functions that a traced loss may call, in jax.numpy. `backend/spec/torch_names.py` lists their names.

Values are arrays, Python numbers (sizes), tuples and dtypes. Where a function has a corner, its slope is the same as in
torch. clamp passes the slope at its bounds, as in torch before 2.14; later versions do not. An absolute value has the
slope 0 at 0, and so do `0 ** 0`, `xlogy(0, y)` with y <= 0, and a deviation of 0. A maximum over a dimension passes the
slope to one place.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tinkerflow.backend.spec.torch_names import MATH, OPERATORS
from tinkerflow.backend.spec.traced_shapes import Extremes, range_bounds

DTYPES = {
    "float32": jnp.float32,
    "float16": jnp.float16,
    "bfloat16": jnp.bfloat16,
    "int64": jnp.int32,  # the widest integers here; they can hold sizes and token ids
    "int32": jnp.int32,
    "bool": jnp.bool_,
}
Op = Callable[..., Any]


def _axes(dim: Any, empty: tuple[()] | None = None) -> Any:
    """The axes of `dim`. empty: the result for an empty list; None = all axes."""
    return (tuple(dim) or empty) if isinstance(dim, list | tuple) else dim


def _cast(x: jax.Array, dtype: Any) -> jax.Array:
    return x if dtype is None else x.astype(dtype)


def _implicit(x: jax.Array, dim: int | None) -> int:
    """The dimension of a softmax; torch has a rule for calls without a dimension."""
    return dim if dim is not None else 0 if x.ndim in (0, 1, 3) else 1


def _sizes(sizes: Sequence[Any]) -> tuple[int, ...]:
    """The sizes, given as (2, 3) or as ((2, 3),)."""
    return tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], list | tuple) else tuple(sizes)


def _reduce(function: Op, empty: tuple[()] | None = None) -> Op:
    def reduced(x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None, **named: Any) -> Any:
        dim, keepdim = named.get("axis", dim), named.get("keepdims", keepdim)
        return function(_cast(x, dtype), axis=_axes(dim, empty), keepdims=keepdim)

    return reduced


def _spread(function: Op) -> Op:
    """var and std, unbiased by default."""

    def spread(x: Any, dim: Any = None, unbiased: bool = True, keepdim: bool = False, correction: Any = None) -> Any:
        if isinstance(dim, bool):  # var(x, unbiased)
            dim, unbiased = None, dim
        ddof = int(unbiased) if correction is None else correction
        return function(x, axis=_axes(dim), ddof=ddof, keepdims=keepdim)

    return spread


def _extreme(whole: Op, pairwise: Op, place: Op) -> Op:
    """max and min: of all elements, of two tensors, or along a dimension together with the indices."""

    def extreme(x: Any, dim: Any = None, keepdim: bool = False, other: Any = None) -> Any:
        other = dim if isinstance(dim, jax.Array) else other
        if other is not None:
            return pairwise(x, other)
        if dim is None:
            return whole(x)
        indices = place(x, axis=dim, keepdims=True)
        values = jnp.take_along_axis(x, indices, axis=dim)
        return Extremes(values, indices) if keepdim else Extremes(values.squeeze(dim), indices.squeeze(dim))

    return extreme


def _std(x: jax.Array, **named: Any) -> jax.Array:
    variance = jnp.var(x, **named)
    return jnp.where(variance == 0, 0, jnp.sqrt(jnp.where(variance == 0, 1, variance)))


def _pow(x: Any, exponent: Any) -> Any:
    if isinstance(x, jax.Array):
        x = jnp.where((x == 0) & (exponent == 0), jnp.ones_like(x), x)
    return jnp.power(x, exponent)


def _xlogy(x: Any, other: Any) -> Any:
    return jax.scipy.special.xlogy(x, jnp.where((x == 0) & (other <= 0), jnp.ones_like(other), other))


def _abs(x: Any) -> Any:
    return x * jnp.sign(x) if isinstance(x, jax.Array) else abs(x)


def _clamp(x: Any, low: Any = None, high: Any = None, **named: Any) -> Any:
    low, high = named.get("min", low), named.get("max", high)
    x = x if low is None else jnp.where(x < low, low, x)
    return x if high is None else jnp.where(x > high, high, x)


def _div(x: Any, other: Any, rounding_mode: str | None = None) -> Any:
    match rounding_mode:
        case None:
            return jnp.true_divide(x, other)
        case "floor":
            return jnp.floor_divide(x, other)
        case "trunc":
            return jnp.trunc(jnp.true_divide(x, other))
    raise ValueError(f"rounding_mode {rounding_mode!r} must be 'floor' or 'trunc'")


def _to(x: jax.Array, *args: Any, **named: Any) -> jax.Array:
    """Change the dtype. Devices are ignored, because there is only one."""
    for target in (*args, named.get("dtype")):
        if isinstance(target, jax.Array):
            x = x.astype(target.dtype)
        elif target is not None and not isinstance(target, str | bool):
            x = x.astype(target)
    return x


def _view(x: jax.Array, *shape: Any) -> jax.Array:
    if not isinstance(shape[0], int | tuple | list):
        raise ValueError("view as a dtype reads the bits, without a slope: must be to(dtype)")
    return x.reshape(_sizes(shape))


def _flatten(x: jax.Array, start_dim: int = 0, end_dim: int = -1) -> jax.Array:
    start, end = start_dim % max(x.ndim, 1), end_dim % max(x.ndim, 1)
    return x.reshape(*x.shape[:start], -1, *x.shape[end + 1 :])


def _squeeze(x: jax.Array, dim: Any = None) -> jax.Array:
    dims = range(x.ndim) if dim is None else dim if isinstance(dim, list | tuple) else (dim,)
    return x.squeeze(tuple(each for each in dims if x.shape[each] == 1))


def _expand(x: jax.Array, *sizes: Any) -> jax.Array:
    wanted = _sizes(sizes)
    own = (1,) * (len(wanted) - x.ndim) + x.shape
    return jnp.broadcast_to(x, tuple(n if size == -1 else size for size, n in zip(wanted, own, strict=True)))


def _like(fill: Any) -> Op:
    def filled(x: jax.Array, dtype: Any = None, **_: Any) -> jax.Array:
        return jnp.full(x.shape, fill, x.dtype if dtype is None else dtype)

    return filled


def _arange(*given: Any, **named: Any) -> jax.Array:
    numbers = jnp.arange(*range_bounds(*given, **named))
    return numbers if named.get("dtype") is None else numbers.astype(named["dtype"])


def _distance(term: Callable[[jax.Array, float, float], jax.Array], *, of_weights: bool = False) -> Op:
    """A distance of two tensors. of_weights: the weighted mean is divided by the sum of the weights, as in torch."""

    def distance(
        x: Any,
        target: Any,
        reduction: str = "mean",
        delta: float = 1.0,
        beta: float = 1.0,
        *,
        weight: jax.Array | None = None,
        **_: Any,
    ) -> Any:
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f"reduction {reduction!r} must be 'mean', 'sum' or 'none'")
        terms = term(x - target, delta, beta)
        if weight is not None:
            terms = terms * weight
            if of_weights and reduction == "mean":
                return terms.sum() / weight.sum()
        return terms if reduction == "none" else terms.mean() if reduction == "mean" else terms.sum()

    return distance


def _huber_term(d: jax.Array, delta: float, _: float) -> jax.Array:
    return jnp.where(jnp.abs(d) <= delta, 0.5 * d * d, delta * (jnp.abs(d) - 0.5 * delta))


def _smooth_term(d: jax.Array, _: float, beta: float) -> jax.Array:
    return jnp.where(jnp.abs(d) < beta, 0.5 * d * d / beta, jnp.abs(d) - 0.5 * beta) if beta else _abs(d)


def _narrow(x: jax.Array, dim: int, start: int, length: int) -> jax.Array:
    start += x.shape[dim] if start < 0 else 0
    return jax.lax.slice_in_dim(x, start, start + length, axis=dim)


def _gather(x: jax.Array, dim: int, index: jax.Array, **_: Any) -> jax.Array:
    """The index may be smaller than `x` in other dimensions. Then only the first places of `x` are read."""
    kept = [slice(size) for size in index.shape]
    kept[dim] = slice(None)
    return jnp.take_along_axis(x[tuple(kept)], _from_front(x, dim, index), axis=dim)


def _from_front(x: jax.Array, dim: int, index: jax.Array) -> jax.Array:
    """The index for functions that do not count from the end: a negative place is outside of x, so it gives NaN."""
    return jnp.where(index < 0, x.shape[dim], index)


def _getitem(x: Any, index: Any) -> Any:
    """x[index]. Integers select first, as in torch, so they do not move the dimensions of index tensors.

    A place outside of x gives NaN (or the smallest integer), whereas JAX would take the nearest place.
    """
    if not isinstance(x, jax.Array):
        return x[index]
    items = index if isinstance(index, tuple) else (index,)
    rest = tuple(item for item in items if not _selects(item))
    first = (item if _selects(item) or item is ... else slice(None) for item in items if item is not None)
    selected = x[tuple(first)]
    of_tensors = any(isinstance(item, jax.Array) for item in rest)
    return selected.at[rest].get(mode="fill") if of_tensors else selected[rest]


def _selects(item: Any) -> bool:
    return isinstance(item, int) or (isinstance(item, jax.Array) and not item.ndim)


def _getattr(x: Any, name: str) -> Any:
    return "cpu" if name == "device" else getattr(x, name)


def _on_numbers(function: Op) -> Op:
    """An operator on tensors and numbers. Powers of numbers are floats, because integers could grow without bound."""

    def checked(*args: Any) -> Any:
        for arg in args:
            if not isinstance(arg, jax.Array | bool | int | float):
                raise TypeError(f"{type(arg).__name__} is neither a tensor nor a number")
        if function is operator.pow:
            of_tensors = any(isinstance(arg, jax.Array) for arg in args)
            return _pow(*args) if of_tensors else float(args[0]) ** float(args[1])
        return function(*args)

    return checked


def _math(name: str) -> Op:
    """A math function of a number or a scalar tensor. A tensor gets no slope: torch turns it into a number."""
    of_number, of_array = getattr(math, name), getattr(jnp, name)

    def function(*args: Any) -> Any:
        if any(isinstance(arg, jax.Array) for arg in args):
            return jax.lax.stop_gradient(of_array(*args))
        return of_number(*args)

    return function


_NUMPY = (
    "exp", "expm1", "log", "log1p", "log2", "log10", "sqrt", "square", "negative", "sign",
    "floor", "ceil", "round", "trunc", "reciprocal", "sin", "cos", "tanh", "isnan", "isinf",
    "isfinite", "logical_not", "logical_and", "logical_or", "logical_xor", "multiply", "remainder",
    "maximum", "minimum", "logaddexp",
)  # fmt: skip
OPS: Mapping[str, Op] = {
    **{name: getattr(jnp, name) for name in _NUMPY},
    **dict.fromkeys(("abs", "absolute"), _abs),
    "rsqrt": jax.lax.rsqrt,
    "neg": jnp.negative,
    "sigmoid": jax.nn.sigmoid,
    "relu": lambda x, inplace=False: jax.nn.relu(x),
    "silu": lambda x, inplace=False: jax.nn.silu(x),
    "gelu": lambda x, approximate="none": jax.nn.gelu(x, approximate=approximate == "tanh"),
    "logsigmoid": jax.nn.log_sigmoid,
    "softplus": lambda x, beta=1.0, threshold=20.0: jnp.where(
        x * beta > threshold, x, jax.nn.softplus(jnp.where(x * beta > threshold, 0, x * beta)) / beta
    ),
    "erf": jax.scipy.special.erf,
    "xlogy": _xlogy,
    "detach": jax.lax.stop_gradient,
    "clone": lambda x, **_: x,
    "contiguous": lambda x, **_: x,
    "add": lambda x, other, alpha=1: x + (other if alpha == 1 else alpha * other),
    "sub": lambda x, other, alpha=1: x - alpha * other,
    "subtract": lambda x, other, alpha=1: x - alpha * other,
    "mul": jnp.multiply,
    "div": _div,
    "divide": _div,
    "true_divide": jnp.true_divide,
    "floor_divide": jnp.floor_divide,
    "pow": _pow,
    "max": _extreme(jnp.max, jnp.maximum, jnp.argmax),
    "min": _extreme(jnp.min, jnp.minimum, jnp.argmin),
    "eq": jnp.equal,
    "ne": jnp.not_equal,
    "lt": jnp.less,
    "le": jnp.less_equal,
    "gt": jnp.greater,
    "ge": jnp.greater_equal,
    "nan_to_num": lambda x, nan=0.0, posinf=None, neginf=None: jnp.nan_to_num(x, True, nan, posinf, neginf),
    "clamp": _clamp,
    "clip": _clamp,
    "clamp_min": _clamp,
    "clamp_max": lambda x, high=None, **named: _clamp(x, None, high, **named),
    "lerp": lambda x, end, weight: x + weight * (end - x),
    "masked_fill": lambda x, mask, value: jnp.where(mask, jnp.asarray(value, x.dtype), x),
    "where": jnp.where,
    "sum": _reduce(jnp.sum),
    "mean": _reduce(jnp.mean),
    "prod": _reduce(jnp.prod),
    "amax": _reduce(jnp.max),
    "amin": _reduce(jnp.min),
    "any": _reduce(jnp.any, ()),
    "all": _reduce(jnp.all, ()),
    "var": _spread(jnp.var),
    "std": _spread(_std),
    "logsumexp": _reduce(jax.scipy.special.logsumexp),
    "softmax": lambda x, dim=None, dtype=None, **_: jax.nn.softmax(_cast(x, dtype), axis=_implicit(x, dim)),
    "log_softmax": lambda x, dim=None, dtype=None, **_: jax.nn.log_softmax(_cast(x, dtype), axis=_implicit(x, dim)),
    "cumsum": lambda x, dim, dtype=None: jnp.cumsum(_cast(x, dtype), axis=dim),
    "cumprod": lambda x, dim, dtype=None: jnp.cumprod(_cast(x, dtype), axis=dim),
    "argmax": lambda x, dim=None, keepdim=False: jnp.argmax(x, axis=dim, keepdims=keepdim),
    "argmin": lambda x, dim=None, keepdim=False: jnp.argmin(x, axis=dim, keepdims=keepdim),
    "count_nonzero": lambda x, dim=None: jnp.count_nonzero(x, axis=_axes(dim)),
    "mse_loss": _distance(lambda d, *_: d**2, of_weights=True),
    "l1_loss": _distance(lambda d, *_: _abs(d), of_weights=True),
    "huber_loss": _distance(_huber_term),
    "smooth_l1_loss": _distance(_smooth_term),
    "reshape": lambda x, *shape, **named: x.reshape(_sizes(shape or (named["shape"],))),
    "view": _view,
    "view_as": lambda x, other: x.reshape(other.shape),
    "reshape_as": lambda x, other: x.reshape(other.shape),
    "squeeze": _squeeze,
    "unsqueeze": lambda x, dim: jnp.expand_dims(x, axis=dim),
    "flatten": _flatten,
    "transpose": lambda x, dim0, dim1: jnp.swapaxes(x, axis1=dim0, axis2=dim1),
    "t": lambda x: x.T,
    "permute": lambda x, *sizes, dims=(): jnp.transpose(x, _sizes(sizes or (dims,))),
    "flip": lambda x, *sizes, dims=(): jnp.flip(x, _sizes(sizes or (dims,))),
    "roll": lambda x, shifts, dims=None: jnp.roll(x, _axes(shifts), _axes(dims)),
    "narrow": _narrow,
    "index_select": lambda x, dim, index: jnp.take(x, _from_front(x, dim, index), axis=dim),
    "gather": _gather,
    "diff": lambda x, n=1, dim=-1: jnp.diff(x, n=n, axis=dim),
    "dot": jnp.dot,
    "matmul": jnp.matmul,
    "numel": lambda x: x.size,
    "size": lambda x, dim=None: x.shape if dim is None else x.shape[dim],
    "dim": lambda x: x.ndim,
    "expand": _expand,
    "expand_as": lambda x, other: jnp.broadcast_to(x, other.shape),
    "to": _to,
    "type_as": _to,
    "float": lambda x: x.astype(jnp.float32),
    "long": lambda x: x.astype(jnp.int32),
    "int": lambda x: x.astype(jnp.int32),
    "bool": lambda x: x.astype(jnp.bool_),
    "stack": lambda tensors, dim=0: jnp.stack(tensors, axis=dim),
    "cat": lambda tensors, dim=0: jnp.concatenate(tensors, axis=dim),
    "concat": lambda tensors, dim=0: jnp.concatenate(tensors, axis=dim),
    "zeros_like": _like(0),
    "ones_like": _like(1),
    "full_like": lambda x, fill_value, dtype=None, **_: _like(fill_value)(x, dtype),
    "arange": _arange,
    "getattr": _getattr,
    **{f"operator.{name}": _on_numbers(getattr(operator, name)) for name in OPERATORS},
    "operator.abs": _on_numbers(_abs),
    "operator.getitem": _getitem,
    **{f"math.{name}": _math(name) for name in MATH},
}

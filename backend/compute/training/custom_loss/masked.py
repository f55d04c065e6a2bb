"""The value and the slope of a traced loss in which tokens that do not count overflow.

In floating-point arithmetic, 0 times infinity is NaN. So `weights * exp(logprobs - old)` is NaN where the weight is 0
and `old` is a placeholder such as -9999. Likewise, the slope of `where(mask, x, 0)` is NaN where the unused branch
overflows (the "double where" problem). One such token would spoil the gradient of the whole batch.

Here, each value records its moving cells: the cells that change with the log probabilities. If a factor or a dividend
is 0 and does not move, the result is 0. A cell has the slope 0 if it does not move or does not influence the loss. All
other cells are computed as usual. The loss is traced as a jaxpr, in which every operation is a primitive. `evaluate`
uses this only if the usual program returns a number that is not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import or_
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

# Each cell of the result depends on the same cell of the operands only.
_ELEMENTWISE = {
    *("abs", "add", "add_any", "clamp", "convert_element_type", "copy", "cos", "div", "erf", "erfc", "exp", "exp2"),
    *("expm1", "integer_pow", "log", "log1p", "logistic", "max", "min", "mul", "neg", "pow", "rem", "rsqrt"),
    *("select_n", "sin", "sqrt", "square", "sub", "tan", "tanh"),
}
# Elementwise, and constant wherever the result is continuous.
_FLAT = {
    *("and", "ceil", "eq", "floor", "ge", "gt", "is_finite", "le", "lt", "ne", "not", "or", "round", "sign"),
    *("stop_gradient", "xor"),
}
# Each cell of the result is a cell of the operands, or a sum of such cells.
_SUMS = {
    *("broadcast_in_dim", "concatenate", "cumsum", "dynamic_slice", "expand_dims", "gather", "pad", "reduce_sum"),
    *("reshape", "rev", "slice", "squeeze", "transpose"),
}
_CALLS = {"jit": "jaxpr", "pjit": "jaxpr"}
_RULES = {"custom_jvp_call": "call_jaxpr"}  # calls that define their own slope


@dataclass(eq=False)
class _Value:
    """A value of the program. moves: whether each cell changes with the log probabilities; None = no cell does."""

    array: Any
    moves: Any = None

    @property
    def moving(self) -> jax.Array:
        """The cells that move, as an array of the value's shape."""
        return jnp.full(jnp.shape(self.array), False) if self.moves is None else self.moves

    @property
    def zeros(self) -> jax.Array:
        """The cells that are 0 and do not move. Their products are 0, even with infinity."""
        return (jnp.asarray(self.array) == 0) & ~self.moving


@dataclass(frozen=True)
class _Step:
    """An operation on the way to the loss. pull: maps slopes of the results to slopes of the moving operands."""

    pull: Callable[[list[Any]], Sequence[Any]]
    operands: list[_Value]
    results: list[_Value]


def value_and_slope(function: Callable[..., Any], values: Sequence[jax.Array]) -> tuple[Any, jax.Array]:
    """Like `jax.value_and_grad(function, has_aux=True)(*values)`, except for tokens that overflow but do not count.

    function: returns a scalar loss and a tree of metrics. The slope is with respect to the first value.
    """
    program, shape = jax.make_jaxpr(function, return_shape=True)(*values)
    steps: list[_Step] = []
    inputs = [_Value(values[0], jnp.full(values[0].shape, True)), *map(_Value, values[1:])]
    results = _run(program.jaxpr, program.consts, inputs, steps)
    slopes: dict[_Value, Any] = {results[0]: jnp.ones_like(results[0].array)}
    for step in reversed(steps):
        if any(result in slopes for result in step.results):
            zero = jnp.float32(0)
            by_result = [
                jnp.where(result.moves, slopes.get(result, zero), zero).astype(result.array.dtype)
                for result in step.results
            ]
            for operand, slope in zip(step.operands, step.pull(by_result), strict=True):
                slopes[operand] = slopes[operand] + slope if operand in slopes else slope
    tree = jax.tree.unflatten(jax.tree.structure(shape), [result.array for result in results])
    return tree, slopes.get(inputs[0], jnp.zeros_like(inputs[0].array))


def _run(program: Any, constants: Sequence[Any], inputs: Sequence[_Value], steps: list[_Step]) -> list[_Value]:
    """Run a jaxpr and return its results. Operations with moving results are appended to `steps`, in order."""
    known = dict(zip(program.constvars, map(_Value, constants), strict=True))
    known.update(zip(program.invars, inputs, strict=True))

    def value_of(atom: Any) -> _Value:
        return _Value(atom.val) if isinstance(atom, Literal) else known[atom]

    for equation in program.eqns:
        operands = [value_of(atom) for atom in equation.invars]
        name = equation.primitive.name
        if name in _CALLS:
            inner = equation.params[_CALLS[name]]
            results = _run(inner.jaxpr, inner.consts, operands, steps)
        else:
            results = _apply(program, equation, operands, steps)
        known.update(zip(equation.outvars, results, strict=True))
    return [value_of(atom) for atom in program.outvars]


def _apply(program: Any, equation: Any, operands: list[_Value], steps: list[_Step]) -> list[_Value]:
    """Run one operation and return its results. The operation is appended to `steps` if the results move."""
    name, function, elementwise = equation.primitive.name, _function(program, equation), _is_elementwise(equation)
    if elementwise:
        operands = [_spread(operand, equation.outvars[0].aval.shape, steps) for operand in operands]
    if name == "dot_general":
        function = partial(_product, partial(jax.lax.dot_general, **equation.params), operands)
    removed = _removed(name, operands) if name in ("mul", "div") else None
    if removed is not None:
        function = partial(_without, function, removed)
    results = [_Value(array) for array in function(*(operand.array for operand in operands))]
    floats = [result for result in results if _is_float(result.array)]
    places = [place for place, operand in enumerate(operands) if operand.moves is not None]
    if not floats or not places or name in _FLAT:
        return results
    for result, moves in zip(floats, _moves(equation, function, operands, floats, elementwise, removed), strict=True):
        result.moves = moves
    pull = partial(_pull, function, [operand.array for operand in operands], places, elementwise)
    steps.append(_Step(pull, [operands[place] for place in places], floats))
    return results


def _function(program: Any, equation: Any) -> Callable[..., list[Any]]:
    """The operation as a function of the arrays of all operands."""
    variables = list(dict.fromkeys(atom for atom in equation.invars if not isinstance(atom, Literal)))
    alone = program.replace(constvars=[], invars=variables, outvars=equation.outvars, eqns=[equation])
    run, places = jaxpr_as_fun(ClosedJaxpr(alone, ())), [equation.invars.index(variable) for variable in variables]
    return lambda *arrays: run(*(arrays[place] for place in places))


def _is_elementwise(equation: Any) -> bool:
    name, params = equation.primitive.name, equation.params
    if inner := (_CALLS | _RULES).get(name):
        constants = [each for each in params[inner].jaxpr.eqns if all(isinstance(x, Literal) for x in each.invars)]
        return all(each in constants or _is_elementwise(each) for each in params[inner].jaxpr.eqns)
    return name in _ELEMENTWISE | _FLAT


def _spread(operand: _Value, shape: tuple[int, ...], steps: list[_Step]) -> _Value:
    """The operand of an elementwise operation with the shape of its result. A scalar is broadcast."""
    if jnp.shape(operand.array) == shape:
        return operand
    result = _Value(jnp.broadcast_to(operand.array, shape))
    if operand.moves is not None:
        result.moves = jnp.broadcast_to(operand.moves, shape)
        pull = partial(_pull, lambda array: [jnp.broadcast_to(array, shape)], [operand.array], [0], False)
        steps.append(_Step(pull, [operand], [result]))
    return result


def _removed(name: str, operands: list[_Value]) -> jax.Array:
    """The cells of a product (`mul`) or a quotient (`div`) that are 0 because a factor or the dividend is 0."""
    causes = operands if name == "mul" else operands[:1]
    return reduce(or_, (operand.zeros for operand in causes))


def _without(function: Callable[..., list[Any]], removed: jax.Array, *arrays: Any) -> list[Any]:
    """The result of the function, with 0 in the removed cells."""
    return [jnp.where(removed, 0, array) for array in function(*arrays)]


def _product(product: Callable[..., jax.Array], operands: list[_Value], *arrays: Any) -> list[Any]:
    """The product of two arrays along some of their axes. Infinity and NaN count unless they meet only `zeros`."""
    finite = [jnp.isfinite(operand.array) for operand in operands]
    first, second = operands
    overflows = _meet(product, ~first.zeros, ~finite[1]) | _meet(product, ~finite[0], ~second.zeros)
    kept = [jnp.where(cells, array, 0) for cells, array in zip(finite, arrays, strict=True)]
    return [jnp.where(overflows, jnp.nan, product(*kept))]


def _meet(product: Callable[..., jax.Array], left: jax.Array, right: jax.Array) -> jax.Array:
    """The cells of a product to which a cell in `left` and a cell in `right` contribute together."""
    return product(left.astype(jnp.float32), right.astype(jnp.float32)) > 0


def _moves(
    equation: Any,
    function: Callable[..., list[Any]],
    operands: list[_Value],
    results: list[_Value],
    elementwise: bool,
    removed: jax.Array | None,
) -> Sequence[jax.Array]:
    """The moving cells of each result. If they are not known, all cells move if any cell of an operand moves.

    elementwise: see `_is_elementwise`. removed: the cells of a product or a quotient that stay 0.
    """
    name, params = equation.primitive.name, equation.params
    if name in _RULES:
        inner = params[_RULES[name]]
        return [result.moving for result in _run(inner.jaxpr, inner.consts, operands, [])]
    if name == "select_n":
        return [jax.lax.select_n(operands[0].array, *(operand.moving for operand in operands[1:]))]
    if name == "dot_general":
        product, (first, second) = partial(jax.lax.dot_general, **params), operands
        return [_meet(product, first.moving, ~second.zeros) | _meet(product, ~first.zeros, second.moving)]
    if name in ("max", "min"):
        x, other = operands
        exceeds, below = x.array > other.array, x.array < other.array
        lost, other_lost = (below, exceeds) if name == "max" else (exceeds, below)
        return [(x.moving & ~lost) | (other.moving & ~other_lost)]
    if name in _SUMS:
        arrays = [x.moving.astype(x.array.dtype) if _is_float(x.array) else x.array for x in operands]
        return [array > 0 for array in function(*arrays)]
    if name in ("reduce_max", "reduce_min", "reduce_prod"):
        return [jnp.any(operands[0].moving, axis=params["axes"])]
    if elementwise:
        moves = reduce(or_, (operand.moving for operand in operands))
        return [moves if removed is None else moves & ~removed]
    moves = reduce(or_, (operand.moving.any() for operand in operands))
    return [jnp.broadcast_to(moves, jnp.shape(result.array)) for result in results]


def _pull(
    function: Callable[..., list[Any]], arrays: list[Any], places: list[int], elementwise: bool, slopes: list[Any]
) -> Sequence[Any]:
    """The slopes of the operands at `places`.

    elementwise: where the result's slope is 0, so are the operands' slopes, even if the operation's own slope is
    infinite.
    """

    def of_moving(*changed: Any) -> list[Any]:
        by_place = dict(zip(places, changed, strict=True))
        return [x for x in function(*(by_place.get(i, x) for i, x in enumerate(arrays))) if _is_float(x)]

    _, pullback = jax.vjp(of_moving, *(arrays[place] for place in places))
    pulled = pullback(slopes)
    return [jnp.where(slopes[0] == 0, 0, slope) for slope in pulled] if elementwise else pulled


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(jnp.asarray(x).dtype, jnp.floating)

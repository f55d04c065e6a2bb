"""The value and the slope of a traced loss in which tokens overflow that do not count.

In floating-point numbers, 0 times infinity is not a number. So `weights * exp(logprobs - old)` is NaN where the weight
is 0 and `old` is a placeholder such as -9999. And `where(mask, x, 0)` has no slope where the branch that is not taken
overflows (the "double where" problem). One such token would spoil the gradient of the whole batch.

Here, a factor of 0 that does not depend on the log probabilities removes the other factor, and a value that does not
influence the loss has the slope 0. Everything else is computed as usual. The loss is taken as a jaxpr, where every
operation is a primitive. `evaluate` uses this only when the usual program gives a number that is not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

# Each cell of the result depends on the same cell of the operands only.
_ELEMENTWISE = {
    *("abs", "add", "add_any", "convert_element_type", "copy", "cos", "div", "erf", "exp", "exp2", "expm1"),
    *("integer_pow", "log", "log1p", "logistic", "max", "min", "neg", "pow", "rem", "rsqrt", "select_n", "sign", "sin"),
    *("sqrt", "square", "sub", "tan", "tanh"),
}
_CALLS = ("jit", "pjit")


@dataclass(eq=False)
class _Value:
    """A value of the program. moves: whether it changes continuously with the log probabilities."""

    array: Any
    moves: bool


@dataclass(frozen=True)
class _Step:
    """An operation on the way to the loss. pull: from the slopes by its results to those by its moving operands."""

    pull: Callable[[list[Any]], Sequence[Any]]
    operands: list[_Value]
    results: list[_Value]


def value_and_slope(function: Callable[..., Any], values: Sequence[jax.Array]) -> tuple[Any, jax.Array]:
    """As `jax.value_and_grad(function, has_aux=True)(*values)`, except for tokens that overflow and do not count.

    function: gives a scalar loss and a tree of metrics. The slope is that by the first value.
    """
    program, shape = jax.make_jaxpr(function, return_shape=True)(*values)
    steps: list[_Step] = []
    inputs = [_Value(value, place == 0) for place, value in enumerate(values)]
    results = _run(program.jaxpr, program.consts, inputs, steps)
    slopes: dict[_Value, Any] = {results[0]: jnp.ones_like(results[0].array)}
    for step in reversed(steps):
        if any(result in slopes for result in step.results):
            by_result = [slopes.get(result, jnp.zeros_like(result.array)) for result in step.results]
            for operand, slope in zip(step.operands, step.pull(by_result), strict=True):
                slopes[operand] = slopes[operand] + slope if operand in slopes else slope
    tree = jax.tree.unflatten(jax.tree.structure(shape), [result.array for result in results])
    return tree, slopes.get(inputs[0], jnp.zeros_like(inputs[0].array))


def _run(program: Any, constants: Sequence[Any], inputs: Sequence[_Value], steps: list[_Step]) -> list[_Value]:
    """The results of a jaxpr. Its operations that move are appended to `steps`, in order."""
    known = {variable: _Value(constant, False) for variable, constant in zip(program.constvars, constants, strict=True)}
    known.update(zip(program.invars, inputs, strict=True))

    def value_of(atom: Any) -> _Value:
        return _Value(atom.val, False) if isinstance(atom, Literal) else known[atom]

    for equation in program.eqns:
        name, shape = equation.primitive.name, equation.outvars[0].aval.shape
        if name in _CALLS:
            inner = equation.params["jaxpr"]
            results = _run(inner.jaxpr, inner.consts, [value_of(atom) for atom in equation.invars], steps)
        elif name == "mul":
            results = _multiply([_spread(value_of(atom), shape, steps) for atom in equation.invars], steps)
        elif name == "dot_general":
            product = partial(jax.lax.dot_general, **equation.params)
            results = _multiply_matrices(product, [value_of(atom) for atom in equation.invars], steps)
        else:
            variables = list(dict.fromkeys(atom for atom in equation.invars if not isinstance(atom, Literal)))
            alone = program.replace(constvars=[], invars=variables, outvars=equation.outvars, eqns=[equation])
            function = jaxpr_as_fun(ClosedJaxpr(alone, ()))
            operands = [known[variable] for variable in variables]
            if elementwise := name in _ELEMENTWISE:
                operands = [_spread(operand, shape, steps) for operand in operands]
            results = _step(function, operands, steps, elementwise)
        known.update(zip(equation.outvars, results, strict=True))
    return [value_of(atom) for atom in program.outvars]


def _spread(operand: _Value, shape: tuple[int, ...], steps: list[_Step]) -> _Value:
    """The operand of an elementwise operation with the shape of its result. A scalar may stand for all cells."""
    if jnp.shape(operand.array) == shape:
        return operand
    return _step(lambda x: [jnp.broadcast_to(x, shape)], [operand], steps)[0]


def _zeros(operand: _Value) -> jax.Array:
    """The cells that are 0 and do not move, so their products are 0, even with infinity."""
    return jnp.full(jnp.shape(operand.array), False) if operand.moves else jnp.asarray(operand.array) == 0


def _multiply(operands: list[_Value], steps: list[_Step]) -> list[_Value]:
    """The product of two operands of one shape."""
    removed = _zeros(operands[0]) | _zeros(operands[1])
    return _step(lambda *pair: [jnp.where(removed, 0, jnp.multiply(*pair))], operands, steps, True, removed)


def _multiply_matrices(product: Callable[..., jax.Array], operands: list[_Value], steps: list[_Step]) -> list[_Value]:
    """The product of two arrays along some of their axes."""
    first, second = arrays = [jnp.asarray(operand.array) for operand in operands]
    zeros = [_zeros(operand) for operand in operands]
    finite = [jnp.isfinite(array) for array in arrays]

    def meet(left: jax.Array, right: jax.Array) -> jax.Array:
        return product(left.astype(first.dtype), right.astype(second.dtype)) > 0

    overflows = meet(~zeros[0], ~finite[1]) | meet(~finite[0], ~zeros[1])

    def of_finite(*pair: jax.Array) -> list[jax.Array]:
        kept = [jnp.where(cells, array, 0) for cells, array in zip(finite, pair, strict=True)]
        return [jnp.where(overflows, jnp.nan, product(*kept))]

    return _step(of_finite, operands, steps)


def _step(
    function: Callable[..., list[Any]],
    operands: list[_Value],
    steps: list[_Step],
    elementwise: bool = False,
    removed: Any = False,
) -> list[_Value]:
    """The results of one operation, which is appended to `steps` if it moves.

    function: of the operands' arrays. elementwise: where the slope by the result is 0, set the slopes by the operands
    to 0, even if the operation's own slope is infinite. removed: more cells whose slopes are 0.
    """
    arrays = [operand.array for operand in operands]
    moving = [place for place, operand in enumerate(operands) if operand.moves]
    results = [_Value(x, bool(moving) and _is_float(x)) for x in function(*arrays)]

    def of_moving(*changed: Any) -> list[Any]:
        by_place = dict(zip(moving, changed, strict=True))
        return [x for x in function(*(by_place.get(i, x) for i, x in enumerate(arrays))) if _is_float(x)]

    def pull(slopes: list[Any]) -> Sequence[Any]:
        _, pullback = jax.vjp(of_moving, *(arrays[place] for place in moving))
        pulled = pullback(slopes)
        return [jnp.where(removed | (slopes[0] == 0), 0, slope) for slope in pulled] if elementwise else pulled

    if any(result.moves for result in results):
        steps.append(_Step(pull, [operands[place] for place in moving], [x for x in results if x.moves]))
    return results


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)

"""Shapes in a traced loss: every op has the shape that workers compute, and indices have torch's shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tinkerflow.backend.compute.training.custom_loss.ops import OPS
from tinkerflow.backend.spec.torch_names import MATH, OPERATORS
from tinkerflow.backend.spec.traced_shapes import Shaped, shape_of

V, M, W = Shaped((5,)), Shaped((5, 3)), Shaped((3, 5))
CUBE, SCALAR = Shaped((2, 4, 3)), Shaped(())
INDEX = np.array([0, 2, 1, 1])  # where an op takes integers
Case = tuple[Any, ...]  # the arguments; named ones are in a dict at the end


def ops(names: Sequence[str], cases: list[Case]) -> dict[str, list[Case]]:
    return {name: cases for name in names}  # noqa: C420  the lists are never changed


REDUCTIONS: list[Case] = [(V,), (M, 0), (M, -1, True), (CUBE, (0, 2)), (CUBE, {"dim": 1, "keepdim": True})]
BY_OP: dict[str, list[Case]] = {
    **ops(("sum", "mean", "prod", "amax", "amin", "logsumexp", "any", "all"), REDUCTIONS),
    "count_nonzero": [(V,), (M, 0)],
    **ops(("var", "std"), [(V,), (M, 0), (M, False), (M, 1, True, True), (CUBE, {"dim": 2, "correction": 0})]),
    **ops(("argmax", "argmin"), [(V,), (M, 1), (M, 0, True)]),
    **ops(("max", "min"), [(V,), (M, 1), (M, 0, True), (M, Shaped((3,))), (M, {"other": M})]),
    **ops(("softmax", "log_softmax"), [(V, 0), (M, -1)]),
    **ops(("cumsum", "cumprod"), [(V, 0), (M, 1)]),
    **ops(("clamp", "clip"), [(M, -1.0, 1.0), (M, {"min": V.shape[0]}), (M, Shaped((3,)))]),
    "clamp_min": [(M, 0.0)],
    "clamp_max": [(M, {"max": 0.0})],
    "lerp": [(M, M, 0.5)],
    "masked_fill": [(M, np.ones((1, 3), bool), 0.0)],
    "where": [(np.ones((5, 1), bool), M, 0.0)],
    "nan_to_num": [(M,), (M, 0.0)],
    "softplus": [(M,), (M, 2.0)],
    "relu": [(M,), (M, True)],
    **ops(("mse_loss", "l1_loss"), [(M, M), (M, Shaped((3,)), {"reduction": "none"})]),
    **ops(("huber_loss", "smooth_l1_loss"), [(M, M), (M, M, {"reduction": "none"})]),
    **ops(("reshape", "view"), [(M, 15), (M, -1, 5), (M, (3, 5)), (M, [1, -1])]),
    **ops(("view_as", "reshape_as"), [(M, W)]),
    "squeeze": [(Shaped((1, 5, 1)),), (Shaped((1, 5, 1)), 0), (M, 0)],
    "unsqueeze": [(M, 0), (M, -1), (V, 1)],
    "flatten": [(CUBE,), (CUBE, 1), (CUBE, 0, 1), (SCALAR,)],
    "transpose": [(CUBE, 0, -1)],
    "t": [(M,), (V,)],
    "permute": [(CUBE, 2, 0, 1), (CUBE, (1, 0, 2))],
    "flip": [(M, 0), (M, (0, 1))],
    "roll": [(M, 1), (M, 2, 0)],
    "narrow": [(M, 0, 1, 3), (M, 1, 0, 0), (M, 0, -2, 2), (M, 0, 5, 0)],
    "index_select": [(M, 0, INDEX), (CUBE, -1, INDEX % 2)],
    "gather": [
        (V, 0, INDEX),
        (M, 1, np.zeros((5, 2), int)),
        (M, 0, np.zeros((7, 1), int)),
        (M, 1, np.zeros((4, 9), int)),
    ],
    "diff": [(V,), (M, 2, 0), (V, 9), (M, {"dim": 1})],
    "dot": [(V, V)],
    **ops(("matmul", "operator.matmul"), [(V, V), (M, W), (V, M), (M, Shaped((3,))), (CUBE, Shaped((3, 7)))]),
    "numel": [(M,)],
    "size": [(M,), (M, -1)],
    "dim": [(M,)],
    "expand": [(V, 4, 5), (V, (2, -1)), (SCALAR, 3)],
    "expand_as": [(V, Shaped((2, 5)))],
    "to": [(M, "cpu"), (M, V)],
    "type_as": [(M, V)],
    "stack": [([V, V],), ([M, M, M], 1), ([M, M], -1)],
    **ops(("cat", "concat"), [([V, V],), ([M, M, M], 1), ([M, M], {"dim": -1})]),
    "full_like": [(M, 2.0)],
    "arange": [(5,), (1, 9, 3), (4, {"dtype": None}), (1, 9, {"step": 2}), ({"start": 2, "end": 8, "step": 3},)],
    "getattr": [(M, "shape"), (M, "T"), (M, "ndim")],
    "operator.getitem": [
        (M, 0),
        (CUBE, (slice(1), None, ..., -1)),
        (CUBE, (0, slice(None), INDEX % 3)),
        (CUBE, (0, None, INDEX)),
        ((4, 5), 1),
    ],
    "math.pow": [(SCALAR, 2.0), (3, 2)],
    "operator.pow": [(M, 2), (2, 3)],
}
PAIRS = {
    "add",
    "sub",
    "subtract",
    "mul",
    "multiply",
    "div",
    "divide",
    "true_divide",
    "floor_divide",
    "remainder",
    "pow",
} | {
    *("maximum", "minimum", "eq", "ne", "lt", "le", "gt", "ge", "logaddexp", "xlogy"),
    *("logical_and", "logical_or", "logical_xor"),
    *(f"operator.{name}" for name in OPERATORS if name not in ("neg", "pos", "abs", "invert", "getitem")),
}
INTEGERS = {"operator.and_", "operator.or_", "operator.xor", "operator.invert"}


def cases(op: str) -> list[Case]:
    if op in BY_OP:
        return BY_OP[op]
    if op in INTEGERS:
        return [(INDEX, INDEX)] if op != "operator.invert" else [(INDEX,)]
    if op in PAIRS:
        return [(M, V.shape[0]), (M, Shaped((5, 1))), (2.0, M)] + ([(7, 2)] if op.startswith("operator.") else [])
    return [(SCALAR,), (0.5,)] if op.startswith("math.") else [(M,), (V,)]


def outcome(call: Any, given: Case, of: Any) -> Any:
    named = given[-1] if isinstance(given[-1], dict) else {}
    args = given[:-1] if named else given
    return jax.tree.map(of, call(args, named), is_leaf=lambda x: hasattr(x, "shape"))


def in_jax(op: str, given: Case) -> Any:
    """The shapes that the worker's op returns. Numbers stay unchanged."""
    leaves, tree = jax.tree.flatten(given, is_leaf=lambda x: isinstance(x, Shaped | slice) or x is None or x is ...)
    found: list[Any] = []

    def run(arrays: dict[int, jax.Array]) -> None:
        args = jax.tree.unflatten(tree, [arrays.get(i, leaf) for i, leaf in enumerate(leaves)])
        found.append(outcome(lambda a, n: OPS[op](*a, **n), args, lambda x: getattr(x, "shape", x)))

    shaped = {
        i: jax.ShapeDtypeStruct(leaf.shape, np.int32 if isinstance(leaf, np.ndarray) else np.float32)
        for i, leaf in enumerate(leaves)
        if isinstance(leaf, Shaped | np.ndarray)
    }
    jax.eval_shape(run, shaped)
    return found[0]


@pytest.mark.parametrize("op", sorted(OPS))
def test_every_op_has_the_shape_that_workers_compute(op):
    for given_args in cases(op):
        abstract = jax.tree.map(
            lambda x: Shaped(x.shape) if isinstance(x, np.ndarray) else x,
            given_args,
            is_leaf=lambda x: isinstance(x, slice) or x is None or x is ...,
        )
        expected = in_jax(op, given_args)
        found = outcome(lambda a, n: shape_of(op, a, n), abstract, lambda x: getattr(x, "shape", x))
        assert jax.tree.leaves(found) == jax.tree.leaves(expected), given_args


def test_every_math_function_is_computed():
    assert {f"math.{name}" for name in MATH} <= OPS.keys()
    assert shape_of("math.sqrt", (16,), {}) == 4
    assert shape_of("operator.floordiv", (7, 2), {}) == 3


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("matmul", (M, M)),
        ("reshape", (M, 7)),
        ("expand", (M, 4, 3)),
        ("add", (M, W)),
        ("sum", (M, 2)),
        ("cat", ([M, W],)),
        ("gather", (M, 0, Shaped((2, 4)))),
        ("gather", (M, 0, V)),
        ("operator.getitem", (V, (0, 0))),
        ("operator.getitem", (V, 5)),
        ("narrow", (V, 0, 0, 9)),
        ("narrow", (V, 0, 4, 2)),
        ("narrow", (V, 0, -6, 1)),
        ("operator.mul", ("a", 10**9)),
        ("operator.mul", ((1,), 10**9)),
        ("exp", (2.0,)),
    ],
)
def test_invalid_arguments_of_an_op_raise_an_error(op, args):
    with pytest.raises((TypeError, ValueError, IndexError)):
        shape_of(op, args, {})


ITEMS = st.one_of(
    st.none(),
    st.integers(-2, 1),
    st.builds(slice, st.none() | st.integers(-3, 3), st.none() | st.integers(-3, 3), st.sampled_from([None, 1, 2])),
    st.sampled_from([(2,), (1,), (3, 2), (3, 1)]).map(lambda shape: np.zeros(shape, int)),
)


@example([2, 3, 4], [0, slice(None), np.zeros(2, int)], False)
@given(st.lists(st.integers(2, 4), min_size=1, max_size=4), st.lists(ITEMS, min_size=1, max_size=4), st.booleans())
def test_index_has_the_shape_of_torch(sizes, items, ellipsis):
    torch = pytest.importorskip("torch")
    items = [*items, ...] if ellipsis else items
    abstract = tuple(Shaped(item.shape) if isinstance(item, np.ndarray) else item for item in items)
    try:
        places = (torch.tensor(item) if isinstance(item, np.ndarray) else item for item in items)
        expected = torch.empty(sizes)[tuple(places)].shape
    except IndexError:
        with pytest.raises((IndexError, ValueError)):
            shape_of("operator.getitem", (Shaped(tuple(sizes)), abstract), {})
        return
    found = shape_of("operator.getitem", (Shaped(tuple(sizes)), abstract), {})
    assert found.shape == expected and found.size == math.prod(expected)

"""The work of a traced loss, estimated from shapes before anything is executed, and its limits.

A small graph can cause any amount of work. Two products of 8,192 x 8,192 matrices take minutes on a CPU, and so does
compiling 2,000 nodes, or a program for each of 500 lengths. Therefore work is counted in seconds of a CPU core, for the
loss with its slope. The constants were measured on a Xeon. They may be wrong by a small factor: the limits are
generous.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import orjson

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.spec.commands import CustomLoss, Example, Forward
from tinkerflow.backend.spec.traced_graph import run_graph
from tinkerflow.backend.spec.traced_shapes import Extremes, Shaped, contracted, shape_of

MAX_EXAMPLE_SECONDS = 10.0  # of one example: nothing can interrupt it
MAX_EXAMPLE_CELLS = 2**28  # of all tensors that the loss of one example computes: 1 GiB in float32
MAX_REQUEST_SECONDS = 600.0  # of all examples of a request
STEP_SECONDS = 0.5  # of losses that are computed between two turns of other commands
STEP_OPERATIONS = STEP_SECONDS * 2e10  # floating-point operations of a core in a step

_CALL, _CELL, _FLOP = 1e-3, 8e-9, 1e-10
_PROGRAM, _NODE, _NODE_PAIR = 0.1, 5e-3, 1.5e-5  # compiling: of a program, each node, and each pair of nodes
_PRODUCTS = ("dot", "matmul", "operator.matmul")
# Compiling an op with its slope, as a multiple of an elementwise operation.
_NODE_FACTORS = {
    **dict.fromkeys(("sum", "mean", "any", "all", "count_nonzero", "argmax", "argmin", *_PRODUCTS), 5.0),
    **dict.fromkeys(("max", "min", "amax", "amin", "logsumexp"), 12.0),
    **dict.fromkeys(("logaddexp", "logsigmoid", "softplus", "gelu", "mse_loss", "l1_loss"), 13.0),
    **dict.fromkeys(("var", "std", "softmax", "log_softmax", "huber_loss", "smooth_l1_loss"), 20.0),
}
_PRODUCT_LEVEL = 11.0  # the same for each of the first levels of the tree of a product
_CELL_FACTORS = dict.fromkeys(("softmax", "log_softmax", "logsumexp", "var", "std", "logaddexp", "gather"), 3.0)
_SUMMED_CELL = 3e-5  # compiling a cumsum: XLA precomputes its slope if that is constant
_DIFFERENCE = 0.1  # compiling each of the differences of diff
_DTYPES = dict.fromkeys(("float32", "float16", "bfloat16", "int64", "int32", "bool"), "dtype")

Shapes = tuple[tuple[int, ...], ...]  # of the inputs, in order


@dataclass(frozen=True)
class LossWork:
    """The work of the loss of one example.

    run: seconds for each run. compiling: seconds for the first example with its shapes. cells: of all tensors. reason:
    the largest part of the time, for errors.
    """

    run: float
    compiling: float
    cells: int
    reason: str


def loss_seconds(loss: CustomLoss, examples: Sequence[Example]) -> tuple[float, ...]:
    """The work of each example's loss in seconds of a CPU core. The first example with its shapes pays for compilation.

    UserError: an example, a node or the request is too much work, or the shapes of a node's arguments do not fit.
    """
    names = tuple(loss.inputs)[1:]
    shapes = [_input_shapes(example, names) for example in examples]
    nodes, distinct = loss.nodes.count('"op"'), len(set(shapes))
    _check_request(loss, len(examples), distinct, distinct * _compile_seconds(nodes))
    seconds, compiled = [], set[Shapes]()
    for i, each in enumerate(shapes):
        work = work_of(loss, each)
        _check_example(loss, work, f"data[{i}], of {each[0][0]} tokens")
        seconds.append(work.run + (0.0 if each in compiled else work.compiling))
        compiled.add(each)
    _check_request(loss, len(examples), distinct, sum(seconds))
    return tuple(seconds)


def check_loss(loss: CustomLoss) -> None:
    """Raise UserError if even the loss of a single token is too much work. Shapes need not fit a single token."""
    try:
        work = work_of(loss, tuple((1,) * rank for rank in loss.inputs.values()))
    except UserError:
        return  # the check of each example finds it
    _check_example(loss, work, "an example of one token")


def work_of(loss: CustomLoss, shapes: Shapes) -> LossWork:
    """The work of an example whose inputs have these shapes. UserError: the arguments of a node do not fit."""
    return _work_of(loss.name, loss.nodes, shapes)


@lru_cache(maxsize=4096)
def _work_of(name: str, nodes: str, shapes: Shapes) -> LossWork:
    graph = orjson.loads(nodes)
    run, compiling, cells, count, weight = _CALL, 0.0, 0, 0, 0.0
    by_call = list[float]()

    def call(op: str, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
        nonlocal run, compiling, cells, count, weight
        result = shape_of(op, args, named)
        tensors = [x for arg in (*args, *named.values()) for x in (arg if isinstance(arg, list) else [arg])]
        sizes = [x.size for x in tensors if isinstance(x, Shaped)]
        made = result.values.size if isinstance(result, Extremes) else getattr(result, "size", 0)
        seconds = _CELL * _CELL_FACTORS.get(op, 1.0) * max(made, sum(sizes))
        if op in _PRODUCTS:
            seconds += _FLOP * 2 * made * contracted(args[0])
        slow, operations = _slow_compilation(op, args, named), max(1, len(sizes) - 2)
        run, compiling, cells, count = run + seconds, compiling + slow, cells + made, count + operations
        weight += operations * _NODE_FACTORS.get(op, 1.0)
        weight += _PRODUCT_LEVEL * min(6.0, _levels(args)) if op == "prod" else 0.0
        by_call.append(seconds + slow)
        return result

    run_graph(name, graph, [Shaped(shape) for shape in shapes], call, _DTYPES)
    calls, heaviest = [node for node in graph if node["op"].startswith("call")], max(by_call, default=0.0)
    reason = f"to compile its {count} operations"
    if heaviest > _compile_seconds(weight):
        node = calls[by_call.index(heaviest)]
        reason = f"in node {node['name']!r} ({node['target']})"
    return LossWork(run, compiling + _compile_seconds(weight), cells, reason)


def loss_steps(command: Forward) -> int:
    """The number of steps in which workers compute the losses of a command: 0 unless the client traced the loss.

    The pool sends a command for each step, so other commands wait for at most one step, and the project pays for each
    step.
    """
    return math.ceil(sum(command.loss_seconds) / STEP_SECONDS)


def examples_of_step(command: Forward, step: int) -> list[int]:
    """The examples whose loss is computed in a step, counted from 0. Steps without examples follow a long example."""
    begins, members = 0.0, []
    for i, seconds in enumerate(command.loss_seconds):
        if int(begins / STEP_SECONDS) == step:
            members.append(i)
        begins += seconds
    return members


def _input_shapes(example: Example, names: Sequence[str]) -> Shapes:
    logprobs = example.targets_TK.shape[:1] if example.flat else example.targets_TK.shape
    return (logprobs, *(example.inputs[name].shape for name in names))


def _compile_seconds(nodes: float) -> float:
    return _PROGRAM + _NODE * nodes + _NODE_PAIR * nodes * nodes


def _slow_compilation(op: str, args: Sequence[Any], named: Mapping[str, Any]) -> float:
    """The extra seconds to compile a node, compared with an elementwise node. Products are compiled as trees."""
    deep = max(0.0, _levels(args) - 6)
    match op:
        case "cumsum":
            return _SUMMED_CELL * _first_size(args)
        case "prod":
            return 0.3 * deep
        case "cumprod":
            return 0.25 + 0.6 * deep
        case "diff":
            return _DIFFERENCE * float(args[1] if len(args) > 1 else named.get("n", 1))
    return 0.0


def _levels(args: Sequence[Any]) -> float:
    """The depth of a tree over all cells of the first argument."""
    return math.log2(max(1, _first_size(args)))


def _first_size(args: Sequence[Any]) -> int:
    return args[0].size if args and isinstance(args[0], Shaped) else 0


def _check_example(loss: CustomLoss, work: LossWork, example: str) -> None:
    whose, seconds = f"custom loss {loss.name!r}: {example}", work.run + work.compiling
    if work.cells > MAX_EXAMPLE_CELLS:
        raise UserError(f"{whose}: its tensors have {work.cells} cells in all: must be at most {MAX_EXAMPLE_CELLS}")
    if seconds > MAX_EXAMPLE_SECONDS:
        raise UserError(
            f"{whose}: the loss takes about {seconds:.3g} s of a CPU core, most of it {work.reason}: must be at most "
            f"{MAX_EXAMPLE_SECONDS:g} s"
        )


def _check_request(loss: CustomLoss, examples: int, shapes: int, seconds: float) -> None:
    if seconds > MAX_REQUEST_SECONDS:
        raise UserError(
            f"custom loss {loss.name!r}: the losses of {examples} examples of {shapes} different shapes take about "
            f"{seconds:.3g} s of a CPU core: must be at most {MAX_REQUEST_SECONDS:g} s for one request. Send fewer "
            "examples, or fewer different lengths"
        )

"""Traced losses, executed: each example by itself, on its exact logprobs, compiled with its slope.

A loss may take a mean or a maximum over its tokens, so padding to a bucket would change what it says. Hence it compiles
once for each shape of an example, which costs some 0.1 s. The PROGRAMS last used are kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
import orjson

from tinkerflow.backend.compute.training.custom_loss.masked import value_and_slope
from tinkerflow.backend.compute.training.custom_loss.ops import DTYPES, OPS
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.spec.commands import CustomLoss, Example, Float32
from tinkerflow.backend.spec.limits import MAX_TRACED_CELLS
from tinkerflow.backend.spec.torch_names import FUNCTIONS, METHODS

PROGRAMS = 256
_MAX_INTEGER = 2**31 - 1

Shapes = tuple[tuple[tuple[int, ...], str], ...]


def custom_losses(
    loss: CustomLoss, examples: Sequence[Example], logprobs: Sequence[Float32]
) -> tuple[list[tuple[float, npt.NDArray[np.float64]]], dict[str, float]]:
    """(loss, slope [T, K]) of each example, and the metrics over all of them: their sums, or means over the examples.

    logprobs are [T, K]. UserError names the node that cannot be computed.
    """
    outcomes, sums = [], dict[str, float]()
    for example, logprobs_TK in zip(examples, logprobs, strict=True):
        flat = logprobs_TK[:, 0] if example.flat else logprobs_TK
        values = (flat, *(example.inputs[name] for name in tuple(loss.inputs)[1:]))
        value, metrics, slope = _of_example(loss, values)
        outcomes.append((value, slope.astype(np.float64).reshape(logprobs_TK.shape)))
        for key, metric in metrics.items():
            sums[key] = sums.get(key, 0.0) + metric
    return outcomes, {key: total / len(examples) if key.endswith(":mean") else total for key, total in sums.items()}


def _of_example(loss: CustomLoss, values: Sequence[npt.NDArray[Any]]) -> tuple[float, dict[str, float], Float32]:
    """The loss, the metrics and the slope by the first value. Tokens that overflow and do not count change nothing."""
    shapes = tuple((value.shape, value.dtype.name) for value in values)

    def run(*, masked: bool) -> tuple[float, dict[str, float], Float32]:
        (value, metrics), slope = _program(loss.name, loss.nodes, shapes, masked)(*values)
        return float(value), {key: float(metric) for key, metric in metrics.items()}, np.asarray(slope)

    value, metrics, slope = run(masked=False)
    trained = math.isfinite(value) and bool(np.isfinite(slope).all())
    if trained and all(map(math.isfinite, metrics.values())):
        return value, metrics, slope
    masked_value, masked_metrics, masked_slope = run(masked=True)
    if not trained:
        value, slope = masked_value, masked_slope
    return value, {key: x if math.isfinite(x) else masked_metrics[key] for key, x in metrics.items()}, slope


@lru_cache(maxsize=PROGRAMS)
def _program(name: str, nodes: str, shapes: Shapes, masked: bool) -> Any:
    """The compiled loss with its metrics and its slope by the first value, for values of these shapes and dtypes.

    masked: as `masked.value_and_slope` computes it.
    """
    graph = orjson.loads(nodes)

    def run(*values: jax.Array) -> tuple[jax.Array, Mapping[str, jax.Array]]:
        return evaluate(name, graph, values)

    # Every process of the group computes it, for itself: the result is small, and must be the same everywhere.
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    given = [jax.ShapeDtypeStruct(shape, dtype, sharding=here) for shape, dtype in shapes]
    both = (lambda *values: value_and_slope(run, values)) if masked else jax.value_and_grad(run, has_aux=True)
    return jax.jit(both).lower(*given).compile()


def evaluate(
    name: str, graph: Sequence[Mapping[str, Any]], values: Sequence[jax.Array]
) -> tuple[jax.Array, Mapping[str, jax.Array]]:
    """The scalar loss and the scalar metrics of a graph, given its inputs in order."""
    inputs, known = iter(values), dict[str, Any]()
    for node in graph:
        where = f"custom loss {name!r}: node {node['name']!r} ({node['target']})"
        if node["op"] == "placeholder":
            known[node["name"]] = next(inputs)
            continue
        args = [_value(arg, known) for arg in node["args"]]
        if node["op"] == "output":
            loss, metrics = args[0]
            for key, value in {"the loss": loss, **metrics}.items():
                if getattr(value, "shape", ()) != ():
                    raise UserError(f"{where}: {key} has shape {list(value.shape)}: must be a scalar")
            if not isinstance(loss, jax.Array) or not np.issubdtype(loss.dtype, np.floating):
                raise UserError(f"{where}: the loss is no floating-point tensor")
            return loss, metrics
        op = OPS[(FUNCTIONS if node["op"] == "call_function" else METHODS)[node["target"]]]
        try:
            value = op(*args, **{key: _value(arg, known) for key, arg in node["kwargs"].items()})
        except Exception as error:  # whatever an op finds wrong with its arguments is the loss's fault
            reason = str(error).split("\n", 1)[0][:200]
            raise UserError(f"{where}: {type(error).__name__}: {reason}") from error
        _check_size(value, where)
        known[node["name"]] = value
    raise UserError(f"custom loss {name!r}: it has no output")


def _check_size(value: object, where: str) -> None:
    if isinstance(value, jax.Array) and value.size > MAX_TRACED_CELLS:
        raise UserError(f"{where}: the result has {value.size} cells: must be at most {MAX_TRACED_CELLS}")
    if isinstance(value, int) and abs(value) > _MAX_INTEGER:
        raise UserError(f"{where}: the result is beyond 32 bits")


def _value(arg: Any, known: Mapping[str, Any]) -> Any:
    """An encoded argument as the ops take it."""
    if isinstance(arg, list):
        return [_value(part, known) for part in arg]
    if not isinstance(arg, dict):
        return arg
    ((kind, content),) = arg.items()
    match kind:
        case "ref":
            return known[content]
        case "tuple":
            return tuple(_value(part, known) for part in content)
        case "dict":
            return {key: _value(part, known) for key, part in content.items()}
        case "slice":
            return slice(*(_value(part, known) for part in content))
        case "ellipsis":
            return ...
        case "float":
            return float(content)
        case "dtype":
            return DTYPES[content]
    return content  # a device, layout or memory format: there is one of each here

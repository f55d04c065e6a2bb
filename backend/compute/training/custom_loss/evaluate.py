"""Compute traced losses and their slopes: each example by itself, from its exact logprobs.

A loss may take a mean or a maximum over its tokens, so padding would change its value. Therefore the loss is compiled
for each shape of an example, which takes 0.1 s or more. The `PROGRAMS` most recently used programs are kept.
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
from tinkerflow.backend.spec.traced_graph import run_graph

PROGRAMS = 256

Outcome = tuple[float, npt.NDArray[np.float64], dict[str, float]]  # the loss, its slope [T, K], and its metrics
Shapes = tuple[tuple[tuple[int, ...], str], ...]


def custom_loss(loss: CustomLoss, example: Example, logprobs_TK: Float32) -> Outcome:
    """The loss of an example, its slope [T, K] and its metrics. UserError names the node that cannot be computed."""
    flat = logprobs_TK[:, 0] if example.flat else logprobs_TK
    value, metrics, slope = _compute(loss, (flat, *(example.inputs[name] for name in tuple(loss.inputs)[1:])))
    return value, slope.astype(np.float64).reshape(logprobs_TK.shape), metrics


def _compute(loss: CustomLoss, values: Sequence[npt.NDArray[Any]]) -> tuple[float, dict[str, float], Float32]:
    """The loss, the metrics, and the slope with respect to the first value.

    Tokens that overflow but do not count have no effect.
    """
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
    """The compiled loss with its metrics and its slope, for values of these shapes and dtypes.

    The slope is with respect to the first value. masked: compute it with `masked.value_and_slope`.
    """
    graph = orjson.loads(nodes)

    def run(*values: jax.Array) -> tuple[jax.Array, Mapping[str, jax.Array]]:
        return evaluate(name, graph, values)

    # Every process of the group computes the loss by itself: the result is small, and must be the same everywhere.
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    given = [jax.ShapeDtypeStruct(shape, dtype, sharding=here) for shape, dtype in shapes]
    both = (lambda *values: value_and_slope(run, values)) if masked else jax.value_and_grad(run, has_aux=True)
    return jax.jit(both).lower(*given).compile()


def evaluate(
    name: str, graph: Sequence[Mapping[str, Any]], values: Sequence[jax.Array]
) -> tuple[jax.Array, Mapping[str, jax.Array]]:
    """The scalar loss and metrics of a graph, given its inputs in order. UserError names the invalid node."""

    def call(op: str, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
        return OPS[op](*args, **named)

    loss, metrics, where = run_graph(name, graph, values, call, DTYPES)
    if not isinstance(loss, jax.Array) or not np.issubdtype(loss.dtype, np.floating):
        raise UserError(f"{where}: the loss is not a floating-point tensor")
    return loss, metrics

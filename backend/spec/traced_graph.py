"""Runs the graph of a traced loss node by node on any kind of values: on arrays, or only on shapes.

`wire/custom_losses.py` reads and checks graphs. Arguments are encoded as by the SDK's `encode_graph`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.spec.limits import MAX_TRACED_CELLS, MAX_TRACED_RANK
from tinkerflow.backend.spec.torch_names import FUNCTIONS, METHODS

_MAX_INTEGER = 2**31 - 1

Call = Callable[[str, Sequence[Any], Mapping[str, Any]], Any]  # (op, arguments, named arguments) -> result


def run_graph(
    name: str, graph: Iterable[Mapping[str, Any]], inputs: Iterable[Any], call: Call, dtypes: Mapping[str, Any]
) -> tuple[Any, Mapping[str, Any], str]:
    """Run a graph. Returns the scalar loss, the scalar metrics, and the name of the output node for errors.

    name: the loss's name in errors. graph: its nodes. inputs: their values, in order. call: executes an op of
    `torch_names`; a value with a `shape` counts as a tensor. dtypes: the values that represent dtypes. UserError: a
    node, which the error names, cannot be executed.
    """
    remaining, known = iter(inputs), dict[str, Any]()
    for node in graph:
        where = f"custom loss {name!r}: node {node['name']!r} ({node['target']})"
        if node["op"] == "placeholder":
            known[node["name"]] = next(remaining)
            continue
        args = [_decode(arg, known, dtypes) for arg in node["args"]]
        if node["op"] == "output":
            loss, metrics = args[0]
            for key, value in {"the loss": loss, **metrics}.items():
                if getattr(value, "shape", ()) != ():
                    raise UserError(f"{where}: {key} has shape {list(value.shape)}: must be a scalar")
            return loss, metrics, where
        op = (FUNCTIONS if node["op"] == "call_function" else METHODS)[node["target"]]
        try:
            value = call(op, args, {key: _decode(arg, known, dtypes) for key, arg in node["kwargs"].items()})
        except Exception as error:  # any error of an op is due to its arguments
            reason = str(error).split("\n", 1)[0][:200]
            raise UserError(f"{where}: {type(error).__name__}: {reason}") from error
        _check(value, where)
        known[node["name"]] = value
    raise UserError(f"custom loss {name!r} has no output")


def _check(value: Any, where: str) -> None:
    if hasattr(value, "shape"):
        if (cells := math.prod(value.shape)) > MAX_TRACED_CELLS:
            raise UserError(f"{where}: the result has {cells} cells: must be at most {MAX_TRACED_CELLS}")
        if len(value.shape) > MAX_TRACED_RANK:
            raise UserError(f"{where}: the result has {len(value.shape)} dimensions: must be at most {MAX_TRACED_RANK}")
    if isinstance(value, int) and abs(value) > _MAX_INTEGER:
        raise UserError(f"{where}: the result is beyond 32 bits")


def _decode(arg: Any, known: Mapping[str, Any], dtypes: Mapping[str, Any]) -> Any:
    """Decode an argument for an op."""

    def decode(part: Any) -> Any:
        return _decode(part, known, dtypes)

    if isinstance(arg, list):
        return [decode(part) for part in arg]
    if not isinstance(arg, dict):
        return arg
    ((kind, content),) = arg.items()
    match kind:
        case "ref":
            return known[content]
        case "tuple":
            return tuple(decode(part) for part in content)
        case "dict":
            return {key: decode(part) for key, part in content.items()}
        case "slice":
            return slice(*(decode(part) for part in content))
        case "ellipsis":
            return ...
        case "float":
            return float(content)
        case "dtype":
            return dtypes[content]
    return content  # a device, layout or memory format: only one of each exists

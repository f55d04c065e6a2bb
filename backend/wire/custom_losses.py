"""create_custom_loss: a loss that the client traced with torch.fx, checked node by node and stored as plain data.

The loss contains no code. Each node names a function of `torch_names`. Other nodes are rejected, and the error names
the node.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

import orjson

from tinkerflow.backend.core.errors import UserError, broken, shown
from tinkerflow.backend.spec.commands import CustomLoss
from tinkerflow.backend.spec.torch_names import ATTRIBUTES, DTYPES, FUNCTIONS, METHODS
from tinkerflow.backend.spec.traced_work import check_loss
from tinkerflow.backend.wire.requests import whole_number
from tinkerflow.backend.wire.validation import Text, WireModel

MAX_NODES = 2000
MAX_INPUTS = 16
MAX_GRAPH_BYTES = 2**20  # as JSON: every worker gets the graph with each request
_MAX_DEPTH = 8  # of an argument
_INPUT_NAME = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_LOSS_NAME = re.compile(r"[^\0]{1,200}")
_FLOATS = ("inf", "-inf", "nan")


class _Graph(WireModel):
    """The traced graph. format: 1."""

    format: Any = None
    nodes: Any = None


class CreateCustomLoss(WireModel):
    """create_custom_loss, apart from its address."""

    name: Text
    inputs: Any = None
    graph: _Graph = _Graph()


class _Input(WireModel):
    """A tensor that the loss reads, and its rank."""

    name: Text
    rank: Annotated[int, whole_number(0, 2)]


class _Node(WireModel):
    """A node of the graph. `_argument` checks its arguments."""

    op: Text
    name: Text
    target: Text


def read_custom_loss(values: Mapping[str, Any]) -> CustomLoss:
    """Read a parsed create_custom_loss body. UserError names the node, its target, and the broken rule.

    A loss that takes too much work even for one token is rejected here. Other losses are checked again with each
    example.
    """
    body = CreateCustomLoss.from_values(values)
    name = body.name
    if not _LOSS_NAME.fullmatch(name):
        raise broken("name", name, "1 to 200 characters")
    inputs = _inputs(body.inputs)
    if body.graph.format != 1:
        raise broken("graph.format", body.graph.format, "1")
    nodes = body.graph.nodes
    if not isinstance(nodes, list) or not 2 <= len(nodes) <= MAX_NODES:
        count = len(nodes) if isinstance(nodes, list) else nodes
        raise broken("graph.nodes", count, f"a list of 2 to {MAX_NODES} nodes")
    kept: list[dict[str, Any]] = []
    known: set[str] = set()
    for i, node in enumerate(nodes):
        kept.append(_node(node, i, known, last=i == len(nodes) - 1))
        known.add(kept[-1]["name"])
    placeholders = [node["target"] for node in kept if node["op"] == "placeholder"]
    if placeholders != list(inputs):
        raise broken("graph.nodes", placeholders, f"with the placeholders {list(inputs)}, the inputs in order")
    encoded = orjson.dumps(kept)
    if len(encoded) > MAX_GRAPH_BYTES:
        raise UserError(f"graph.nodes takes {len(encoded)} bytes as JSON: must be at most {MAX_GRAPH_BYTES}")
    loss = CustomLoss(name, inputs, encoded.decode())
    check_loss(loss)
    return loss


def dump_custom_loss(loss: CustomLoss) -> str:
    """The loss in the form that the journal stores."""
    return orjson.dumps({"name": loss.name, "inputs": list(loss.inputs.items()), "nodes": loss.nodes}).decode()


def load_custom_loss(definition: str) -> CustomLoss:
    """The inverse of dump_custom_loss."""
    stored = orjson.loads(definition)
    return CustomLoss(stored["name"], dict(stored["inputs"]), stored["nodes"])


def _inputs(given: object) -> dict[str, int]:
    if not isinstance(given, list) or not 1 <= len(given) <= MAX_INPUTS:
        raise broken("inputs", given, f"a list of 1 to {MAX_INPUTS} inputs")
    inputs: dict[str, int] = {}
    for i, entry in enumerate(given):
        declared = _Input.from_values(entry if isinstance(entry, dict) else {}, f"inputs[{i}].")
        name, rank = declared.name, declared.rank
        if not _INPUT_NAME.fullmatch(name) or name in inputs:
            raise broken(f"inputs[{i}].name", name, "a name [a-z_][a-z0-9_]{0,63} that no other input has")
        inputs[name] = rank
    if next(iter(inputs)) != "logprobs" or inputs["logprobs"] == 0:
        raise broken("inputs[0]", given[0], "logprobs, of rank 1 or 2")
    return inputs


def _node(node: object, index: int, known: set[str], *, last: bool) -> dict[str, Any]:
    where = f"graph.nodes[{index}]"
    if not isinstance(node, dict):
        raise broken(where, node, "an object")
    read = _Node.from_values(node, f"{where}.")
    op, name, target = read.op, read.name, read.target
    where = f"{where} {shown(name)} ({shown(target)})"
    if name in known:
        raise UserError(f"{where}: another node has this name")
    args, kwargs = node.get("args") or [], node.get("kwargs") or {}
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise UserError(f"{where}: args must be a list, kwargs an object")
    if (op == "output") != last:
        raise UserError(f"{where}: op is {op!r}; the last node, and no other, must be the output")
    match op:
        case "output":
            _output(args, kwargs, where)
        case "placeholder":
            if args or kwargs:
                raise UserError(f"{where}: a placeholder takes no arguments")
        case "call_function" if target in FUNCTIONS:
            if target == "getattr" and (len(args) != 2 or kwargs or args[1] not in ATTRIBUTES):
                raise UserError(f"{where}: the attribute must be one of {', '.join(sorted(ATTRIBUTES))}")
        case "call_method" if target in METHODS:
            if not args or not isinstance(args[0], dict) or "ref" not in args[0]:
                raise UserError(f"{where}: the first argument must be the tensor")
        case "call_function" | "call_method":
            raise UserError(f"{where}: the {op[5:]} is not supported in custom losses")
        case "get_attr" | "call_module":
            raise UserError(f"{where}: op {op}: a custom loss cannot contain its own tensors or modules")
        case _:
            raise UserError(f"{where}: op {shown(op)} is unknown")
    for arg in (*args, *kwargs.values()):
        _argument(arg, known, where, 0)
    return {"op": op, "name": name, "target": target, "args": args, "kwargs": kwargs}


def _output(args: list[Any], kwargs: Mapping[str, Any], where: str) -> None:
    match args:
        case [{"tuple": [{"ref": _}, {"dict": dict(metrics)}]}] | [[{"ref": _}, {"dict": dict(metrics)}]] if not kwargs:
            for key, value in metrics.items():
                if not _METRIC.fullmatch(key):
                    raise UserError(f"{where}: metric {shown(key)} must be named custom/<name>:sum or :mean")
                if not isinstance(value, dict) or "ref" not in value:
                    raise UserError(f"{where}: metric {shown(key)} must be a node's value")
        case _:
            raise UserError(f"{where}: must return (loss, metrics), the loss a node's value and the metrics a dict")


def _argument(arg: object, known: set[str], where: str, depth: int) -> None:
    """Raise UserError unless `arg` is a scalar, a list, or one of the one-key objects of the protocol."""
    if depth > _MAX_DEPTH:
        raise UserError(f"{where}: an argument is nested deeper than {_MAX_DEPTH}")
    if arg is None or isinstance(arg, bool | int | float | str):
        return
    parts: list[Any] = []
    match arg:
        case list():
            parts = arg
        case {"ref": str(name), **rest} if not rest:
            if name not in known:
                raise UserError(f"{where}: refers to {shown(name)}, which is not an earlier node")
        case {"tuple": list(parts), **rest} if not rest:
            pass
        case {"dict": dict(items), **rest} if not rest:
            parts = list(items.values())
        case {"slice": [_, _, _] as parts, **rest} if not rest:
            pass
        case {"ellipsis": True, **rest} if not rest:
            pass
        case {"float": str(text), **rest} if not rest and text in _FLOATS:
            pass
        case {"dtype": str(text), **rest} if not rest:
            if text not in DTYPES:
                raise UserError(f"{where}: dtype {shown(text)} must be one of {', '.join(sorted(DTYPES))}")
        case {"device": str(), **rest} | {"layout": str(), **rest} | {"memory_format": str(), **rest} if not rest:
            pass
        case _:
            raise UserError(f"{where}: the argument {shown(arg)} is not of a kind that a custom loss supports")
    for part in parts:
        _argument(part, known, where, depth + 1)

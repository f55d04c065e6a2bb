"""The content of requests as trees of plain values, and the first field in which two of them differ."""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from tinkerflow.backend.core.errors import shown

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from tinkerflow.deployments.cassettes.requests import ClientRequest

ABSENT = object()
_ITEM_TYPES = {1: "f", 2: "q", 3: "i", 4: "H"}  # DType -> type code of an array; bfloat16 as its bits
_ENCODER = msgspec.json.Encoder(order="deterministic")


def tree_of(asked: ClientRequest, ignore: Collection[str] = ()) -> Any:
    """The content of a request as dicts, lists and plain values. ignore: dotted paths of fields to leave out."""
    if asked.content is not None:
        tree: Any = asked.content
    elif asked.operation in ("forward", "forward_backward"):
        from tinkerflow.backend.wire.tinker_pb2 import ForwardBackwardRequest

        tree = _message(ForwardBackwardRequest.FromString(asked.body))
    else:
        tree = {"body": asked.body} if asked.body else {}
    for path in ignore:
        tree = _without(tree, path.split("."))
    return tree


def fingerprint(asked: ClientRequest, ignore: Collection[str] = ()) -> bytes:
    """Bytes that are equal for requests of equal content. ignore: dotted paths of fields to leave out."""
    if asked.content is None and not ignore and not asked.strict:
        return asked.body
    return _ENCODER.encode(tree_of(asked, ignore))


def equal(now: ClientRequest, then: ClientRequest, ignore: Collection[str] = ()) -> bool:
    """Whether two requests have the same content."""
    if now.operation != then.operation:
        return False
    return now.body == then.body or difference(tree_of(now, ignore), tree_of(then, ignore)) is None


def difference(now: Any, then: Any, path: str = "") -> str | None:
    """The first difference as text, such as `adam_params.beta1 is 0.8 and was 0.9 in the recording`; None if equal."""
    if isinstance(now, Mapping) and isinstance(then, Mapping):
        for key in dict.fromkeys([*then, *now]):
            inner = f"{path}.{key}" if path else str(key)
            found = difference(now.get(key, ABSENT), then.get(key, ABSENT), inner)
            if found is not None:
                return found
        return None
    if isinstance(now, list | array) and isinstance(then, list | array):
        return _of_lists(now, then, path)
    return (
        None
        if now == then or (_is_nan(now) and _is_nan(then))
        else f"{path or 'the request'} {_is(now)}, but {_was(then)} in the recording"
    )


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _of_lists(now: Any, then: Any, path: str) -> str | None:
    found = None
    if not (isinstance(now, array) and now == then):
        items = enumerate(zip(now, then, strict=False))
        found = next((text for i, (a, b) in items if (text := difference(a, b, f"{path}[{i}]")) is not None), None)
    if len(now) == len(then):
        return found
    text = f"{path} has {_count(now)}, but had {len(then)} in the recording"
    return text if found is None else f"{text}; {found}"


def _count(items: Any) -> str:
    return f"{len(items)} item{'' if len(items) == 1 else 's'}"


def _is(value: Any) -> str:
    return "is not given" if value is ABSENT else f"is {_plain(value)}"


def _was(value: Any) -> str:
    return "was not given" if value is ABSENT else f"was {_plain(value)}"


def _plain(value: Any) -> str:
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    return shown(value.tolist() if isinstance(value, array) else value)


def _without(tree: Any, path: list[str]) -> Any:
    """A copy without the field at `path`. In lists, the path applies to each item."""
    if isinstance(tree, list):
        return [_without(item, path) for item in tree]
    if not isinstance(tree, Mapping) or path[0] not in tree:
        return tree
    rest = {key: value for key, value in tree.items() if key != path[0]}
    return rest if len(path) == 1 else rest | {path[0]: _without(tree[path[0]], path[1:])}


# ------------------------------------------------------------------ protobuf
def _message(message: Message) -> dict[str, Any]:
    """The fields that are set. Tensors are unpacked into numbers, under the field names of the SDK's classes."""
    if message.DESCRIPTOR.name == "Tensor":
        return _tensor(message)
    return {field.name: _field(field, value) for field, value in message.ListFields()}


def _field(field: Any, value: Any) -> Any:
    if field.name == "tokens" and isinstance(value, bytes):
        return _numbers("i", value)
    if field.message_type is None:
        return value if isinstance(value, str | bytes | int | float) else list(value)
    if field.message_type.GetOptions().map_entry:
        inner = field.message_type.fields_by_name["value"]
        return {key: _field(inner, value[key]) for key in sorted(value)}
    if hasattr(value, "ListFields"):
        return _message(value)
    return [_message(item) for item in value]


def _tensor(tensor: Any) -> dict[str, Any]:
    code = _ITEM_TYPES.get(tensor.dtype, "B")
    named = {"dtype": tensor.dtype, "shape": list(tensor.shape)}
    if not tensor.HasField("sparse_csr"):
        return named | {"data": _numbers(code, tensor.dense)}
    sparse = tensor.sparse_csr
    indices = {
        "sparse_crow_indices": _numbers("q", sparse.crow_indices),
        "sparse_col_indices": _numbers("q", sparse.col_indices),
    }
    return named | {"data": _numbers(code, sparse.values)} | indices


def _numbers(code: str, data: bytes) -> Any:
    """The numbers of a packed array; the bytes themselves if the last item is incomplete."""
    numbers = array(code)
    if len(data) % numbers.itemsize:
        return data
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers

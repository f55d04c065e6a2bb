"""forward and forward_backward: from the request's protobuf to the pool's command, with every check of its content.

Letters: T tokens of one sequence, K targets per position. Arrays are read in place (numpy.frombuffer), and the value
checks run once over all data of a request; only a failing check looks for the place it failed at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from backend.commands import Example, Float32, Forward, Int32, Loss
from backend.errors import UserError
from backend.wire import tinker_pb2 as pb
from backend.wire.fields import broken
from backend.wire.losses import check_inputs, known_loss, read_config
from backend.wire.tensors import shape_of, to_array

MAX_TARGETS = 256  # targets per position
MAX_CELLS = 2**26  # target cells of one request; a sparse tensor could otherwise ask for any amount of memory
_TOKEN = np.dtype("<i4")


class ForwardHeader(NamedTuple):
    """Where a forward_backward request goes; seq_id 0 = absent."""

    model_id: str
    seq_id: int
    forward_only: bool


def forward_backward_header(body: bytes) -> ForwardHeader:
    """The address of a ForwardBackwardRequest; its data is skipped, not read. UserError when it is not protobuf."""
    header = pb.ForwardBackwardHeader()
    try:
        header.ParseFromString(body)
    except DecodeError as e:
        raise UserError(f"the request body is not a ForwardBackwardRequest: {e}") from e
    return ForwardHeader(header.model_id, header.seq_id, header.forward_only)


def decode_forward(body: bytes, *, vocab_size: int, max_context: int) -> Forward:
    """The command for a ForwardBackwardRequest; adapter_id is its model_id, config is complete (defaults filled in).

    UserError names the field, its value and the rule: unknown loss, config key or input; missing input; sequence
    empty or longer than `max_context`; lengths that differ; token ids outside [0, vocab_size); floats that are not
    finite; images.
    """
    request = pb.ForwardBackwardRequest()
    try:
        request.ParseFromString(body)
    except DecodeError as e:
        raise UserError(f"the request body is not a ForwardBackwardRequest: {e}") from e
    loss = known_loss(request.loss_fn)
    config = read_config(loss, request)
    if not request.data:
        raise broken("data", [], "at least one datum")
    cells = 0
    examples = []
    for i, datum in enumerate(request.data):
        tokens_T = _tokens(datum, i, max_context)
        cells += _check_shapes(datum, i, len(tokens_T), loss)
        if cells > MAX_CELLS:
            raise UserError(f"data has more than {MAX_CELLS} target cells up to data[{i}]: must be at most {MAX_CELLS}")
        examples.append(_example(datum, i, tokens_T, loss))
    _check_values(examples, vocab_size)
    narrowed = tuple(replace(e, targets_TK=e.targets_TK.astype(np.int32, copy=False)) for e in examples)
    return Forward(request.model_id, narrowed, loss, config, backward=not request.forward_only)


def _tokens(datum: pb.Datum, index: int, max_context: int) -> Int32:
    parts = []
    for j, chunk in enumerate(datum.model_input):
        if chunk.WhichOneof("chunk") != "encoded_text":
            what = chunk.WhichOneof("chunk") or "empty"
            raise UserError(
                f"data[{index}].model_input.chunks[{j}] is {what}: must be encoded_text, the model takes no {what}s"
            )
        parts.append(chunk.encoded_text.tokens)
    data = parts[0] if len(parts) == 1 else b"".join(parts)
    if len(data) % _TOKEN.itemsize:
        raise UserError(f"data[{index}].model_input has {len(data)} bytes of tokens: must be a multiple of 4 (int32)")
    tokens_T = np.frombuffer(data, _TOKEN)
    if not 0 < len(tokens_T) <= max_context:
        raise UserError(
            f"data[{index}].model_input has {len(tokens_T)} tokens: must be 1 to {max_context}, the model's context"
        )
    return tokens_T


def _check_shapes(datum: pb.Datum, index: int, tokens: int, loss: Loss) -> int:
    """Check names and shapes before anything is allocated; the number of target cells."""
    inputs = datum.loss_fn_inputs
    check_inputs(loss, frozenset(inputs), index)
    target_shape = shape_of(inputs["target_tokens"], _name(index, "target_tokens"))
    if target_shape[0] != tokens:
        raise UserError(
            f"{_name(index, 'target_tokens')} has {target_shape[0]} positions: "
            f"must be {tokens}, one for each token of model_input"
        )
    width = target_shape[1] if len(target_shape) == 2 else 1
    if not 1 <= width <= MAX_TARGETS:
        raise broken(
            f"{_name(index, 'target_tokens')}.shape", list(target_shape), f"[T] or [T, K] with 1 <= K <= {MAX_TARGETS}"
        )
    for key in inputs:
        shape = shape_of(inputs[key], _name(index, key))
        if shape != target_shape:
            raise broken(f"{_name(index, key)}.shape", list(shape), f"{list(target_shape)}, the shape of target_tokens")
    return tokens * width


def _example(datum: pb.Datum, index: int, tokens_T: Int32, loss: Loss) -> Example:
    inputs = datum.loss_fn_inputs
    targets = to_array(inputs["target_tokens"], _name(index, "target_tokens"))
    if targets.dtype.kind != "i":
        raise broken(f"{_name(index, 'target_tokens')}.dtype", targets.dtype.name, "int64")
    flat = targets.ndim == 1

    def floats(key: str) -> Float32:
        # float32 bytes stay where they are; integer weights (a user's integer array) are widened
        values = to_array(inputs[key], _name(index, key)).astype(np.float32, copy=False)
        return values[:, None] if flat else values

    targets_TK = targets[:, None] if flat else targets
    return Example(
        tokens_T=tokens_T,
        targets_TK=targets_TK,  # int64 until its range is known
        weights_TK=floats("weights") if "weights" in inputs else np.ones(targets_TK.shape, np.float32),
        old_logprobs_TK=floats("logprobs") if "logprobs" in inputs else None,
        advantages_TK=floats("advantages") if "advantages" in inputs else None,
        flat=flat,
    )


def _check_values(examples: Sequence[Example], vocab_size: int) -> None:
    rule = f">= 0 and < {vocab_size}, the model's vocabulary"

    def in_vocabulary(values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        return (values >= 0) & (values < vocab_size)

    _require([e.tokens_T for e in examples], in_vocabulary, "data[{}].model_input", rule)
    _require([e.targets_TK for e in examples], in_vocabulary, "data[{}].loss_fn_inputs['target_tokens']", rule)
    for key, attribute in (("weights", "weights_TK"), ("logprobs", "old_logprobs_TK"), ("advantages", "advantages_TK")):
        arrays = [array for e in examples if (array := getattr(e, attribute)) is not None]
        _require(arrays, np.isfinite, f"data[{{}}].loss_fn_inputs[{key!r}]", "a finite number")


def _require(
    arrays: Sequence[npt.NDArray[Any]],
    good: Callable[[npt.NDArray[Any]], npt.NDArray[np.bool_]],
    name: str,
    rule: str,
) -> None:
    if not arrays or good(np.concatenate([array.ravel() for array in arrays])).all():
        return
    for i, array in enumerate(arrays):
        places = np.argwhere(~good(array))
        if len(places):
            at = places[0]
            value = array[tuple(at)].item()
            raise broken(f"{name.format(i)} at position {int(at[0])}", value, rule)


def _name(index: int, key: str) -> str:
    return f"data[{index}].loss_fn_inputs[{key!r}]"

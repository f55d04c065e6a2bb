"""forward and forward_backward: from the request's protobuf to the pool's command, with every check of its content.

Letters: T tokens of one sequence, K targets per position. Arrays are read in place (numpy.frombuffer), and the value
checks run once over all data of a request; only a failing check looks for the place it failed at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from tinkerflow.backend.commands import CustomLoss, Example, Forward, Int32, StabilityInfo
from tinkerflow.backend.errors import UserError, broken
from tinkerflow.backend.spec.limits import MAX_REQUEST_CELLS, MAX_TARGETS
from tinkerflow.backend.spec.losses import LossSpec, loss_named
from tinkerflow.backend.wire import provenance
from tinkerflow.backend.wire import tinker_pb2 as pb
from tinkerflow.backend.wire.losses import check_inputs, read_config, read_loss_id
from tinkerflow.backend.wire.tensors import shape_of, to_array

_TOKEN = np.dtype("<i4")

Inputs = dict[str, npt.NDArray[Any]]  # of one datum, by name, as they came


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


def training_tokens(body: bytes) -> int:
    """How many text tokens a ForwardBackwardRequest has, each int32; 0 for what is none (it will be told so)."""
    request = pb.ForwardBackwardRequest()
    try:
        request.ParseFromString(body)
    except DecodeError:
        return 0
    return sum(len(chunk.encoded_text.tokens) // 4 for datum in request.data for chunk in datum.model_input)


@dataclass(frozen=True)
class ForwardRead:
    """A ForwardBackwardRequest read so far that it says what else is needed to decode it.

    loss_id: of the traced loss, when the loss is `custom`. sequence_ids: the sequences whose recorded stability
    information the loss needs.
    """

    request: pb.ForwardBackwardRequest
    loss: LossSpec
    config: Mapping[str, float]
    loss_id: str | None
    sequence_ids: frozenset[str]


def read_forward(body: bytes) -> ForwardRead:
    """A ForwardBackwardRequest, its loss, config and spans checked; UserError names the field, its value and the rule.

    decode_forward reads the rest.
    """
    request = pb.ForwardBackwardRequest()
    try:
        request.ParseFromString(body)
    except DecodeError as e:
        raise UserError(f"the request body is not a ForwardBackwardRequest: {e}") from e
    loss = loss_named(request.loss_fn)
    if not request.data:
        raise broken("data", [], "at least one datum")
    named = provenance.check_spans(request.data, needed_by=loss.name if loss.recorded else None)
    return ForwardRead(
        request,
        loss,
        read_config(loss, request),
        read_loss_id(loss, request),
        named if loss.recorded else frozenset(),
    )


def decode_forward(
    read: ForwardRead,
    *,
    vocab_size: int,
    max_context: int,
    custom: CustomLoss | None = None,
    recorded: Mapping[str, StabilityInfo] | None = None,
) -> Forward:
    """The command for a request; adapter_id is its model_id, config is complete (defaults filled in).

    custom: the traced loss that it names; recorded: what was recorded of its sequence_ids.
    UserError names the field, its value and the rule: unknown loss, config key or input; missing input; sequence
    empty or longer than `max_context`; lengths that differ; token ids outside [0, vocab_size); floats that are not
    finite; images; spans that do not fit what was sampled.
    """
    request, loss = read.request, read.loss
    examples_read = []
    cells = 0
    for i, datum in enumerate(request.data):
        tokens_T = _tokens(datum, i, max_context)
        inputs = _inputs(datum, i, len(tokens_T), loss, custom)
        cells += inputs["target_tokens"].size
        if cells > MAX_REQUEST_CELLS:
            raise _too_many(f"data has more than {MAX_REQUEST_CELLS} target cells up to data[{i}]")
        examples_read.append((tokens_T, inputs))
    _check_values(examples_read, loss, vocab_size)
    examples = tuple(
        _example(tokens_T, inputs, None if custom is None else tuple(custom.inputs)[1:])
        for tokens_T, inputs in examples_read
    )
    if loss.recorded:
        examples = provenance.attribute(examples, request.data, recorded or {})
    return Forward(request.model_id, examples, loss.name, read.config, backward=not request.forward_only, custom=custom)


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


def _inputs(datum: pb.Datum, index: int, tokens: int, loss: LossSpec, custom: CustomLoss | None) -> Inputs:
    """The loss's inputs: each of the shape of target_tokens, or of the rank that a traced loss declared for it.

    Shapes are checked before anything is allocated.
    """
    given = dict(datum.loss_fn_inputs.items())
    names = ("target_tokens", *(one.name for one in loss.inputs))
    declared: Mapping[str, int] = {}
    if custom is None:
        check_inputs(loss, given.keys(), index)
    else:
        declared = {"target_tokens": custom.inputs["logprobs"], **custom.inputs}
        del declared["logprobs"]
        if missing := [key for key in declared if key not in given]:
            raise UserError(f"data[{index}].loss_fn_inputs lacks {missing[0]!r}, which loss {custom.name!r} takes")
    tensors = {key: given[key] for key in declared or names if key in given}
    shapes = {key: shape_of(tensor, _name(index, key)) for key, tensor in tensors.items()}
    wanted = shapes["target_tokens"]
    if wanted[0] != tokens:
        raise UserError(
            f"{_name(index, 'target_tokens')} has {wanted[0]} positions: "
            f"must be {tokens}, one for each token of model_input"
        )
    if len(wanted) == 2 and not 1 <= wanted[1] <= MAX_TARGETS:
        rule = f"[T] or [T, K] with 1 <= K <= {MAX_TARGETS}"
        raise broken(f"{_name(index, 'target_tokens')}.shape", list(wanted), rule)
    for key, shape in shapes.items():
        if custom is None and shape != wanted:
            raise broken(f"{_name(index, key)}.shape", list(shape), f"{list(wanted)}, the shape of target_tokens")
        if custom is not None and len(shape) != declared[key]:
            raise broken(f"{_name(index, key)}.shape", list(shape), f"of rank {declared[key]}, as the loss declares it")
    if sum(math.prod(shape) for shape in shapes.values()) > MAX_REQUEST_CELLS:
        raise _too_many(f"data[{index}].loss_fn_inputs has more than {MAX_REQUEST_CELLS} cells")
    inputs = {key: to_array(tensor, shapes[key], _name(index, key)) for key, tensor in tensors.items()}
    if inputs["target_tokens"].dtype.kind != "i":
        raise broken(f"{_name(index, 'target_tokens')}.dtype", inputs["target_tokens"].dtype.name, "int64")
    return inputs


def _too_many(fact: str) -> UserError:
    return UserError(f"{fact}: must be at most {MAX_REQUEST_CELLS}")


def _check_values(read: Sequence[tuple[Int32, Inputs]], loss: LossSpec, vocab_size: int) -> None:
    rule = f">= 0 and < {vocab_size}, the model's vocabulary"

    def in_vocabulary(values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        return (values >= 0) & (values < vocab_size)

    _require([tokens_T for tokens_T, _ in read], in_vocabulary, "data[{}].model_input", rule)
    for key in dict.fromkeys(key for _, inputs in read for key in inputs):
        arrays = [inputs.get(key) for _, inputs in read]
        name = f"data[{{}}].loss_fn_inputs[{key!r}]"
        if key == "target_tokens":
            _require(arrays, in_vocabulary, name, rule)
        else:
            _require(arrays, np.isfinite, name, "a finite number")
    for one in loss.inputs:
        arrays = [inputs.get(one.name) for _, inputs in read]
        if math.isfinite(low := one.low):
            _require(arrays, partial(np.less_equal, low), f"data[{{}}].loss_fn_inputs[{one.name!r}]", f">= {low:g}")
        for i, values in enumerate(arrays):
            if one.some and values is not None and not values.any():
                raise UserError(f"{_name(i, one.name)} is 0 everywhere: must not be 0 for at least one token")
    if loss.ordered is not None:
        _require_order(read, *loss.ordered)


def _require_order(read: Sequence[tuple[Int32, Inputs]], lower: str, upper: str) -> None:
    for i, (_, inputs) in enumerate(read):
        low, high = inputs.get(lower), inputs.get(upper)
        if low is not None and high is not None and (low > high).any():
            raise UserError(f"{_name(i, lower)} has values over those of {upper}: must be <=")


def _require(
    arrays: Sequence[npt.NDArray[Any] | None],
    good: Callable[[npt.NDArray[Any]], npt.NDArray[np.bool_]],
    name: str,
    rule: str,
) -> None:
    """UserError naming the first value that is not `good`; arrays[i] belongs to datum i, None where it has none."""
    given = [array.ravel() for array in arrays if array is not None]
    if not given or good(np.concatenate(given)).all():
        return
    for i, array in enumerate(arrays):
        if array is None or good(array).all():
            continue
        at = np.argwhere(~good(array))[0]
        raise broken(f"{name.format(i)} at position {int(at[0])}", array[tuple(at)].item(), rule)


def _example(tokens_T: Int32, inputs: Inputs, declared: Sequence[str] | None) -> Example:
    """declared: the inputs of a traced loss, None = the loss is one of ours."""
    flat = inputs["target_tokens"].ndim == 1

    def columns(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return values[:, None] if flat else values

    targets_TK = columns(inputs["target_tokens"].astype(np.int32, copy=False))
    if declared is not None:
        traced = {key: _as_jax_has_it(inputs[key]) for key in declared}
        return Example(tokens_T, targets_TK, np.ones(targets_TK.shape, np.float32), flat=flat, inputs=traced)
    # float32 bytes stay where they are; integer weights (a user's integer array) are widened
    floats = {
        key: columns(values.astype(np.float32, copy=False)) for key, values in inputs.items() if key != "target_tokens"
    }
    weights_TK = floats.pop("weights", None)
    if weights_TK is None:
        weights_TK = np.ones(targets_TK.shape, np.float32)
    return Example(tokens_T, targets_TK, weights_TK, flat=flat, inputs=floats)


def _as_jax_has_it(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return values.astype(np.int32 if values.dtype.kind == "i" else np.float32, copy=False)


def _name(index: int, key: str) -> str:
    return f"data[{index}].loss_fn_inputs[{key!r}]"

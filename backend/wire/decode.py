"""forward and forward_backward: from the request's protobuf to the pool's command, with every check of its content.

Letters: T tokens of one sequence, K targets per position. Arrays are read in place (numpy.frombuffer), and the value
checks run once over all data of a request; only a failing check looks for the place it failed at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from tinkerflow.backend.commands import CustomLoss, Example, Float32, Forward, Int32, Loss, StabilityInfo
from tinkerflow.backend.errors import UserError, broken
from tinkerflow.backend.spec.limits import MAX_REQUEST_CELLS as MAX_CELLS
from tinkerflow.backend.spec.limits import MAX_TARGETS
from tinkerflow.backend.wire import provenance
from tinkerflow.backend.wire import tinker_pb2 as pb
from tinkerflow.backend.wire.losses import INPUT_NAMES, check_inputs, known_loss, read_config, read_loss_id
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

    loss_id: of the traced loss, when the loss is `custom`; sequence_ids: those whose recorded stability information is
    needed, when it is `stable_reinforce`.
    """

    request: pb.ForwardBackwardRequest
    loss: Loss
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
    loss = known_loss(request.loss_fn)
    if not request.data:
        raise broken("data", [], "at least one datum")
    named = provenance.check_spans(request.data, needed=loss == "stable_reinforce")
    return ForwardRead(
        request,
        loss,
        read_config(loss, request),
        read_loss_id(loss, request),
        named if loss == "stable_reinforce" else frozenset(),
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
        if cells > MAX_CELLS:
            raise UserError(f"data has more than {MAX_CELLS} target cells up to data[{i}]: must be at most {MAX_CELLS}")
        examples_read.append((tokens_T, inputs))
    _check_values(examples_read, vocab_size)
    examples = tuple(
        _example(tokens_T, inputs, () if custom is None else tuple(custom.inputs)[1:])
        for tokens_T, inputs in examples_read
    )
    if loss == "stable_reinforce":
        examples = provenance.attribute(examples, request.data, recorded or {})
    return Forward(request.model_id, examples, loss, read.config, backward=not request.forward_only, custom=custom)


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


def _inputs(datum: pb.Datum, index: int, tokens: int, loss: Loss, custom: CustomLoss | None) -> Inputs:
    """The loss's inputs: each of the shape of target_tokens, or of the rank that a traced loss declared for it.

    Shapes are checked before anything is allocated.
    """
    given = dict(datum.loss_fn_inputs.items())
    declared: Mapping[str, int] = {}
    if custom is None:
        check_inputs(loss, given.keys(), index)
    else:
        declared = {"target_tokens": custom.inputs["logprobs"], **custom.inputs}
        del declared["logprobs"]
        if missing := [key for key in declared if key not in given]:
            raise UserError(f"data[{index}].loss_fn_inputs lacks {missing[0]!r}, which loss {custom.name!r} takes")
    tensors = {key: given[key] for key in (declared or INPUT_NAMES) if key in given}
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
    if sum(math.prod(shape) for shape in shapes.values()) > MAX_CELLS:
        raise UserError(f"data[{index}].loss_fn_inputs has more than {MAX_CELLS} cells: must be at most {MAX_CELLS}")
    inputs = {key: to_array(tensor, shapes[key], _name(index, key)) for key, tensor in tensors.items()}
    if inputs["target_tokens"].dtype.kind != "i":
        raise broken(f"{_name(index, 'target_tokens')}.dtype", inputs["target_tokens"].dtype.name, "int64")
    return inputs


def _check_values(read: Sequence[tuple[Int32, Inputs]], vocab_size: int) -> None:
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
    _require_thresholds(read)
    masks = [inputs.get("sequence_ratio_mask") for _, inputs in read]
    _require(masks, lambda values: values >= 0, "data[{}].loss_fn_inputs['sequence_ratio_mask']", ">= 0")
    for i, mask in enumerate(masks):
        if mask is not None and not mask.any():
            raise UserError(
                f"{_name(i, 'sequence_ratio_mask')} is 0 everywhere: must name a token to take the ratio of"
            )


def _require_thresholds(read: Sequence[tuple[Int32, Inputs]]) -> None:
    for i, (_, inputs) in enumerate(read):
        low, high = inputs.get("clip_low_threshold"), inputs.get("clip_high_threshold")
        for key, values in (("clip_low_threshold", low), ("clip_high_threshold", high)):
            if values is not None and values.min() < 0:
                raise broken(f"{_name(i, key)}", values.min().item(), ">= 0")
        if low is not None and high is not None and (low > high).any():
            raise UserError(
                f"{_name(i, 'clip_low_threshold')} has values over those of clip_high_threshold: must be <="
            )


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


def _example(tokens_T: Int32, inputs: Inputs, read_by_loss: tuple[str, ...]) -> Example:
    flat = inputs["target_tokens"].ndim == 1

    def floats(key: str) -> Float32 | None:
        # float32 bytes stay where they are; integer weights (a user's integer array) are widened
        values = inputs.get(key)
        if values is None:
            return None
        values = values.astype(np.float32, copy=False)
        return values[:, None] if flat else values

    targets_TK = inputs["target_tokens"].astype(np.int32, copy=False)
    targets_TK = targets_TK[:, None] if flat else targets_TK
    if read_by_loss:
        named = {key: _as_jax_has_it(inputs[key]) for key in read_by_loss}
        return Example(tokens_T, targets_TK, np.ones(targets_TK.shape, np.float32), flat=flat, inputs=named)
    weights_TK = floats("weights")
    return Example(
        tokens_T=tokens_T,
        targets_TK=targets_TK,
        weights_TK=np.ones(targets_TK.shape, np.float32) if weights_TK is None else weights_TK,
        old_logprobs_TK=floats("logprobs"),
        advantages_TK=floats("advantages"),
        flat=flat,
        clip_low_TK=floats("clip_low_threshold"),
        clip_high_TK=floats("clip_high_threshold"),
        ratio_mask_TK=floats("sequence_ratio_mask"),
    )


def _as_jax_has_it(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return values.astype(np.int32 if values.dtype.kind == "i" else np.float32, copy=False)


def _name(index: int, key: str) -> str:
    return f"data[{index}].loss_fn_inputs[{key!r}]"

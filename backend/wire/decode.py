"""forward and forward_backward: from the request's protobuf to the pool's command, with every check of its content.

Letters: T tokens of one sequence, K targets per position. Arrays are read in place (numpy.frombuffer), and the value
checks run once over all data of a request; only a failing check looks for the place it failed at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from backend.commands import Example, Float32, Forward, Int32, Loss
from backend.errors import UserError
from backend.wire import tinker_pb2 as pb
from backend.wire.fields import broken
from backend.wire.losses import INPUT_NAMES, check_inputs, known_loss, read_config
from backend.wire.tensors import shape_of, to_array

MAX_TARGETS = 256  # targets per position
MAX_CELLS = 2**26  # target cells of one request; a sparse tensor could otherwise ask for any amount of memory
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
    read = []
    cells = 0
    for i, datum in enumerate(request.data):
        tokens_T = _tokens(datum, i, max_context)
        inputs = _inputs(datum, i, len(tokens_T), loss)
        cells += inputs["target_tokens"].size
        if cells > MAX_CELLS:
            raise UserError(f"data has more than {MAX_CELLS} target cells up to data[{i}]: must be at most {MAX_CELLS}")
        read.append((tokens_T, inputs))
    _check_values(read, vocab_size)
    examples = tuple(_example(tokens_T, inputs) for tokens_T, inputs in read)
    return Forward(request.model_id, examples, loss, config, backward=not request.forward_only)


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


def _inputs(datum: pb.Datum, index: int, tokens: int, loss: Loss) -> Inputs:
    """The loss's inputs, each of the shape of target_tokens. Shapes are checked before anything is allocated."""
    given = dict(datum.loss_fn_inputs.items())
    check_inputs(loss, given.keys(), index)
    tensors = {key: given[key] for key in INPUT_NAMES if key in given}
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
        if shape != wanted:
            raise broken(f"{_name(index, key)}.shape", list(shape), f"{list(wanted)}, the shape of target_tokens")
    inputs = {key: to_array(tensor, wanted, _name(index, key)) for key, tensor in tensors.items()}
    if inputs["target_tokens"].dtype.kind != "i":
        raise broken(f"{_name(index, 'target_tokens')}.dtype", inputs["target_tokens"].dtype.name, "int64")
    return inputs


def _check_values(read: Sequence[tuple[Int32, Inputs]], vocab_size: int) -> None:
    rule = f">= 0 and < {vocab_size}, the model's vocabulary"

    def in_vocabulary(values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        return (values >= 0) & (values < vocab_size)

    _require([tokens_T for tokens_T, _ in read], in_vocabulary, "data[{}].model_input", rule)
    for key in INPUT_NAMES:
        arrays = [inputs.get(key) for _, inputs in read]
        name = f"data[{{}}].loss_fn_inputs[{key!r}]"
        if key == "target_tokens":
            _require(arrays, in_vocabulary, name, rule)
        else:
            _require(arrays, np.isfinite, name, "a finite number")


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


def _example(tokens_T: Int32, inputs: Inputs) -> Example:
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
    weights_TK = floats("weights")
    return Example(
        tokens_T=tokens_T,
        targets_TK=targets_TK,
        weights_TK=np.ones(targets_TK.shape, np.float32) if weights_TK is None else weights_TK,
        old_logprobs_TK=floats("logprobs"),
        advantages_TK=floats("advantages"),
        flat=flat,
    )


def _name(index: int, key: str) -> str:
    return f"data[{index}].loss_fn_inputs[{key!r}]"

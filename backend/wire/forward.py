"""forward and forward_backward: converts a request's protobuf to the pool's command, and the result to its protobuf.

A request's content is checked here: its address, its loss and configuration, and its tensors. provenance.py checks
spans, and images.py checks images. Arrays are read in place (numpy.frombuffer), and value checks run once over all data
of a request. Only a failed check searches for the place of the error. Letters: T tokens of one sequence, K targets of a
position.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from tinkerflow.backend.core.errors import UserError, broken, shown
from tinkerflow.backend.spec.commands import (
    CustomLoss,
    Example,
    Float32,
    Forward,
    ForwardResult,
    ImagePixels,
    Int32,
    StabilityInfo,
)
from tinkerflow.backend.spec.drift import SUPPORTED, DriftTokens, kl_sample_train
from tinkerflow.backend.spec.images import ImageProcessor
from tinkerflow.backend.spec.limits import (
    MAX_DATA,
    MAX_IMAGE_TOKENS,
    MAX_INPUT_CELLS,
    MAX_REQUEST_CELLS,
    MAX_TARGETS,
    MODEL_CONTEXT,
)
from tinkerflow.backend.spec.losses import LossSpec, loss_named
from tinkerflow.backend.spec.traced_work import loss_seconds
from tinkerflow.backend.wire import tinker_pb2 as pb
from tinkerflow.backend.wire.images import LOCATION_RULE, LOCATIONS, FindFiles, check_room, pixels
from tinkerflow.backend.wire.provenance import attribute, sequences_named, with_records

_TARGETS = "target_tokens"
_DTYPES: dict[int, np.dtype[Any]] = {
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_INT64: np.dtype("<i8"),
    pb.DTYPE_INT32: np.dtype("<i4"),
}
_INT64 = np.dtype("<i8")
_TOKEN = np.dtype("<i4")

_MOST_SIZE = 2**48  # of a dimension; NumPy makes no array of the shape [0, 2**62], although it has no cells
_MOST_FIELDS = 2**16  # top-level fields of a request: most fields are data, up to MAX_DATA
_VARINT, _LENGTH_DELIMITED, _FIXED_BYTES = 0, 2, {1: 8, 5: 4}  # wire types, the last with their sizes
_VARINT_BYTES = 10  # of the longest varint
_MOST_NUMBER, _TAG_BYTES = 2**29 - 1, 5  # of a field

Inputs = dict[str, npt.NDArray[Any]]  # the inputs of one datum, unchanged
M = TypeVar("M", pb.ForwardBackwardHeader, pb.ForwardBackwardRequest)


class ForwardHeader(NamedTuple):
    """The address of a forward_backward request. seq_id 0 = absent."""

    model_id: str
    seq_id: int
    forward_only: bool


def forward_backward_header(body: bytes) -> ForwardHeader:
    """The address of a ForwardBackwardRequest. UserError: the body is not protobuf.

    The parser gets only the header, because it would copy the data as unknown fields, and block all threads meanwhile.
    """
    numbers, kept = pb.ForwardBackwardHeader.DESCRIPTOR.fields_by_number, bytearray()
    for number, begin, end, is_wrong in _fields(body):
        if number in numbers or is_wrong or end > len(body):
            kept += body[begin:end]  # the parser rejects a wrong number and a truncated field
    header = _parsed(pb.ForwardBackwardHeader(), bytes(kept))
    return ForwardHeader(header.model_id, header.seq_id, header.forward_only)


def split_data(body: bytes) -> list[bytes]:
    """Cut a ForwardBackwardRequest before and after each datum, so that equal data are equal pieces in every request.

    The joined pieces equal `body`. A body that is not protobuf is one piece.
    """
    data, cuts = pb.ForwardBackwardRequest.DESCRIPTOR.fields_by_name["data"].number, {0, len(body)}
    try:
        for number, begin, end, _ in _fields(body):
            if number == data:
                cuts |= {begin, end}
    except UserError:
        return [body]
    return [body[begin:end] for begin, end in itertools.pairwise(sorted(cuts)) if end <= len(body)]


def _fields(body: bytes) -> Iterator[tuple[int, int, int, bool]]:
    """(number, begin, end, is_wrong) of each field of a ForwardBackwardRequest. UserError: the body is not protobuf."""
    end = 0
    for _ in range(_MOST_FIELDS):
        if end >= len(body):
            return
        begin = end
        tag, end = _varint(body, begin)
        number, wire_type = tag >> 3, tag & 7
        is_wrong = not 0 < number <= _MOST_NUMBER or end - begin > _TAG_BYTES
        if wire_type == _LENGTH_DELIMITED:
            length, end = _varint(body, end)
            end += length
        elif wire_type == _VARINT:
            _, end = _varint(body, end)
        elif wire_type in _FIXED_BYTES:
            end += _FIXED_BYTES[wire_type]
        else:
            raise UserError(f"the request body is not a ForwardBackwardRequest: wire type {wire_type} at byte {begin}")
        yield number, begin, end, is_wrong
    raise UserError(f"the request body has more than {_MOST_FIELDS} fields: must have at most that")


def _varint(body: bytes, begin: int) -> tuple[int, int]:
    """The varint (https://protobuf.dev/programming-guides/encoding) at this place, and its end."""
    value = 0
    for count, byte in enumerate(body[begin : begin + _VARINT_BYTES]):
        value |= (byte & 127) << 7 * count
        if byte < 128:
            return value, begin + count + 1
    raise UserError(f"the request body is not a ForwardBackwardRequest: no number at byte {begin}")


def training_tokens(body: bytes) -> int:
    """The number of tokens of a ForwardBackwardRequest; 0 for other bodies, which are rejected later."""
    try:
        request = _parsed(pb.ForwardBackwardRequest(), body)
    except UserError:
        return 0
    return sum(_counted_tokens(chunk) for datum in request.data for chunk in datum.model_input)


def _counted_tokens(chunk: pb.Chunk) -> int:
    """An estimate of a chunk's tokens. No file is opened, so an image counts with its declared or the largest size."""
    if chunk.WhichOneof("chunk") != "image":
        return len(chunk.encoded_text.tokens) // _TOKEN.itemsize
    declared = chunk.image.expected_tokens if chunk.image.HasField("expected_tokens") else MAX_IMAGE_TOKENS
    return min(max(declared, 0), MAX_IMAGE_TOKENS)


def with_files_to_train(body: bytes, find: FindFiles) -> bytes:
    """Replace the locations of images in a ForwardBackwardRequest with their files. UserError: a file is missing."""
    start = LOCATIONS.encode()
    if start not in body:
        return body
    try:
        request = pb.ForwardBackwardRequest.FromString(body)
    except DecodeError:
        return body  # its execution fails with an error
    named = [
        (f"data[{i}].model_input.chunks[{j}].data", chunk.image)
        for i, datum in enumerate(request.data)
        for j, chunk in enumerate(datum.model_input)
        if chunk.WhichOneof("chunk") == "image" and chunk.image.data.startswith(start)
    ]
    if not named:
        return body
    locations = [image.data.decode(errors="replace") for _, image in named]
    files = find(locations)
    for (name, image), location in zip(named, locations, strict=True):
        if (file := files.get(location)) is None:
            raise broken(name, location, LOCATION_RULE)
        image.data = file
    return bytes(request.SerializeToString())


def _parsed(message: M, body: bytes) -> M:
    try:
        message.ParseFromString(body)
    except DecodeError as e:
        raise UserError(f"the request body is not a ForwardBackwardRequest: {e}") from e
    return message


@dataclass(frozen=True)
class ForwardRead:
    """A partly read ForwardBackwardRequest, with the ids of the records that decoding it needs.

    loss_id: the traced loss, if the loss is `custom`. sequence_ids: the sequences with recorded stability information
    that the loss or a replay needs. image_tokens: an estimate of the tokens of its images; None without
    images.
    """

    request: pb.ForwardBackwardRequest
    loss: LossSpec
    config: Mapping[str, float]
    loss_id: str | None
    sequence_ids: frozenset[str]
    image_tokens: int | None = None


def read_forward(body: bytes, *, routes: bool = False, supports: bool = False) -> ForwardRead:
    """Check the loss, config and spans of a ForwardBackwardRequest. UserError names the field, its value and the rule.

    decode_forward reads the other fields. routes: every loss with spans needs their records, for the experts of the
    tokens. supports: losses that take the sampler's logprobs need the records, for the supports of the tokens.
    """
    request = _parsed(pb.ForwardBackwardRequest(), body)
    loss = loss_named(request.loss_fn)
    if not request.data:
        raise broken("data", [], "at least one datum")
    if len(request.data) > MAX_DATA:
        raise UserError(f"data has {len(request.data)} entries: must be at most {MAX_DATA}")
    named = _check_spans(request.data, needed_by=loss.name if loss.recorded else None)
    config, loss_id = _read_config(loss, request)
    chunks = (chunk for datum in request.data for chunk in datum.model_input)
    images = [_counted_tokens(chunk) for chunk in chunks if chunk.WhichOneof("chunk") == "image"]
    recorded = named if loss.recorded or routes or (supports and _takes_logprobs(loss)) else frozenset()
    return ForwardRead(request, loss, config, loss_id, recorded, sum(images) if images else None)


def decode_forward(
    read: ForwardRead,
    *,
    vocab_size: int,
    max_context: int,
    context_rule: str = MODEL_CONTEXT,
    custom: CustomLoss | None = None,
    recorded: Mapping[str, StabilityInfo] | None = None,
    processor: ImageProcessor | None = None,
) -> Forward:
    """The command for a request. adapter_id is its model_id, and config is complete (defaults filled in).

    read: the request. context_rule: the reason for max_context, for errors. custom: the request's traced loss.
    recorded: the records of its sequence_ids. processor: the image processor; None if the model takes only text.
    UserError names the field, its value and the rule. Errors are: an unknown or missing input; a sequence that is
    empty or longer than `max_context`; lengths that differ; token ids outside [0, vocab_size); floats that are not
    finite; images that the model does not take; spans that do not match the sampled sequence; a traced loss with too
    much work.
    """
    request, loss = read.request, read.loss
    examples_read = []
    pictures: list[tuple[ImagePixels, ...]] = []
    targets = cells = seen = 0
    for i, datum in enumerate(request.data):
        tokens_T, images = _model_input(
            datum.model_input, f"data[{i}].model_input", max_context, context_rule, processor
        )
        pictures.append(images)
        seen += sum(image.pixels_HWC.size for image in images)
        check_room(seen, "data", f"data[{i}]")
        inputs = _inputs(datum, i, len(tokens_T), loss, custom)
        targets += inputs[_TARGETS].size
        cells += sum(array.size for array in inputs.values())
        for count, kind, limit in ((targets, "target", MAX_REQUEST_CELLS), (cells, "input", MAX_INPUT_CELLS)):
            if count > limit:
                raise UserError(f"data has {count} {kind} cells up to data[{i}]: must be at most {limit}")
        examples_read.append((tokens_T, inputs))
    _check_values(examples_read, loss, read.config, vocab_size)
    declared = None if custom is None else tuple(custom.inputs)[1:]
    examples = [
        replace(_example(tokens_T, inputs, declared), images=images)
        for (tokens_T, inputs), images in zip(examples_read, pictures, strict=True)
    ]
    if read.sequence_ids:
        complete = attribute if loss.recorded else with_records
        both = enumerate(zip(examples, request.data, strict=True))
        examples = [complete(example, datum, i, recorded or {}) for i, (example, datum) in both]
        if not _takes_logprobs(loss):
            examples = [replace(example, supports=None) for example in examples]
    return Forward(
        request.model_id,
        tuple(examples),
        loss.name,
        read.config,
        backward=not request.forward_only,
        custom=custom,
        loss_seconds=() if custom is None else loss_seconds(custom, examples),
    )


def drift_metrics(command: Forward, result: ForwardResult) -> dict[str, float]:
    """`kl_sample_train` of a loss whose data contain the sampler's logprobs; empty for other losses.

    Also SUPPORTED: the share of tokens with a support, among tokens with weight and advantage in data with supports.
    """
    if not _takes_logprobs(loss_named(command.loss)):
        return {}
    tokens = list(sampled_tokens(command, result))
    metrics = kl_sample_train(tokens)
    both = zip(command.examples, tokens, strict=True)
    held = [one.supports.counts_N[counted[:, 0]] > 0 for one, (_, _, counted) in both if one.supports is not None]
    if held and (found := np.concatenate(held)).size:
        metrics[SUPPORTED] = float(found.mean())
    return metrics


def _takes_logprobs(loss: LossSpec) -> bool:
    """Whether a loss compares the policy with the sampler."""
    return not loss.traced and "logprobs" in loss.read


def sampled_tokens(command: Forward, result: ForwardResult) -> Iterator[DriftTokens]:
    """The tokens of each datum with the sampler's logprobs. Prompt tokens have no weight or no advantage."""
    for example, logprobs in zip(command.examples, result.logprobs, strict=True):
        inputs = example.inputs
        counted = (example.weights_TK != 0) & (inputs.get("advantages", example.weights_TK) != 0)
        yield inputs["logprobs"], logprobs.reshape(counted.shape), counted


def encode_forward(result: ForwardResult) -> bytes:
    """A ForwardBackwardOutput: field `logprobs` for every datum in order, and `loss:sum` with a custom loss's metrics.

    Neighbors with the same K share an ArrayRecord; another K starts a new one.
    """
    metrics = {**result.metrics, "loss:sum": result.loss_sum}
    output = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=metrics)
    for trailing, group in itertools.groupby(result.logprobs, key=lambda array: array.shape[1:]):
        _add_record(output, trailing, list(group))
    return bytes(output.SerializeToString())


def _add_record(output: pb.ForwardBackwardOutput, trailing: tuple[int, ...], arrays: Sequence[Float32]) -> None:
    record = output.loss_fn_outputs.add(num_datums=len(arrays))
    field = record.fields["logprobs"]
    field.dtype = pb.DTYPE_FLOAT32
    field.trailing_shape.extend(trailing)
    field.data = b"".join(np.ascontiguousarray(array, "<f4").tobytes() for array in arrays)
    field.offsets = np.cumsum([0, *(4 * array.size for array in arrays)], dtype="<i8").tobytes()


# ------------------------------------------------------------------ one datum
def _check_spans(data: Sequence[pb.Datum], *, needed_by: str | None) -> frozenset[str]:
    """The sequence ids that the spans name. UserError: one list is missing, or a span is invalid.

    needed_by: the loss, if it requires spans; None = it does not.
    """
    named: set[str] = set()
    for i, datum in enumerate(data):
        if bool(datum.model_input_spans) != bool(datum.loss_fn_input_spans):
            raise UserError(f"data[{i}] has model_input_spans or loss_fn_input_spans, not both: give both or neither")
        if datum.model_input_spans:
            named |= sequences_named(datum, i)
        elif needed_by is not None:
            raise UserError(
                f"data[{i}] has no provenance: {needed_by} needs it (Datum.with_provenance), with sequences "
                "sampled with record_stability_info true"
            )
    return frozenset(named)


def _model_input(
    chunks: Sequence[pb.Chunk], name: str, max_context: int, context_rule: str, processor: ImageProcessor | None
) -> tuple[Int32, tuple[ImagePixels, ...]]:
    """The tokens of an input, with placeholders for images, and the images.

    chunks: the input's chunks. name: the input's name, for errors. max_context: the most tokens. context_rule: the
    reason for this limit. processor: the image processor; None if the model takes only text. UserError: the model does
    not take a chunk, an image is invalid, or the length is wrong.
    """
    parts: list[bytes] = []
    images: list[ImagePixels] = []
    size = 0  # in bytes
    for j, chunk in enumerate(chunks):
        kind, here = chunk.WhichOneof("chunk") or "empty", f"{name}.chunks[{j}]"
        if kind == "image" and processor is not None:
            _check_whole(name, size)
            image = ImagePixels(size // _TOKEN.itemsize, pixels(chunk.image, here, processor))
            images.append(image)
            parts.append(np.full(image.tokens(processor.side), processor.token, _TOKEN).tobytes())
        elif kind == "encoded_text":
            parts.append(chunk.encoded_text.tokens)
        else:
            takes = "encoded_text" if processor is None else "encoded_text or image"
            raise UserError(f"{here} is {kind}: must be {takes}, because the model accepts no {kind}s")
        size += len(parts[-1])
        if images and size > max_context * _TOKEN.itemsize:  # before the next image is decoded
            rule = f"must be 1 to {max_context}, {context_rule}"
            raise UserError(f"{name} has more than {max_context} tokens up to chunks[{j}]: {rule}")
    _check_whole(name, size)
    tokens_T = np.frombuffer(parts[0] if len(parts) == 1 else b"".join(parts), _TOKEN)
    if not 0 < len(tokens_T) <= max_context:
        raise UserError(f"{name} has {len(tokens_T)} tokens: must be 1 to {max_context}, {context_rule}")
    return tokens_T, tuple(images)


def _check_whole(name: str, size: int) -> None:
    if size % _TOKEN.itemsize:
        raise UserError(f"{name} has {size} bytes of tokens: must be a multiple of 4 (int32)")


def _inputs(datum: pb.Datum, index: int, tokens: int, loss: LossSpec, custom: CustomLoss | None) -> Inputs:
    """The loss's inputs, each with the shape of target_tokens, or with the rank that a traced loss declared for it.

    Shapes are checked before anything is allocated.
    """
    given = dict(datum.loss_fn_inputs.items())
    names = (_TARGETS, *(one.name for one in loss.inputs))
    declared: Mapping[str, int] = {}
    if custom is None:
        _check_inputs(loss, given.keys(), index)
    else:
        declared = {_TARGETS: custom.inputs["logprobs"], **custom.inputs}
        del declared["logprobs"]
        if missing := [key for key in declared if key not in given]:
            raise UserError(f"data[{index}].loss_fn_inputs lacks {missing[0]!r}, which loss {custom.name!r} takes")
    tensors = {key: given[key] for key in declared or names if key in given}
    shapes = {key: _shape_of(tensor, _name(index, key)) for key, tensor in tensors.items()}
    wanted = shapes[_TARGETS]
    if wanted[0] != tokens:
        raise UserError(
            f"{_name(index, _TARGETS)} has {wanted[0]} positions: must be {tokens}, one for each token of model_input"
        )
    if len(wanted) == 2 and not 1 <= wanted[1] <= MAX_TARGETS:
        rule = f"[T] or [T, K] with 1 <= K <= {MAX_TARGETS}"
        raise broken(f"{_name(index, _TARGETS)}.shape", list(wanted), rule)
    for key, shape in shapes.items():
        if custom is None and shape != wanted:
            raise broken(f"{_name(index, key)}.shape", list(shape), f"{list(wanted)}, the shape of target_tokens")
        if custom is not None and len(shape) != declared[key]:
            raise broken(f"{_name(index, key)}.shape", list(shape), f"of rank {declared[key]}, as the loss declares it")
    if (cells := sum(math.prod(shape) for shape in shapes.values())) > MAX_REQUEST_CELLS:
        raise UserError(f"data[{index}].loss_fn_inputs has {cells} cells: must be at most {MAX_REQUEST_CELLS}")
    inputs = {key: _to_array(tensor, shapes[key], _name(index, key)) for key, tensor in tensors.items()}
    if inputs[_TARGETS].dtype.kind != "i":
        raise broken(f"{_name(index, _TARGETS)}.dtype", inputs[_TARGETS].dtype.name, "int64")
    return inputs


def _check_values(
    read: Sequence[tuple[Int32, Inputs]], loss: LossSpec, config: Mapping[str, float], vocab_size: int
) -> None:
    rule = f">= 0 and < {vocab_size}, the model's vocabulary"

    def in_vocabulary(values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        return (values >= 0) & (values < vocab_size)

    def fits(values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        return (values >= -(2**31)) & (values < 2**31)  # workers compute integers of traced losses in 32 bits

    _require([tokens_T for tokens_T, _ in read], in_vocabulary, "data[{}].model_input".format, rule)
    for key in dict.fromkeys(key for _, inputs in read for key in inputs):
        arrays = [inputs.get(key) for _, inputs in read]
        if key == _TARGETS:
            _require(arrays, in_vocabulary, partial(_name, key=key), rule)
        else:
            _require(arrays, np.isfinite, partial(_name, key=key), "a finite number")
            whole = [None if a is None or not loss.traced or a.dtype.kind != "i" else a for a in arrays]
            _require(whole, fits, partial(_name, key=key), "a whole number of 32 bits")
    for one in loss.inputs:
        arrays = [inputs.get(one.name) for _, inputs in read]
        if math.isfinite(low := one.low):
            _require(arrays, partial(np.less_equal, low), partial(_name, key=one.name), f">= {low:g}")
        for i, values in enumerate(arrays):
            if one.some and values is not None and not values.any():
                raise UserError(f"{_name(i, one.name)} is 0 everywhere: must not be 0 for at least one token")
    for i, (_, inputs) in enumerate(read):
        loss.check_order(inputs, config, partial(_name, i))


def _require(
    arrays: Sequence[npt.NDArray[Any] | None],
    good: Callable[[npt.NDArray[Any]], npt.NDArray[np.bool_]],
    name: Callable[[int], str],
    rule: str,
) -> None:
    """Raise UserError for the first value that is not `good`. arrays[i] belongs to datum i; None: it has no array."""
    given = [array.ravel() for array in arrays if array is not None]
    if not given or good(np.concatenate(given)).all():
        return
    for i, array in enumerate(arrays):
        if array is None or good(array).all():
            continue
        at = np.argwhere(~good(array))[0]
        raise broken(f"{name(i)} at position {int(at[0])}", array[tuple(at)].item(), rule)


def _example(tokens_T: Int32, inputs: Inputs, declared: Sequence[str] | None) -> Example:
    """Make an example. declared: the inputs of a traced loss; None for a built-in loss."""
    flat = inputs[_TARGETS].ndim == 1

    def columns(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return values[:, None] if flat else values

    targets_TK = columns(inputs[_TARGETS].astype(np.int32, copy=False))
    if declared is not None:
        kept = {True: np.int32, False: np.float32}  # JAX's default dtypes
        traced = {key: inputs[key].astype(kept[inputs[key].dtype.kind == "i"], copy=False) for key in declared}
        return Example(tokens_T, targets_TK, np.ones(targets_TK.shape, np.float32), flat=flat, inputs=traced)
    # float32 values are not copied; integer weights (a user's integer array) are converted
    floats = {key: columns(values.astype(np.float32, copy=False)) for key, values in inputs.items() if key != _TARGETS}
    weights_TK = floats.pop("weights", None)
    if weights_TK is None:
        weights_TK = np.ones(targets_TK.shape, np.float32)
    return Example(tokens_T, targets_TK, weights_TK, flat=flat, inputs=floats)


def _name(index: int, key: str) -> str:
    return f"data[{index}].loss_fn_inputs[{key!r}]"


# ------------------------------------------------------------------ the loss and its configuration
def _check_inputs(spec: LossSpec, names: Collection[str], index: int) -> None:
    """Raise UserError unless `names` are the loss's inputs: none missing, none unknown. index: the datum's, from 0."""
    taken = {_TARGETS, *(one.name for one in spec.inputs)}
    required = taken - {one.name for one in spec.inputs if not one.required}
    if missing := sorted(required.difference(names)):
        needs = ", ".join(sorted(required))
        raise UserError(f"data[{index}].loss_fn_inputs lacks {missing[0]!r}: {spec.name} needs {needs}")
    if unknown := sorted(set(names) - taken):
        takes = ", ".join(sorted(taken))
        raise UserError(f"data[{index}].loss_fn_inputs has {shown(unknown[0])}: {spec.name} takes {takes}")


def _read_config(spec: LossSpec, request: pb.ForwardBackwardRequest) -> tuple[dict[str, float], str | None]:
    """The loss's complete configuration, and the id of a traced loss. UserError: an unknown key or a bad value."""
    given: dict[str, float | str] = dict(request.loss_fn_config)
    if request.loss_fn_config_v2:
        given = {
            key: value.text if value.WhichOneof("value") == "text" else value.number
            for key, value in request.loss_fn_config_v2.items()
        }
    if not spec.traced:
        return spec.read_config(given), None
    if unknown := sorted(given.keys() - {"loss_id"}):
        raise UserError(f"loss_fn_config has the key {shown(unknown[0])}: must be loss_id")
    loss_id = given.get("loss_id")
    if not isinstance(loss_id, str) or not loss_id or "\0" in loss_id:
        raise broken("loss_fn_config['loss_id']", loss_id, "the id that create_custom_loss gave")
    return {}, loss_id


# ------------------------------------------------------------------ tensors: dense and CSR, 1-D and 2-D, without a loop
def _shape_of(tensor: pb.Tensor, name: str) -> tuple[int, ...]:
    """The declared shape, [T] or [T, K]; an empty shape means 1-D. Nothing is allocated before this check."""
    shape = tuple(tensor.shape)
    if not shape:
        if tensor.WhichOneof("encoding") == "sparse_csr":
            raise broken(f"{name}.shape", [], "given for a sparse tensor")
        return (len(tensor.dense) // _dtype_of(tensor, name).itemsize,)
    if len(shape) > 2 or min(shape) < 0 or max(shape) > _MOST_SIZE:
        raise broken(f"{name}.shape", list(shape), f"[T] or [T, K], with sizes up to {_MOST_SIZE}")
    return shape


def _dtype_of(tensor: pb.Tensor, name: str) -> np.dtype[Any]:
    """The tensor's dtype: float32, int64 or int32."""
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise broken(f"{name}.dtype", tensor.dtype, "FLOAT32 (1), INT64 (2) or INT32 (3)")
    return dtype


def _to_array(tensor: pb.Tensor, shape: tuple[int, ...], name: str) -> npt.NDArray[Any]:
    """The tensor as an array of its dtype and of `shape` (see _shape_of). Sparse cells that are not listed are 0.

    name: the tensor's name in errors, such as data[3].loss_fn_inputs['weights'].
    """
    dtype = _dtype_of(tensor, name)
    if tensor.WhichOneof("encoding") == "sparse_csr":
        return _from_csr(tensor.sparse_csr, shape, dtype, name)
    return _read(tensor.dense, dtype, math.prod(shape), name).reshape(shape)


def _read(data: bytes, dtype: np.dtype[Any], count: int, name: str) -> npt.NDArray[Any]:
    if len(data) != count * dtype.itemsize:
        raise UserError(
            f"{name} has {len(data)} bytes of data: {count} values of {dtype.name} need {count * dtype.itemsize}"
        )
    return np.frombuffer(data, dtype)


def _from_csr(csr: pb.SparseCsr, shape: tuple[int, ...], dtype: np.dtype[Any], name: str) -> npt.NDArray[Any]:
    if len(shape) != 2:
        raise broken(f"{name}.shape", list(shape), "[T, K] for a sparse tensor")
    rows, columns = shape
    stored = len(csr.values) // dtype.itemsize
    values = _read(csr.values, dtype, stored, f"{name}.values")
    crow = _read(csr.crow_indices, _INT64, rows + 1, f"{name}.crow_indices")
    cols = _read(csr.col_indices, _INT64, stored, f"{name}.col_indices")
    counts = np.diff(crow)
    if crow[0] != 0 or crow[-1] != stored or (counts < 0).any():
        raise UserError(f"{name}.crow_indices must start at 0, never fall, and end at {stored}, the number of values")
    if stored and (cols.min() < 0 or cols.max() >= columns):
        raise UserError(
            f"{name}.col_indices has values from {cols.min()} to {cols.max()}: must be >= 0 and < {columns}"
        )
    cells = np.repeat(np.arange(rows) * columns, counts) + cols
    if (np.diff(cells) <= 0).any():
        raise UserError(f"{name}.col_indices must rise strictly within each row")
    dense = np.zeros(rows * columns, dtype)
    dense[cells] = values
    return dense.reshape(shape)

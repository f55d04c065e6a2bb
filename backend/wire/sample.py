"""sample: converts a request's body to the pool's SampleRequest, and the result to its protobuf.

Every check that needs the model card is here. target_prompt_logprobs, the tokens to score at each position of a
prompt, is a JSON tensor `{data, dtype, shape}`: dense and row-major, or CSR with sparse_crow_indices and
sparse_col_indices. The answer uses the layout of the request.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from tinkerflow.backend.core.errors import ContextExceededError, UserError, broken, shown
from tinkerflow.backend.spec.commands import (
    Adjustments,
    Candidates,
    Constraint,
    Float32,
    ImagePixels,
    Int32,
    PromptWishes,
    SampledSequence,
    SampleRequest,
    SampleResult,
)
from tinkerflow.backend.spec.constraints import Kind as ConstraintKind
from tinkerflow.backend.spec.constraints import check_constraint
from tinkerflow.backend.spec.images import ImageProcessor
from tinkerflow.backend.spec.limits import MAX_RECORDED_BYTES, MODEL_CONTEXT
from tinkerflow.backend.wire import tinker_pb2 as pb
from tinkerflow.backend.wire.images import LOCATION_RULE, FindFiles, check_room, pixels_of
from tinkerflow.backend.wire.requests import MAX_LISTED, ConstraintBody, SampleBody, SamplingParams, TargetTensor

MAX_STOPS = 256  # stop tokens or stop strings of one request
MAX_STOP_CHARACTERS = 1024  # of one stop string
MAX_BIASES = 1024  # tokens in logit_bias
MOST_BIAS = 100.0  # absolute value for one token
_SEED_BITS = 64
_DIGITS = 10  # a token id has fewer digits
_STOP_REASONS = {"stop": pb.STOP_REASON_STOP, "length": pb.STOP_REASON_LENGTH}
_POINTER = "image_asset_pointer"  # to an uploaded image
_TARGETS = "target_prompt_logprobs"
_Int64 = npt.NDArray[np.int64]
FindProcessor = Callable[[], ImageProcessor | None]


def with_seed(body: bytes, values: dict[str, Any]) -> bytes:
    """Add a seed to a body without one, so that a replay of the stored body repeats the sample. values: the body's."""
    params = values.get("sampling_params", {})
    if isinstance(params, dict) and params.get("seed") is None:
        return orjson.dumps({**values, "sampling_params": {**params, "seed": secrets.randbits(_SEED_BITS)}})
    return body


def with_files(values: dict[str, Any], find: FindFiles) -> dict[str, Any]:
    """Add the `data` of images to the pointers in a sample's body. Pointers to unknown files stay without data."""
    prompt = values.get("prompt")
    if not isinstance(prompt, dict) or not isinstance(chunks := prompt.get("chunks"), list):
        return values
    pointers = [chunk for chunk in chunks if _points(chunk)]
    if not pointers:
        return values
    files = find([location for chunk in pointers if isinstance(location := chunk.get("location"), str)])

    def filled(chunk: Any) -> Any:
        if not _points(chunk):
            return chunk
        location = chunk.get("location")
        file = files.get(location) if isinstance(location, str) else None
        bare = {name: value for name, value in chunk.items() if name != "data"}
        return bare if file is None else {**bare, "data": base64.b64encode(file).decode()}

    return {**values, "prompt": {**prompt, "chunks": [filled(chunk) for chunk in chunks]}}


def _points(chunk: Any) -> bool:
    return isinstance(chunk, dict) and chunk.get("type") == _POINTER


def sample_request(
    body: SampleBody,
    *,
    request_id: str,
    owner: str,
    vocab_size: int,
    max_context: int,
    eos: Sequence[int],
    context_rule: str = MODEL_CONTEXT,
    processor: FindProcessor = lambda: None,
    blank: bool = False,
    routes: bool = False,
    supports: bool = False,
) -> SampleRequest:
    """The command for a sample request. UserError names the field, its value and the rule.

    body, request_id, owner: the request's. vocab_size, max_context: the model's, in tokens. eos: the tokens that end a
    text. They stop a sequence if `stop` is absent, but not if `stop` is an empty list. context_rule: the reason for
    max_context, for errors. processor: finds the model's image processor; None if the model takes only text. blank:
    measure images without decoding them, see `ImageProcessor.read`. routes, supports: see the command; a request
    without top-k, top-p and min-p has no supports. If max_tokens is absent, the sequence may fill the context. A prompt
    that fills the context can be scored, and one token is sampled after it. The seed is reduced to 0 <= seed < 2**64.
    The command samples the base model unless its sender adds a snapshot.
    """
    scored = body.prompt_logprobs or body.topk_prompt_logprobs or body.prompt_alt_tokens_k
    full = bool(scored) or body.target_prompt_logprobs is not None
    most, rule = (max_context, context_rule) if full else (max_context - 1, f"{context_rule} less one")
    prompt_T, images = _prompt(body.prompt.chunks, vocab_size, max_context, most, rule, processor, blank)
    params = body.sampling_params
    if params.seed is None:
        raise broken("sampling_params.seed", None, "drawn before the request is stored")
    stop_tokens, stop_strings = _stops(params.stop, vocab_size, eos)
    if params.stop_token_ids is not None:
        stop_tokens += tuple(_token_array(params.stop_token_ids, "sampling_params.stop_token_ids", vocab_size).tolist())
    if params.top_k == 0:
        raise broken("sampling_params.top_k", 0, "-1 (off) or at least 1")
    if params.top_p == 0.0:
        raise broken("sampling_params.top_p", 0.0, "> 0 and <= 1")
    filters = params.temperature > 0 and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
    return SampleRequest(
        request_id=request_id,
        owner=owner,
        snapshot_id=None,
        prompt_T=prompt_T,
        num_samples=body.num_samples,
        max_tokens=_max_tokens(params.max_tokens, len(prompt_T), max_context),
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        seed=params.seed % 2**_SEED_BITS,
        stop_tokens=stop_tokens,
        stop_strings=stop_strings,
        prompt_logprobs=body.prompt_logprobs,
        prompt=_prompt_wishes(body, len(prompt_T), vocab_size),
        topk_sample=_listed("topk_sample_logprobs", body.topk_sample_logprobs, vocab_size),
        min_p=params.min_p,
        adjustments=_adjustments(params, vocab_size),
        priority=body.priority,
        constraint=None if params.constraint is None else _constraint(params.constraint, eos),
        stream=body.stream,
        images=images,
        routes=routes,
        supports=supports and filters,
    )


def encode_sample(result: SampleResult, targets: TargetTensor | None = None) -> bytes:
    """A SampleResponse: every sequence with its logprobs, and prompt logprobs (NaN first) and more if there are any.

    targets: the request's target_prompt_logprobs. The logprobs of these tokens are returned in the same layout.
    UserError: the answer is too large for the journal.
    """
    if (size := answer_bytes(result)) > MAX_RECORDED_BYTES:
        what = "num_samples, max_tokens, or the number of tokens that are listed at each position"
        raise UserError(f"the answer has {size} bytes: must have at most {MAX_RECORDED_BYTES}; lower {what}")
    response = pb.SampleResponse(prompt_cache_hit_tokens=result.prompt_cache_hit_tokens)
    for sequence in result.sequences:
        response.sequences.add(
            stop_reason=_STOP_REASONS[sequence.stop_reason],
            tokens=sequence.tokens_T.astype("<i4", copy=False).tobytes(),
            logprobs=sequence.logprobs_T.astype("<f4", copy=False).tobytes(),
            topk_sampled_logprobs=_top(sequence.top) if sequence.top is not None else None,
            weights=[pb.WeightsSpan(start=start, step=step) for start, step in sequence.weights],
        )
    if result.prompt_logprobs_T is not None:
        response.prompt_logprobs = result.prompt_logprobs_T.astype("<f4", copy=False).tobytes()
    if result.top is not None:
        response.topk_prompt_logprobs.CopyFrom(_top(result.top))
    if result.targets_TK is not None:
        assert targets is not None, "logprobs of given tokens without a question"
        response.target_prompt_logprobs.CopyFrom(_encode_targets(targets, result.targets_TK))
    if result.alternatives is not None:
        response.prompt_alt_tokens.tokens.CopyFrom(_dense(result.alternatives.tokens_Nk, pb.DTYPE_INT32, "<i4"))
        response.prompt_alt_tokens.logprobs.CopyFrom(_dense(result.alternatives.logprobs_Nk, pb.DTYPE_FLOAT32, "<f4"))
    return bytes(response.SerializeToString())


def answer_bytes(result: SampleResult) -> int:
    """The bytes of all numbers in an answer. Each takes four."""
    arrays: list[Int32 | Float32 | None] = [result.prompt_logprobs_T, result.targets_TK]
    arrays += [array for one in result.sequences for array in (one.tokens_T, one.logprobs_T)]
    for listed in (result.top, result.alternatives, *(one.top for one in result.sequences)):
        arrays += [] if listed is None else [listed.tokens_Nk, listed.logprobs_Nk]
    return sum(4 * array.size for array in arrays if array is not None)


def decode_sample(request_id: str, answer: bytes) -> SampleResult:
    """The inverse of `encode_sample` for sequences, prompt logprobs and lists of tokens."""
    response = pb.SampleResponse.FromString(answer)
    return SampleResult(
        request_id,
        tuple(
            SampledSequence(
                tokens_T=np.frombuffer(sequence.tokens, "<i4"),
                logprobs_T=np.frombuffer(sequence.logprobs, "<f4"),
                stop_reason="stop" if sequence.stop_reason == pb.STOP_REASON_STOP else "length",
                top=_candidates(sequence.topk_sampled_logprobs) if sequence.HasField("topk_sampled_logprobs") else None,
                weights=tuple((span.start, span.step) for span in sequence.weights),
            )
            for sequence in response.sequences
        ),
        np.frombuffer(response.prompt_logprobs, "<f4") if response.HasField("prompt_logprobs") else None,
        prompt_cache_hit_tokens=response.prompt_cache_hit_tokens,
        top=_candidates(response.topk_prompt_logprobs) if response.HasField("topk_prompt_logprobs") else None,
    )


def _candidates(found: pb.TopkLogprobs) -> Candidates:
    shape = (found.length, found.k)
    tokens, logprobs = np.frombuffer(found.token_ids, "<i4"), np.frombuffer(found.logprobs, "<f4")
    return Candidates(tokens.reshape(shape), logprobs.reshape(shape))


def _top(found: Candidates) -> pb.TopkLogprobs:
    length, k = found.tokens_Nk.shape
    return pb.TopkLogprobs(
        token_ids=found.tokens_Nk.astype("<i4", copy=False).tobytes(),
        logprobs=found.logprobs_Nk.astype("<f4", copy=False).tobytes(),
        k=k,
        length=length,
    )


def _dense(array: Int32 | Float32, dtype: pb.DType, stored: str) -> pb.Tensor:
    return pb.Tensor(dtype=dtype, shape=list(array.shape), dense=array.astype(stored, copy=False).tobytes())


# ------------------------------------------------------------------ a request's fields
def _listed(name: str, count: int, vocab_size: int) -> int:
    most = min(MAX_LISTED, vocab_size)
    if count > most:
        raise broken(name, count, f"a whole number from 0 to {most}")
    return count


def _prompt_wishes(body: SampleBody, prompt: int, vocab_size: int) -> PromptWishes | None:
    last_n = body.prompt_logprobs_last_n
    if last_n is not None and not 1 <= last_n <= prompt - 1:
        raise broken("prompt_logprobs_last_n", last_n, f"1 to {prompt - 1}, the prompt's length less one")
    if last_n is not None and not body.prompt_logprobs:
        raise broken("prompt_logprobs_last_n", last_n, "absent without prompt_logprobs")
    top = _listed("topk_prompt_logprobs", body.topk_prompt_logprobs, vocab_size)
    targets_TK = _target_tokens(body.target_prompt_logprobs, prompt, vocab_size)
    if last_n is None and targets_TK is None and not top and not body.prompt_alt_tokens_k:
        return None
    return PromptWishes(last_n, top, targets_TK, body.prompt_alt_tokens_k)


def _prompt(
    chunks: Any,
    vocab_size: int,
    max_context: int,
    most: int,
    rule: str,
    find_processor: FindProcessor,
    blank: bool,
) -> tuple[Int32, tuple[ImagePixels, ...]]:
    """The tokens of a prompt, with placeholders for images, and the images.

    most: the most tokens that the prompt may have. rule: the reason for this limit. Other arguments: see
    `sample_request`.
    """
    if not isinstance(chunks, list):
        raise broken("prompt.chunks", chunks, "a list of chunks")
    parts: list[Int32] = []
    images: list[ImagePixels] = []
    size = seen = 0
    for i, given in enumerate(chunks):
        chunk = given if isinstance(given, dict) else {"type": given}
        kind, name = chunk.get("type", "encoded_text"), f"prompt.chunks[{i}]"
        if kind == "encoded_text":
            parts.append(_token_array(chunk.get("tokens"), f"{name}.tokens", vocab_size))
        elif kind in ("image", _POINTER) and (processor := find_processor()) is not None:
            if kind == _POINTER and "data" not in chunk:
                raise broken(f"{name}.location", chunk.get("location"), LOCATION_RULE)
            image = ImagePixels(size, pixels_of(chunk, name, processor, blank=blank))
            images.append(image)
            parts.append(np.full(image.tokens(processor.side), processor.token, np.int32))
            seen += image.pixels_HWC.size
            check_room(seen, "prompt", name)
        else:
            takes = "encoded_text, because the model accepts no images"
            if kind not in ("image", _POINTER):
                blind = find_processor() is None
                takes = "encoded_text, because the model accepts only text" if blind else "encoded_text or image"
            raise UserError(f"{name}.type is {shown(kind)}: must be {takes}")
        size += len(parts[-1])
        if images and size > most:  # before the next image is decoded
            raise _too_long(f"at least {size} tokens", most, rule, max_context)
    prompt_T = np.concatenate(parts) if parts else np.empty(0, np.int32)
    if len(prompt_T) > most:
        raise _too_long(f"{len(prompt_T)} tokens", most, rule, max_context)
    if not len(prompt_T):
        raise UserError(f"prompt has 0 tokens: must be 1 to {most}, {rule}")
    return prompt_T, tuple(images)


def _too_long(size: str, most: int, rule: str, max_context: int) -> ContextExceededError:
    return ContextExceededError(
        f"prompt has {size}: must be 1 to {most}, {rule}", context=max_context, size=size, most=most
    )


def _token_array(tokens: Any, name: str, vocab_size: int) -> Int32:
    if not isinstance(tokens, list):
        raise broken(name, tokens, "a list of token ids")
    try:
        values = np.asarray(tokens)
    except ValueError as e:  # lists of different lengths
        raise broken(name, tokens, "a flat list of token ids") from e
    if bool in set(map(type, tokens)) or (len(tokens) and (values.ndim != 1 or values.dtype.kind not in "iu")):
        raise broken(name, tokens, "a flat list of whole numbers")
    bad = np.flatnonzero((values < 0) | (values >= vocab_size))
    if len(bad):
        raise broken(f"{name}[{bad[0]}]", int(values[bad[0]]), f">= 0 and < {vocab_size}, the model's vocabulary")
    return values.astype(np.int32)


def _max_tokens(asked: int | None, prompt: int, max_context: int) -> int:
    left = max_context - prompt
    most = max(left, 1)  # a token beyond the context never enters the model
    if asked is not None and asked > most:
        rule = f"the rest of the context of {max_context} tokens after a prompt of {prompt}"
        rule = rule if left else "the prompt fills the context and can only be scored"
        raise ContextExceededError(
            f"sampling_params.max_tokens is {asked}: must be at most {most}, {rule}",
            context=max_context,
            size=f"{prompt + asked} tokens with the answer",
            most=max_context,
        )
    return most if asked is None else asked


def _stops(stop: Any, vocab_size: int, eos: Sequence[int]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    name = "sampling_params.stop"
    if stop is None:
        return tuple(eos), ()
    if isinstance(stop, str):
        stop = [stop]
    if not isinstance(stop, list) or len(stop) > MAX_STOPS:
        raise broken(name, stop, f"a string, or at most {MAX_STOPS} strings or token ids")
    if any(isinstance(item, str) and len(item) > MAX_STOP_CHARACTERS for item in stop):
        raise broken(name, stop, f"strings of at most {MAX_STOP_CHARACTERS} characters")
    if all(isinstance(item, str) and item for item in stop):
        return (), tuple(stop)
    if all(isinstance(item, int) and not isinstance(item, bool) for item in stop):
        return tuple(_token_array(stop, name, vocab_size).tolist()), ()
    raise broken(name, stop, "non-empty strings only, or token ids only")


def _adjustments(params: SamplingParams, vocab_size: int) -> Adjustments | None:
    made = Adjustments(
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
        repetition=params.repetition_penalty,
        bias=_biases(params.logit_bias or {}, vocab_size),
    )
    return None if made == Adjustments() else made


def _biases(given: Mapping[str, Any], vocab_size: int) -> tuple[tuple[int, float], ...]:
    """(token, bias) pairs in the order of tokens. Names of JSON fields are texts, so a token is a decimal number."""
    name = "sampling_params.logit_bias"
    if len(given) > MAX_BIASES:
        raise UserError(f"{name} has {len(given)} tokens: must have at most {MAX_BIASES}")
    biases: dict[int, float] = {}
    for key, value in given.items():
        token = int(key) if key.isascii() and key.isdecimal() and len(key) < _DIGITS else -1
        if not 0 <= token < vocab_size:
            rule = f"must have token ids alone, >= 0 and < {vocab_size}, the model's vocabulary"
            raise UserError(f"{name} has the key {shown(key)}: {rule}")
        if not isinstance(value, int | float) or isinstance(value, bool) or not -MOST_BIAS <= value <= MOST_BIAS:
            raise broken(f"{name}[{key!r}]", value, f"a number from {-MOST_BIAS:g} to {MOST_BIAS:g}")
        if token in biases:
            raise UserError(f"{name} names token {token} twice: must name a token once")
        biases[token] = float(value)
    return tuple(sorted((token, bias) for token, bias in biases.items() if bias))


def _constraint(given: ConstraintBody, eos: Sequence[int]) -> Constraint:
    name, value = "sampling_params.constraint.value", given.value
    if not eos:
        raise broken("sampling_params.constraint", given.type, "absent: the model names no end-of-text token")
    kind: ConstraintKind = "json_schema"
    if given.type == "json_object":
        if value is not None:
            raise broken(name, value, "absent, json_object is any JSON object")
        text = '{"type":"object"}'
    elif given.type == "json_schema":
        if not isinstance(value, dict):
            raise broken(name, value, "a JSON schema, an object")
        try:
            text = orjson.dumps(value).decode()
        except orjson.JSONEncodeError as error:  # a TypeError, because the schema is nested too deeply
            raise UserError(f"{name} is not a json_schema that can be enforced: {error}") from error
    else:
        kind = "regex" if given.type == "regex" else "grammar"
        if not isinstance(value, str) or not value:
            raise broken(name, value, "a non-empty string")
        text = value
    check_constraint(name, kind, text)
    return Constraint(kind, text, tuple(eos))


# ------------------------------------------------------------------ target_prompt_logprobs
def _target_tokens(tensor: TargetTensor | None, prompt: int, vocab_size: int) -> Int32 | None:
    """The tokens as int32 [prompt - 1, K], -1 = none, or None if none are requested.

    prompt: the number of its tokens. vocab_size: the model's. UserError: the tensor is invalid.
    """
    if tensor is None:
        return None
    if tensor.dtype != "int64":
        raise broken(f"{_TARGETS}.dtype", tensor.dtype, "'int64'")
    rows, columns = _shape(tensor.shape)
    if rows != prompt - 1 or not 1 <= columns <= MAX_LISTED:
        rule = f"[{prompt - 1}, K], the prompt's length less one, with K from 1 to {MAX_LISTED}"
        raise broken(f"{_TARGETS}.shape", [rows, columns], rule)
    data = _whole_numbers("data", tensor.data)
    outside = np.flatnonzero((data < -1) | (data >= vocab_size))
    if len(outside):
        place = int(outside[0])
        raise broken(f"{_TARGETS}.data[{place}]", int(data[place]), f"-1 (nothing) or a token, >= 0 and < {vocab_size}")
    if tensor.crow is not None or tensor.cols is not None:
        crow, cols = _csr(tensor, rows, columns, len(data))
        tokens = np.full((rows, columns), -1, np.int32)
        tokens[np.repeat(np.arange(rows), np.diff(crow)), cols] = data
        return tokens
    if len(data) != rows * columns:
        raise UserError(f"{_TARGETS}.data has {len(data)} values: the shape [{rows}, {columns}] needs {rows * columns}")
    return data.astype(np.int32).reshape(rows, columns)


def _encode_targets(tensor: TargetTensor, logprobs_TK: Float32) -> pb.Tensor:
    """The logprobs [T - 1, K] as a float32 tensor of the shape and layout of the request's `tensor`."""
    answer = pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=list(logprobs_TK.shape))
    if tensor.crow is None:
        answer.dense = logprobs_TK.astype("<f4", copy=False).tobytes()
        return answer
    crow, cols = _indices(tensor)
    cells = logprobs_TK[np.repeat(np.arange(len(crow) - 1), np.diff(crow)), cols]
    answer.sparse_csr.values = cells.astype("<f4", copy=False).tobytes()
    answer.sparse_csr.crow_indices = crow.astype("<i8", copy=False).tobytes()
    answer.sparse_csr.col_indices = cols.astype("<i8", copy=False).tobytes()
    return answer


def _shape(shape: Any) -> tuple[int, int]:
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(size) is int and size >= 0 for size in shape):
        raise broken(f"{_TARGETS}.shape", shape, "[T, K]")
    return shape[0], shape[1]


def _whole_numbers(name: str, given: Any) -> _Int64:
    if not isinstance(given, list) or not all(type(value) is int and -(2**63) <= value < 2**63 for value in given):
        raise broken(f"{_TARGETS}.{name}", given, "a flat list of whole numbers")
    return np.array(given, np.int64)


def _indices(tensor: TargetTensor) -> tuple[_Int64, _Int64]:
    return _whole_numbers("sparse_crow_indices", tensor.crow), _whole_numbers("sparse_col_indices", tensor.cols)


def _csr(tensor: TargetTensor, rows: int, columns: int, stored: int) -> tuple[_Int64, _Int64]:
    crow, cols = _indices(tensor)
    if len(crow) != rows + 1 or crow[0] != 0 or crow[-1] != stored or (np.diff(crow) < 0).any():
        raise UserError(f"{_TARGETS}.sparse_crow_indices must be {rows + 1} numbers from 0 to {stored} that never fall")
    if len(cols) != stored or (stored and (cols.min() < 0 or cols.max() >= columns)):
        raise UserError(f"{_TARGETS}.sparse_col_indices must be {stored} numbers, >= 0 and < {columns}")
    if (np.diff(np.repeat(np.arange(rows) * columns, np.diff(crow)) + cols) <= 0).any():
        raise UserError(f"{_TARGETS}.sparse_col_indices must rise strictly within each row")
    return crow, cols

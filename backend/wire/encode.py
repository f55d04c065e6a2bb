"""Results as the SDK reads them: protobuf for forward, forward_backward and sample, JSON for the rest.

JSON never holds a null (a success with an `error` key, even null, is a failure to the SDK) nor a number that is not
finite (the SDK cannot parse one): such keys are left out. Protobuf may hold NaN.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
import orjson

from tinkerflow.backend.commands import Candidates, Float32, ForwardResult, Int32, OptimResult, SampleResult
from tinkerflow.backend.wire import tinker_pb2 as pb
from tinkerflow.backend.wire.requests import TargetTensor
from tinkerflow.backend.wire.targets import encode_targets

_STOP_REASONS = {"stop": pb.STOP_REASON_STOP, "length": pb.STOP_REASON_LENGTH}


def encode_forward(result: ForwardResult) -> bytes:
    """A ForwardBackwardOutput: field `logprobs` for every datum in order, and `loss:sum` with a custom loss's metrics.

    Neighbours with the same K share an ArrayRecord; another K starts a new one.
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


def encode_sample(result: SampleResult, targets: TargetTensor | None = None) -> bytes:
    """A SampleResponse: every sequence with its logprobs; prompt logprobs (NaN first) and more when there are any.

    targets: the request's target_prompt_logprobs; the logprobs of these tokens are answered in the same layout.
    """
    response = pb.SampleResponse(prompt_cache_hit_tokens=result.prompt_cache_hit_tokens)
    for sequence in result.sequences:
        response.sequences.add(
            stop_reason=_STOP_REASONS[sequence.stop_reason],
            tokens=sequence.tokens_T.astype("<i4", copy=False).tobytes(),
            logprobs=sequence.logprobs_T.astype("<f4", copy=False).tobytes(),
            topk_sampled_logprobs=_top(sequence.top) if sequence.top is not None else None,
        )
    if result.prompt_logprobs_T is not None:
        response.prompt_logprobs = result.prompt_logprobs_T.astype("<f4", copy=False).tobytes()
    if result.top is not None:
        response.topk_prompt_logprobs.CopyFrom(_top(result.top))
    if result.targets_TK is not None:
        assert targets is not None, "logprobs of given tokens without a question"
        response.target_prompt_logprobs.CopyFrom(encode_targets(targets, result.targets_TK))
    if result.alternatives is not None:
        response.prompt_alt_tokens.tokens.CopyFrom(_dense(result.alternatives.tokens_Nk, pb.DTYPE_INT32, "<i4"))
        response.prompt_alt_tokens.logprobs.CopyFrom(_dense(result.alternatives.logprobs_Nk, pb.DTYPE_FLOAT32, "<f4"))
    return bytes(response.SerializeToString())


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


def encode_optim_step(result: OptimResult) -> bytes:
    """The metrics of an optimizer step: the gradient's norm before clipping, and the steps made so far."""
    metrics = {"grad_norm": result.grad_norm, "optimizer_step": float(result.step)}
    return encode_json({"metrics": {key: value for key, value in metrics.items() if math.isfinite(value)}})


def encode_model_created(model_id: str) -> bytes:
    """The answer to create_model."""
    return encode_json({"type": "create_model", "model_id": model_id})


def encode_loaded(model_id: str, path: str) -> bytes:
    """The answer to load_weights, in both of its forms."""
    return encode_json({"type": "load_weights", "model_id": model_id, "path": path})


def encode_saved(path: str, *, kind: str = "save_weights", size_bytes: int | None = None) -> bytes:
    """The answer to save_weights, and by `kind` to a named save_weights_for_sampler and to save_weights_external."""
    return encode_json({"type": kind, "path": path, "size_bytes": size_bytes})


def encode_sampler_opened(sampling_session_id: str) -> bytes:
    """The answer to an unnamed save_weights_for_sampler."""
    return encode_json({"type": "save_weights_for_sampler", "sampling_session_id": sampling_session_id})


def encode_json(values: Mapping[str, object]) -> bytes:
    """`values` as JSON without its null fields."""
    return orjson.dumps({key: value for key, value in values.items() if value is not None})

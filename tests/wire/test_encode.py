"""Encoded results, read back by the SDK's own converters."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response
from tinker.types import (
    CreateModelResponse,
    LoadWeightsResponse,
    OptimStepResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
)

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.spec.commands import (
    NO_LOGPROB,
    Candidates,
    ForwardResult,
    OptimResult,
    SampledSequence,
    SampleResult,
)
from tinkerflow.backend.wire import (
    SampleBody,
    decode_sample,
    encode_forward,
    encode_loaded,
    encode_model_created,
    encode_optim_step,
    encode_sample,
    encode_sampler_opened,
    encode_saved,
    sample,
)
from tinkerflow.backend.wire.requests import encode_json


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3)), max_size=8), st.floats(allow_nan=False))
@settings(max_examples=60)
def test_forward_results_of_any_shapes(shapes: list[tuple[int, int]], loss: float) -> None:
    rng = np.random.default_rng(0)
    arrays = tuple(rng.normal(size=(t, k) if k else t).astype(np.float32) for t, k in shapes)
    output = deserialize_forward_backward_output(encode_forward(ForwardResult(arrays, loss)))
    assert output.metrics == {"loss:sum": loss}
    assert len(output.loss_fn_outputs) == len(arrays)
    for sent, read in zip(arrays, output.loss_fn_outputs, strict=True):
        assert read["logprobs"].shape == list(sent.shape)
        assert np.array_equal(read["logprobs"].to_numpy(), sent)


def test_nan_is_encoded() -> None:
    nan = encode_forward(ForwardResult((np.array([np.nan], np.float32),), float("nan")))
    output = deserialize_forward_backward_output(nan)
    assert np.isnan(output.metrics["loss:sum"])
    assert np.isnan(output.loss_fn_outputs[0]["logprobs"].to_numpy()).all()


def test_samples() -> None:
    first = SampledSequence(np.array([3, 4], np.int32), np.array([-0.5, -1.0], np.float32), "stop")
    second = SampledSequence(np.array([5], np.int32), np.array([-2.0], np.float32), "length")
    prompt = np.array([np.nan, -3.0], np.float32)
    response = deserialize_sample_response(encode_sample(SampleResult("r", (first, second), prompt, 7)))
    assert [s.stop_reason for s in response.sequences] == ["stop", "length"]
    assert list(response.sequences[0].tokens) == [3, 4]
    assert list(response.sequences[0].logprobs or []) == [-0.5, -1.0]
    assert response.prompt_logprobs == [None, -3.0]
    assert response.prompt_cache_hit_tokens == 7
    assert deserialize_sample_response(encode_sample(SampleResult("r", (first,)))).prompt_logprobs is None


def test_sample_results_with_prompt_scores_are_encoded() -> None:
    top = Candidates(np.array([[0, 0], [3, 4]], np.int32), np.array([[NO_LOGPROB] * 2, [-0.5, -1.0]], np.float32))
    sequence = SampledSequence(np.array([3, 4], np.int32), np.array([-0.5, -1.0], np.float32), "stop", top)
    drawn = Candidates(np.array([[3, 4]], np.int32), np.array([[-0.5, -1.0]], np.float32))
    result = SampleResult("r", (sequence,), top=top, alternatives=drawn)
    response = deserialize_sample_response(encode_sample(result))
    assert response.topk_prompt_logprobs == [None, [(3, -0.5), (4, -1.0)]]
    assert response.sequences[0].topk_logprobs_np is not None
    assert response.sequences[0].topk_logprobs_np.token_ids.tolist() == [[0, 0], [3, 4]]
    assert response.prompt_alt_tokens is not None
    assert np.array_equal(response.prompt_alt_tokens.tokens.to_numpy(), [[3, 4]])
    assert np.array_equal(response.prompt_alt_tokens.logprobs.to_numpy(), np.float32([[-0.5, -1.0]]))


def test_an_answer_that_the_journal_cannot_store_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    two = Candidates(np.zeros((2, 3), np.int32), np.zeros((2, 3), np.float32))
    one = SampledSequence(np.zeros(2, np.int32), np.zeros(2, np.float32), "stop", two)
    whole = SampleResult("r", (one, one), np.zeros(2, np.float32), top=two, alternatives=two)
    size = 4 * (2 * (2 + 2 + 6 + 6) + 2 + (6 + 6) + (6 + 6))
    monkeypatch.setattr(sample, "MAX_RECORDED_BYTES", size)
    encode_sample(whole)
    monkeypatch.setattr(sample, "MAX_RECORDED_BYTES", size - 1)
    with pytest.raises(UserError, match=f"^the answer has {size} bytes: must have at most {size - 1}; lower num_samp"):
        encode_sample(whole)
    with pytest.raises(UserError, match=f"the answer has {size + 16} bytes"):
        encode_sample(replace(whole, targets_TK=np.zeros((2, 3), np.float32), prompt_logprobs_T=None))


def test_a_sample_is_read_as_it_was_written() -> None:
    top = Candidates(np.array([[0, 0], [3, 4]], np.int32), np.array([[NO_LOGPROB] * 2, [-0.5, -1.0]], np.float32))
    weights = ((0, 7), (1, 2**40))
    one = SampledSequence(np.array([3, 4], np.int32), np.array([-0.5, -1.0], np.float32), "stop", top, weights=weights)
    two = SampledSequence(np.array([5], np.int32), np.array([-2.0], np.float32), "length")
    whole = SampleResult("r", (one, two), np.array([np.nan, -3.0], np.float32), 7, top=top)
    for result in (whole, SampleResult("r", (two,))):
        answer = encode_sample(result)
        read = decode_sample("r", answer)
        assert encode_sample(read) == answer
        assert repr(read) == repr(result)
        assert len(deserialize_sample_response(answer).sequences) == len(result.sequences), "the SDK skips our fields"


def test_logprobs_of_given_tokens_have_the_layout_of_the_request() -> None:
    logprobs = np.array([[0, -1.5, 0], [-2.5, 0, 0]], np.float32)
    result = SampleResult("r", targets_TK=logprobs)
    dense = {"data": [-1, 4, -1, 5, -1, -1], "dtype": "int64", "shape": [2, 3]}
    sparse = {"data": [4, 5], "dtype": "int64", "shape": [2, 3]}
    sparse |= {"sparse_crow_indices": [0, 1, 2], "sparse_col_indices": [1, 0]}
    for asked in (dense, sparse):
        targets = SampleBody.from_values({"target_prompt_logprobs": asked}).target_prompt_logprobs
        read = deserialize_sample_response(encode_sample(result, targets)).target_prompt_logprobs
        assert read is not None and read.dtype == "float32" and read.shape == [2, 3]
        assert np.array_equal(read.to_torch().to_dense().numpy(), logprobs)
        assert (read.sparse_crow_indices is None) == (asked is dense)


def test_json_answers_pass_the_strict_models_of_the_sdk() -> None:
    assert CreateModelResponse.model_validate_json(encode_model_created("s:train:0")).model_id == "s:train:0"
    loaded = LoadWeightsResponse.model_validate_json(encode_loaded("s:train:1", "tinker://a/weights/b"))
    assert (loaded.model_id, loaded.path) == ("s:train:1", "tinker://a/weights/b")
    assert SaveWeightsResponse.model_validate_json(encode_saved("tinker://a/weights/b")).path == "tinker://a/weights/b"
    named = encode_saved("tinker://a/sampler_weights/b", kind="save_weights_for_sampler")
    assert SaveWeightsForSamplerResponse.model_validate_json(named).path.endswith("b")
    assert json.loads(encode_sampler_opened("s:sample:0"))["sampling_session_id"] == "s:sample:0"
    metrics = OptimStepResponse.model_validate_json(encode_optim_step(OptimResult(0.5, 3))).metrics
    assert metrics == {"grad_norm": 0.5, "optimizer_step": 3.0}


def test_json_has_neither_null_nor_nan() -> None:
    assert json.loads(encode_json({"a": None, "b": 1})) == {"b": 1}
    assert json.loads(encode_optim_step(OptimResult(float("nan"), 1))) == {"metrics": {"optimizer_step": 1.0}}

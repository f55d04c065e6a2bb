"""The unmodified SDK works against the server: training, sampling, saving, resuming, and errors."""

from __future__ import annotations

import io
import time
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from PIL import Image
from tests.waiting import wait_for
from tinker import types

from tinkerflow.backend.spec.images import ImageProcessor

BASE = "tiny/bigram"
TOKENS = [3, 4, 5, 6]


def datum(tokens: list[int] = TOKENS, **inputs: Any) -> types.Datum:
    given = {"target_tokens": np.array([*tokens[1:], 1]), "weights": np.ones(len(tokens), np.float32), **inputs}
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens),
        loss_fn_inputs={key: value for key, value in given.items() if value is not None},
    )


@pytest.fixture
def model(client: tinker.ServiceClient) -> tinker.TrainingClient:
    return client.create_lora_training_client(BASE, rank=8, seed=1, user_metadata={"renderer": "plain"}).result()


def loss_of(model: tinker.TrainingClient) -> float:
    return float(model.forward([datum()], "cross_entropy").result().metrics["loss:sum"])


def steps(model: tinker.TrainingClient, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        passed = model.forward_backward([datum()], "cross_entropy")
        stepped = model.optim_step(types.AdamParams(learning_rate=0.5))
        losses.append(passed.result().metrics["loss:sum"])
        assert stepped.result().metrics is not None
    return losses


def test_ids_and_info(client: tinker.ServiceClient, model: tinker.TrainingClient) -> None:
    info = model.get_info()
    session, word, number = info.model_id.split(":")
    assert (session[:5], word, number) == ("sess-", "train", "0")
    assert (info.model_name, info.lora_rank, info.is_lora) == (BASE, 8, True)
    assert (info.model_data.model_name, info.model_data.arch) == (BASE, "Qwen3ForCausalLM")
    assert info.model_data.tokenizer_id == "/models/bigram"
    second = client.create_lora_training_client(BASE, rank=4).result()
    assert second.get_info().model_id == f"{session}:train:1"


def test_training_lowers_the_loss(model: tinker.TrainingClient, engine: Any) -> None:
    losses = steps(model, 4)
    assert losses[0] == pytest.approx(4 * np.log(16))
    assert losses == sorted(losses, reverse=True)
    output = model.forward([datum(), datum([7])], "cross_entropy").result()
    assert [o["logprobs"].shape for o in output.loss_fn_outputs] == [[4], [1]]
    assert output.metrics["loss:sum"] == pytest.approx(
        -sum(sum(o["logprobs"].tolist()) for o in output.loss_fn_outputs)
    )
    assert [seq for _, seq in engine.executed] == list(range(10))


def test_wide_and_sparse_targets(model: tinker.TrainingClient) -> None:
    targets = torch.zeros((4, 8), dtype=torch.int64)
    weights = torch.zeros((4, 8))
    targets[:, 0], weights[:, 0] = torch.tensor([4, 5, 6, 1]), 1.0
    wide = datum(target_tokens=targets, weights=weights)
    output = model.forward_backward([wide], "cross_entropy").result()
    assert output.metrics["loss:sum"] == pytest.approx(loss_of(model))
    assert output.loss_fn_outputs[0]["logprobs"].shape == [4, 8]


def test_policy_loss_reaches_the_engine_with_its_config(model: tinker.TrainingClient, engine: Any) -> None:
    seen = []

    def answer(request: Any) -> Any:
        from tinkerflow.backend.wire import decode_forward, read_forward

        seen.append(decode_forward(read_forward(request.payload), vocab_size=16, max_context=64))
        return request.failed("seen")

    engine.next_outcome = answer
    zeros = np.zeros(4, np.float32)
    passed = model.forward_backward(
        [datum(weights=None, logprobs=zeros, advantages=zeros)], "ppo", {"clip_low_threshold": 0.5}
    )
    with pytest.raises(tinker.RequestFailedError):
        passed.result()
    assert seen[0].config == {"clip_low_threshold": 0.5, "clip_high_threshold": 1.2}


def test_chunks_sent_in_reverse_order_are_executed_in_order(model: tinker.TrainingClient, engine: Any) -> None:
    output = model.forward_backward([datum([i % 16]) for i in range(2500)], "cross_entropy").result()
    assert len(output.loss_fn_outputs) == 2500
    assert output.metrics["loss:sum"] == pytest.approx(2500 * np.log(16), rel=1e-5)
    assert [seq for _, seq in engine.executed] == [0, 1, 2, 3]


def test_invalid_chunk_fails_only_its_call(model: tinker.TrainingClient, engine: Any) -> None:
    data = [datum([i % 16]) for i in range(2500)]
    data[1500] = datum([3], target_tokens=None)
    with pytest.raises(tinker.RequestFailedError, match=r"data\[476\].loss_fn_inputs lacks 'target_tokens'") as caught:
        model.forward_backward(data, "cross_entropy").result()
    assert caught.value.category == "user"
    assert loss_of(model) == pytest.approx(4 * np.log(16))
    assert [seq for _, seq in engine.executed] == list(range(5)), "nothing is sent again"


def test_an_image_is_trained_on_where_the_model_sees(model: tinker.TrainingClient, engine: Any) -> None:
    engine.processor = ImageProcessor(token=15, side=8, least=64, most=1024, mean=(0.0,) * 3, deviation=(1.0,) * 3)
    out = io.BytesIO()
    Image.new("RGB", (24, 16), "red").save(out, "png")

    def seen(expected: int) -> types.Datum:
        image = types.ImageChunk(data=out.getvalue(), format="png", expected_tokens=expected)
        chunks = [types.EncodedTextChunk(tokens=[3, 4]), image, types.EncodedTextChunk(tokens=[5])]
        inputs = {"target_tokens": np.ones(9, np.int64), "weights": np.ones(9, np.float32)}
        return types.Datum(model_input=types.ModelInput(chunks=chunks), loss_fn_inputs=inputs)

    result = model.forward_backward([seen(6), datum()], "cross_entropy").result()
    assert [len(output["logprobs"].data) for output in result.loss_fn_outputs] == [9, 4]
    with pytest.raises(tinker.RequestFailedError, match=r"chunks\[1\].expected_tokens is 5: must be 6"):
        model.forward_backward([seen(5)], "cross_entropy").result()


def test_non_finite_gradient_norm_is_left_out_of_the_metrics(model: tinker.TrainingClient, engine: Any) -> None:
    from tinkerflow.backend.spec.commands import OptimResult
    from tinkerflow.backend.wire import encode_optim_step

    engine.next_outcome = lambda r: r.done(encode_optim_step(OptimResult(float("nan"), 1)), "json")
    assert model.optim_step(types.AdamParams()).result().metrics == {"optimizer_step": 1.0}


def test_custom_loss_gives_the_gradient_of_the_equal_builtin_loss(
    client: tinker.ServiceClient, model: tinker.TrainingClient
) -> None:
    def negative_sum(data: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return -sum(x.sum() for x in logprobs), {"mine:sum": 2.0}  # type: ignore[return-value]

    custom = model.forward_backward_custom([datum(weights=None)], negative_sum)
    model.optim_step(types.AdamParams(learning_rate=0.5)).result()
    metrics = custom.result().metrics
    assert metrics["loss:sum"] == pytest.approx(4 * np.log(16))
    assert metrics["mine:sum"] == 2.0
    other = client.create_lora_training_client(BASE, rank=8).result()
    steps(other, 1)
    assert loss_of(model) == pytest.approx(loss_of(other))


def test_samples_without_a_seed_differ(client: tinker.ServiceClient, engine: Any) -> None:
    sampler = client.create_sampling_client(base_model=BASE).result()
    params = types.SamplingParams(max_tokens=20, stop=[])
    drawn = [sampler.sample(types.ModelInput.from_ints([3]), 1, params).result().sequences[0].tokens for _ in range(2)]
    assert drawn[0] != drawn[1]
    assert [len(tokens) for tokens in drawn] == [20, 20]  # an empty stop list stops at nothing, not even at the EOS


def test_capabilities_and_flags(client: tinker.ServiceClient, server: Any) -> None:
    (supported,) = tinker.RestClient(base_url=server.url).get_server_capabilities().result().supported_models
    assert (supported.model_name, supported.max_context_length) == (BASE, 64)
    assert (supported.trainable, supported.sampleable) == (True, True)
    # each flag promises an endpoint or an encoding
    assert server.post("client/config", {"sdk_version": "0"}).json()["custom_loss_server_side"] is True
    assert server.post("client/dynamic_config", {"sdk_version": "0"}).json()["sample_cancel_enabled"] is True


def test_giving_up_on_a_result_does_not_cancel_it(model: tinker.TrainingClient, engine: Any) -> None:
    engine.paused = True
    passed = model.forward_backward([datum()], "cross_entropy")
    with pytest.raises(TimeoutError):
        passed.result(timeout=0.3)
    engine.paused = False
    assert passed.result(timeout=60).metrics["loss:sum"] == pytest.approx(4 * np.log(16))


def test_a_slow_result_survives_several_polls(start: Any, engine: Any) -> None:
    server = start(poll_hold=0.2)
    with tinker.ServiceClient(base_url=server.url) as service:
        model = service.create_lora_training_client(BASE, rank=8).result()
        engine.paused = True
        passed = model.forward_backward([datum()], "cross_entropy")
        time.sleep(1.0)
        engine.paused = False
        assert passed.result(timeout=60).metrics["loss:sum"] == pytest.approx(4 * np.log(16))


def test_telemetry_is_accepted_and_a_fatal_error_is_not_retried(
    server: Any, engine: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "1")
    caplog.set_level("DEBUG", "tinkerflow.api")
    service = tinker.ServiceClient(base_url=server.url, api_key="tml-very-secret")
    model = service.create_lora_training_client(BASE, rank=8).result()
    engine.next_outcome = lambda r: r.failed("it broke")
    with pytest.raises(tinker.RequestFailedError, match="it broke"):  # a second attempt would succeed
        model.optim_step(types.AdamParams()).result()
    service.close("success").result()
    wait_for(lambda: "SESSION_START" in caplog.text)
    assert "tml-very-secret" not in caplog.text

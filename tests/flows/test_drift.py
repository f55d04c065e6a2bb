"""A forward_backward on samples of another policy is visible in its metrics and in the log."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tinkerflow.backend.journal import Kind
from tinkerflow.backend.spec.drift import DriftLimits
from tinkerflow.backend.wire import tinker_pb2 as pb
from tinkerflow.tasks.execution.operation import ExecutionContext


@pytest.fixture
def context(context: ExecutionContext) -> ExecutionContext:
    return replace(context, drift_limits=DriftLimits(kl=0.01))


def rollout(model: str, seq_id: int, logprob: float) -> bytes:
    message = pb.ForwardBackwardRequest(model_id=model, seq_id=seq_id, loss_fn="importance_sampling")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.asarray([5, 6], np.int32).tobytes()
    inputs = {
        "target_tokens": (np.asarray([6, 7], np.int64), pb.DTYPE_INT64),
        "logprobs": (np.full(2, logprob, np.float32), pb.DTYPE_FLOAT32),
        "advantages": (np.ones(2, np.float32), pb.DTYPE_FLOAT32),
    }
    for name, (values, dtype) in inputs.items():
        tensor = datum.loss_fn_inputs[name]
        tensor.dense, tensor.dtype = values.tobytes(), dtype
        tensor.shape.append(2)
    return message.SerializeToString()


async def test_drift_is_reported_and_logged(
    journal: Any, connect: Any, make_runner: Any, running: Any, caplog: pytest.LogCaptureFixture
) -> None:
    client = await connect(journal)
    model, created = client.submit_create()
    runner = make_runner(model)

    async def drift(logprob: float) -> float:
        body = rollout(model, client.seqs[model], logprob)
        result = await client.result(client.submit(model, Kind.FORWARD_BACKWARD, body))
        assert result.error is None, result.error
        metrics = pb.ForwardBackwardOutput.FromString(result.result).metrics
        assert metrics["kl_sample_train:max"] == pytest.approx(metrics["kl_sample_train:mean"])
        trained = np.frombuffer(
            pb.ForwardBackwardOutput.FromString(result.result).loss_fn_outputs[0].fields["logprobs"].data, np.float32
        )
        d = float(trained[0]) - logprob
        assert metrics["kl_sample_train:mean"] == pytest.approx(np.expm1(d) - d, abs=1e-6)
        return d

    async with running(runner.serve()), running(client.ring("model:", runner)):
        assert (await client.result(created)).error is None
        with caplog.at_level(logging.WARNING, "tinkerflow.tasks"):
            moved = await drift(-9.0)
            assert moved > 1
            assert f"model {model} trains on samples of another policy: kl_sample_train is " in caplog.text
            assert "; datum 0, token 0: sampled at -9, trained at -" in caplog.text
            caplog.clear()
            assert abs(await drift(moved - 9.0)) < 1e-5
            assert "another policy" not in caplog.text

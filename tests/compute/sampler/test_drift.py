"""Sampler and trainer give equal logprobs for the same text: `kl_sample_train` is near 0 without drift."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.compute.conftest import ask, examples, run_all

from tinkerflow.backend.spec.commands import (
    CreateAdapter,
    Example,
    Forward,
    ForwardResult,
    LoraSpec,
    OptimStep,
    PublishSnapshot,
)
from tinkerflow.backend.spec.drift import KL_MAX, KL_MEAN
from tinkerflow.backend.spec.optimizers.adamw import AdamParams
from tinkerflow.backend.wire import drift_metrics

# In nats. float32: logprobs differ by at most 1e-5, so d**2 / 2 is below 1e-10. bfloat16 has 8 bits, and attention and
# matrix products are rounded at other places.
LARGEST = {"float32": (1e-5, 1e-10), "bfloat16": (0.3, 0.01)}


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.thorough), "bfloat16"])
def test_samples_of_the_training_weights_show_no_drift(qwen3: Any, dtype: str) -> None:
    executor = qwen3.executor(dtype=dtype)
    executor.execute(CreateAdapter("a", LoraSpec(4), 3))

    def learn() -> None:
        executor.execute(Forward("a", examples((60, 40)), "cross_entropy"))
        executor.execute(OptimStep("a", AdamParams(learning_rate=0.01)))

    learn()
    executor.execute(PublishSnapshot("a", "s"))
    prompts = [np.random.default_rng(i).integers(0, 90, 10 + 30 * i).tolist() for i in range(3)]
    requests = [ask(f"r{i}", one, 40, snapshot_id="s", temperature=1.0, seed=i) for i, one in enumerate(prompts)]
    results = run_all(executor, *requests)

    def datum(prompt: list[int], sequence: Any) -> Example:
        whole, before = np.asarray([*prompt, *sequence.tokens_T], np.int32), np.zeros(len(prompt) - 1, np.float32)
        advantages = np.concatenate([before, np.ones(len(sequence.tokens_T), np.float32)])
        sampled = np.concatenate([before, sequence.logprobs_T])
        inputs = {"logprobs": sampled[:, None], "advantages": advantages[:, None]}
        return Example(whole[:-1], whole[1:, None], np.ones((len(whole) - 1, 1), np.float32), inputs=inputs)

    data = tuple(datum(one, results[f"r{i}"].sequences[0]) for i, one in enumerate(prompts))

    def forward() -> tuple[float, dict[str, float]]:
        command = Forward("a", data, "importance_sampling", backward=False)
        trained = executor.execute(command)
        assert isinstance(trained, ForwardResult)
        apart = [
            np.abs(logprobs - one.inputs["logprobs"][:, 0])[one.inputs["advantages"][:, 0] > 0].max()
            for logprobs, one in zip(trained.logprobs, data, strict=True)
        ]
        return float(max(apart)), drift_metrics(command, trained)

    apart, found = forward()
    most, mean = LARGEST[dtype]
    assert apart <= most
    assert 0 <= found[KL_MEAN] <= mean and found[KL_MEAN] <= found[KL_MAX]
    learn()
    learn()
    assert forward()[1][KL_MEAN] > 10 * mean, "samples of older weights"

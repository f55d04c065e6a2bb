"""kl_sample_train: the estimator, the tokens that count, and the SDK's mean over the parts of a request."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tinker.lib.chunked_fwdbwd_helpers import combine_fwd_bwd_output_results
from tinker.types import ForwardBackwardOutput

from tinkerflow.backend.spec.commands import Example, Forward, ForwardResult
from tinkerflow.backend.spec.drift import KL_MAX, KL_MEAN, WORST, kl_sample_train, worst_tokens
from tinkerflow.backend.spec.losses import LOSSES
from tinkerflow.backend.wire import drift_metrics


def forward(loss: str, sampled: Any, advantages: Any, weights: Any) -> Forward:
    def column(values: Any) -> Any:
        return np.asarray(values, np.float32)[:, None]

    tokens = np.zeros(len(sampled), np.int32)
    inputs = {"logprobs": column(sampled), "advantages": column(advantages)}
    return Forward("m", (Example(tokens, tokens[:, None], column(weights), inputs=inputs),), loss)


def result(*logprobs: float) -> ForwardResult:
    return ForwardResult((np.asarray(logprobs, np.float32),), 0.0)


def test_drift_counts_tokens_with_weight_and_advantage() -> None:
    command = forward("ppo", [0, -1, -2, -3], [0, 1, -1, 2], [1, 1, 1, 0])
    found = drift_metrics(command, result(-9, -1.5, -1.75, -9))
    each = [np.exp(d) - 1 - d for d in (-0.5, 0.25)]
    assert found == pytest.approx({KL_MEAN: np.mean(each), KL_MAX: max(each)})


def test_worst_tokens_have_the_largest_drift_and_count() -> None:
    near = (np.full((9, 1), -1.0), np.full((9, 1), -1.001), np.ones((9, 1), np.bool_))
    far = (np.float32([[-1], [-2]]), np.float32([[-5], [-2.5]]), np.bool_([[False], [True]]))
    found = worst_tokens([near, far])
    assert len(found) == WORST
    assert found[:2] == [
        "datum 1, token 1: sampled at -2, trained at -2.5",
        "datum 0, token 0: sampled at -1, trained at -1",
    ]


def test_drift_is_reported_only_by_losses_with_sampling_logprobs() -> None:
    for name, spec in LOSSES.items():
        takes = {one.name for one in spec.inputs if one.required} | ({"logprobs"} if spec.recorded else set())
        found = drift_metrics(forward(name, [-1.0], [1.0], [1.0]), result(-1.0))
        assert found == ({KL_MEAN: 0.0, KL_MAX: 0.0} if "logprobs" in takes else {})


def test_drift_metric_is_the_kl_divergence() -> None:
    rng = np.random.default_rng(0)
    p, q = (rng.dirichlet(np.ones(9)) for _ in range(2))
    drawn = rng.choice(9, 200_000, p=p)
    found = kl_sample_train([(np.log(p)[drawn], np.log(q)[drawn], np.ones(len(drawn), np.bool_))])
    assert found[KL_MEAN] == pytest.approx((p * np.log(p / q)).sum(), rel=0.05)


def test_unbounded_rise_of_a_logprob_stays_finite() -> None:
    found = kl_sample_train([(np.float32([-1e4]), np.float32([0]), np.bool_([True]))])
    assert found[KL_MAX] == pytest.approx(np.exp(20.0), rel=1e-6)


def test_sdk_joins_parts_including_one_without_tokens() -> None:
    parts = [
        drift_metrics(forward("ppo", [-1.0], [advantage], [1.0]), result(trained))
        for advantage, trained in ((1.0, -2.0), (0.0, -9.0))
    ]
    assert parts[1] == {KL_MEAN: 0.0, KL_MAX: 0.0}
    outputs = [
        ForwardBackwardOutput(loss_fn_output_type="x", loss_fn_outputs=[{}], metrics={**part, "loss:sum": 0.0})
        for part in parts
    ]
    joined = combine_fwd_bwd_output_results(outputs).metrics
    assert joined[KL_MAX] == parts[0][KL_MAX] > 0
    assert joined[KL_MEAN] == pytest.approx(parts[0][KL_MEAN] / 2)

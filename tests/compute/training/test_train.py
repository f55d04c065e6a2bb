"""Training through the executor: sums, accumulation, packing, shapes."""

from __future__ import annotations

import numpy as np
import pytest
from tests.compute.closeness import close_logprobs
from tests.compute.conftest import add_adapter, examples, forward, gradients

from tinkerflow.backend.core.errors import NotFoundError, UserError
from tinkerflow.backend.spec.commands import (
    CreateAdapter,
    DropAdapter,
    ExportAdapter,
    LoraSpec,
    OptimStep,
)
from tinkerflow.backend.spec.losses import LOSSES
from tinkerflow.backend.spec.optimizers.adamw import AdamParams

UNTRACED = [name for name, spec in LOSSES.items() if not spec.traced]
LENGTHS = (3, 40, 17, 100, 5, 64, 31)


@pytest.mark.parametrize("loss", UNTRACED)
def test_packed_examples_are_independent(executor, loss):
    add_adapter(executor, "pack")
    data = examples(LENGTHS, targets=2)
    together = forward(executor, "pack", data, loss)
    alone = [forward(executor, "pack", (example,), loss) for example in data]
    assert [a.shape for a in together.logprobs] == [(n, 2) for n in LENGTHS]
    for a, b in zip(together.logprobs, alone, strict=True):
        close_logprobs(a, b.logprobs[0], ulps=16)
    assert together.loss_sum == pytest.approx(sum(b.loss_sum for b in alone), rel=1e-4)


def test_two_halves_accumulate_to_the_whole(executor):
    data = examples(LENGTHS)
    add_adapter(executor, "whole")
    add_adapter(executor, "halves")
    whole = forward(executor, "whole", data, backward=True)
    halves = [forward(executor, "halves", part, backward=True) for part in (data[:3], data[3:])]
    assert sum(h.loss_sum for h in halves) == pytest.approx(whole.loss_sum, rel=1e-5)
    parts = [logprobs @ one.weights_TK[:, 0] for logprobs, one in zip(whole.logprobs, data, strict=True)]
    assert whole.loss_sum == pytest.approx(-float(sum(parts)), rel=1e-4)
    first, second = gradients(executor, "whole"), gradients(executor, "halves")
    assert max(np.abs(first[n] - second[n]).max() for n in first) < 1e-3 * max(np.abs(g).max() for g in first.values())


def test_same_seed_same_adapter(executor):
    states = []
    for name, seed in (("s1", 5), ("s2", 5), ("s3", 6)):
        executor.execute(CreateAdapter(name, LoraSpec(4), seed))
        states.append(executor.execute(ExportAdapter(name, False)).weights)
    assert all((w == states[1][n]).all() for n, w in states[0].items())
    assert any((w != states[2][n]).any() for n, w in states[0].items())
    assert all((w == 0).all() for n, w in states[0].items() if "lora_B" in n)


def test_disabled_parts_have_no_weights(executor):
    executor.execute(CreateAdapter("attn", LoraSpec(3, train_mlp=False, train_unembed=False), 0))
    names = executor.execute(ExportAdapter("attn", False)).weights
    assert names
    assert all("self_attn" in name for name in names)


def test_unknown_and_dropped_adapters_are_named(executor):
    executor.execute(CreateAdapter("gone", LoraSpec(2), 0))
    executor.execute(DropAdapter("gone"))
    executor.execute(DropAdapter("never"))
    for name in ("gone", "never"):
        with pytest.raises(NotFoundError, match=name):
            forward(executor, name, examples((4,)))


def test_impossible_specs_are_named(executor):
    with pytest.raises(UserError, match="rank"):
        executor.execute(CreateAdapter("bad", LoraSpec(-1), 0))
    with pytest.raises(UserError, match="train_"):
        executor.execute(CreateAdapter("bad", LoraSpec(2, False, False, False), 0))


def test_warm_executor_does_not_recompile(executor):
    add_adapter(executor, "warm")

    def traffic(seed: int) -> None:
        for loss in UNTRACED:
            for lengths in ((5,), (30, 20), LENGTHS):
                forward(executor, "warm", examples(lengths, seed=seed), loss, backward=True)
                forward(executor, "warm", examples(lengths, seed=seed), loss)
            executor.execute(OptimStep("warm", AdamParams(learning_rate=seed * 1e-3, grad_clip_norm=seed)))

    traffic(1)
    warm = executor.compiles
    add_adapter(executor, "second")
    traffic(2)
    assert executor.compiles == warm

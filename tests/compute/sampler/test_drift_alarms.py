"""Faults between sampler and trainer raise an alarm in the step in which they begin, and clean steps raise none.

DRIFT_STEPS is the number of clean steps before the faults.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.compute.conftest import SHAPE, Reference, add_adapter, random_model
from tests.manual_clock import ManualClock

from tinkerflow.backend.compute.executor import Executor
from tinkerflow.backend.journal import LossMeasured, Outcome, Trained
from tinkerflow.backend.settings import Settings
from tinkerflow.backend.spec.commands import (
    DropSnapshot,
    Example,
    ExportAdapter,
    Forward,
    ForwardResult,
    ImportAdapter,
    MoveSnapshot,
    OptimStep,
    PublishSnapshot,
    SampleRequest,
    SampleStep,
)
from tinkerflow.backend.spec.drift import drift_means
from tinkerflow.backend.spec.optimizers.adamw import AdamParams
from tinkerflow.backend.wire import drift_metrics
from tinkerflow.flows.run_report import RunReport

PROMPT, ANSWER, SAMPLES = 40, 100, 8
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 64, "norm_topk_prob": True}


class Loop:
    """RL steps on one adapter in bfloat16, and the events of the run's report with the default limits.

    The reward of an answer is the share of its tokens in the first half of the vocabulary.
    """

    def __init__(self, reference: Reference, data_dir: Path, *, routes: bool) -> None:
        self._reference, self._routes, self._number = reference, routes, 0
        self._trainer = self._executor()
        add_adapter(self._trainer, "a", 8)
        add_adapter(self._trainer, "other", 8, seed=5)
        self.events: list[str] = []
        self._report = RunReport(
            ManualClock(),
            lambda text, level: None,
            lambda event, **payload: self.events.append(event),
            Trained(),
            0,
            Settings(data_dir=data_dir).drift_limits,
        )

    def _executor(self, **changes: Any) -> Executor:
        return self._reference.executor(dtype="bfloat16", microbatch_tokens=2048, sample_slots=8, **changes)

    def step(self, fault: str = "") -> None:
        """Sample a group of answers, train on them, and report the step."""
        self._number += 1
        sampler = self._trainer
        if fault == "float8 KV":
            sampler = self._executor(kv_cache="float8")
            sampler.execute(ImportAdapter("a", self._trainer.execute(ExportAdapter("a", optimizer=False))))
        stale = fault == "stale KV"  # the keys and values of the prompt are another adapter's
        sampler.execute(PublishSnapshot("other" if stale or fault == "wrong adapter" else "a", "s"))
        if stale:
            sampler.execute(PublishSnapshot("a", "next"))
        data = self._sampled(sampler, then="next" if stale else "")
        sampler.execute(DropSnapshot("s"))
        trained = Forward("a", data, "importance_sampling")
        result = self._trainer.execute(trained)
        assert isinstance(result, ForwardResult)
        self._trainer.execute(OptimStep("a", AdamParams(learning_rate=1e-5)))
        means = drift_means({**result.metrics, **drift_metrics(trained, result)})
        loss = LossMeasured("a", 1, 1.0, 1.0, **means)
        self._report.answered(Outcome(f"r{self._number}", b"", "json", effects=(loss,)))

    def _sampled(self, sampler: Executor, then: str) -> tuple[Example, ...]:
        """A group of samples with advantages. then: the snapshot that decodes after the prompt was prefilled."""
        prompt_T = np.random.default_rng(self._number).integers(0, SHAPE["vocab_size"], PROMPT).astype(np.int32)
        request = SampleRequest(
            "r", "o", "s", prompt_T, SAMPLES, ANSWER, 1.0, -1, 1.0, seed=self._number, routes=self._routes
        )
        progress = sampler.execute(SampleStep(admit=(request,)))
        if then:
            sampler.execute(MoveSnapshot(then, "s"))
        while not progress.finished:
            progress = sampler.execute(SampleStep())
        group = progress.finished[0].sequences
        rewards_B = np.array([np.mean(one.tokens_T < SHAPE["vocab_size"] // 2) for one in group])
        advantages_B = (rewards_B - rewards_B.mean()) / (rewards_B.std() + 1e-6)
        return tuple(self._datum(prompt_T, one, a) for one, a in zip(group, advantages_B, strict=True))

    def _datum(self, prompt_T: np.ndarray, sequence: Any, advantage: float) -> Example:
        whole = np.concatenate([prompt_T, sequence.tokens_T])
        before = np.zeros(PROMPT - 1, np.float32)
        advantages_T = np.full(len(sequence.tokens_T), advantage, np.float32)
        columns = {"logprobs": sequence.logprobs_T, "advantages": advantages_T}
        inputs = {name: np.concatenate([before, one])[:, None] for name, one in columns.items()}
        routes_Tn = None
        if sequence.routes_Tn is not None:
            routes_Tn = np.full((len(whole) - 1, sequence.routes_Tn.shape[1]), -1, np.int16)
            routes_Tn[PROMPT - 1 :] = sequence.routes_Tn
        ones = np.ones((len(whole) - 1, 1), np.float32)
        return Example(whole[:-1], whole[1:, None], ones, inputs=inputs, routes_Tn=routes_Tn)


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_each_fault_raises_a_drift_alarm_in_its_step(family: str, tmp_path: Path) -> None:
    pytest.importorskip("torch").manual_seed(0)
    wide = {"hidden_size": 128, "num_hidden_layers": 4, "head_dim": 32, "initializer_range": 0.1}
    model = random_model(family, {**SHAPE, **wide, **EXPERTS} if family == "qwen3_moe" else {**SHAPE, **wide})
    model.save_pretrained(tmp_path / family)
    loop = Loop(Reference(tmp_path / family, model), tmp_path, routes=family == "qwen3_moe")
    for _ in range(int(os.environ.get("DRIFT_STEPS", "12"))):
        loop.step()
    assert loop.events == []
    for fault in ("float8 KV", "wrong adapter", "stale KV"):
        loop.step(fault)
        assert loop.events, fault
        loop.events.clear()
        loop.step()
        assert loop.events == []

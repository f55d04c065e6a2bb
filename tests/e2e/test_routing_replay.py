"""Tokens of `rl` train through the experts of their samples, also where sampling runs ahead, and after kills."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tinker
from family import make_family

from tinkerflow.backend.spec.drift import AGREEMENT
from tinkerflow.backend.store import Store
from tinkerflow.flows.pipelines.rl import RlRecipe
from tinkerflow.tasks.pipelines import Renderer, Row
from tinkerflow.tasks.pipelines.adapters import environment_maker
from tinkerflow.tasks.pipelines.rollouts import Rollouts
from tinkerflow.tasks.pipelines.versions import WeightVersions

STEPS = 3


class Watched:
    """A training client that keeps the metrics of its steps, and kills the workers before one and after another."""

    def __init__(self, client: tinker.TrainingClient, server: Any, *, disturbed: bool) -> None:
        self._client, self._server = client, server
        self._kills = {1: "before", 2: "after"} if disturbed else {}
        self.metrics: list[dict[str, float]] = []
        self._passes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def forward_backward(self, *args: Any) -> Any:
        kill = self._kills.get(self._passes, "")
        self._passes += 1
        if kill == "before":
            self._kill()  # samples are recorded, and nobody has trained them
        passed = self._client.forward_backward(*args)
        if kill == "after":
            self._kill()  # it is queued, being executed or done, and its optimizer step is not submitted

        async def answer() -> Any:
            output = await passed
            self.metrics.append(output.metrics)
            return output

        return answer()

    def _kill(self) -> None:
        while not (workers := self._server.workers()):
            time.sleep(0.05)
        for pid in workers:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.thorough
async def test_rl_that_samples_ahead_replays_its_experts_and_kills_change_no_bit(
    tmp_path: Path, start_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKERFLOW_ROUTING_REPLAY", "true")
    folder = make_family(tmp_path / "qwen3_moe", "qwen3_moe")
    (data_dir := tmp_path / "data").mkdir()
    with start_server(data_dir, "--base-model", str(folder), prefect="off") as server, server.client() as service:
        base = await service.create_sampling_client(base_model=str(folder))
        renderer = Renderer(base.get_tokenizer())
        make = environment_maker("tinkerflow.tasks.pipelines.rewards:holds_answer", "")
        row = Row(({"role": "user", "content": "Which colour is grass?"},), extra={"answer": "e"})

        async def trained(*, disturbed: bool) -> tuple[list[dict[str, float]], dict[str, np.ndarray]]:
            plain = await service.create_lora_training_client(str(folder), rank=8, seed=4)
            client: Any = Watched(plain, server, disturbed=disturbed)
            run: Any = SimpleNamespace(
                batch=lambda step, rows: [0], parameters=SimpleNamespace(model=SimpleNamespace(seed=3)), work_url=""
            )
            rollouts = Rollouts(renderer, make, group_size=3, max_tokens=6)
            recipe = RlRecipe(
                run, [row], rollouts, base, "kl_to_base", 0.1, loss="ppo", versions=WeightVersions(1)
            )  # a divergence is learnt even where all rewards are equal
            recipe.begin(0)
            for step in range(STEPS):
                await recipe.submit(client, step, tinker.AdamParams(learning_rate=1e-2))
            saved = await plain.save_state("done")
            return client.metrics, Store.open(f"file://{data_dir / 'store'}").load(saved.path)[0].weights

        metrics, weights = await trained(disturbed=True)
        undisturbed, expected = await trained(disturbed=False)
    assert len(metrics) == STEPS and all(one[AGREEMENT] > 0.5 for one in metrics), "samples of step 2 are a step old"
    assert metrics == undisturbed
    assert all(np.array_equal(weights[name], expected[name]) for name in weights | expected)

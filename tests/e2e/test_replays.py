"""`rl` trains with the experts and the supports of its samples, even if it samples ahead, and after kills."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tinker
from family import make_family

from tinkerflow.backend.spec.drift import AGREEMENT, SUPPORTED
from tinkerflow.backend.store import Store
from tinkerflow.flows.pipelines.rl import RlRecipe
from tinkerflow.tasks.pipelines import Renderer, Row
from tinkerflow.tasks.pipelines.adapters import environment_maker
from tinkerflow.tasks.pipelines.rollouts import Rollouts
from tinkerflow.tasks.pipelines.versions import WeightVersions

STEPS = 3


class FilteredRollouts(Rollouts):
    """Rollouts with top-k and top-p."""

    async def _answers(self, sampler: Any, *args: Any) -> Any:
        def sample(prompt: Any, count: int, params: tinker.SamplingParams) -> Any:
            return sampler.sample(prompt, count, params.model_copy(update={"top_k": 5, "top_p": 0.7}))

        filtered: Any = SimpleNamespace(sample=sample)
        return await super()._answers(filtered, *args)


class Watched:
    """A training client that stores the metrics of its steps.

    disturbed: kills the workers before one step, and the engine and the workers during the next.
    """

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
            self._server.kill()  # samples are recorded, but not trained on
        passed = self._client.forward_backward(*args)
        if kill == "after":
            # The pass is queued, running or done, and its optimizer step is not submitted yet.
            self._server.kill("engine")
            self._server.kill()

        async def answer() -> Any:
            output = await passed
            self.metrics.append(output.metrics)
            return output

        return answer()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("setting", "family", "kind", "metric", "least"),
    [
        # The samples of step 2 are a step old, so the current weights choose other experts for some tokens.
        pytest.param("TINKERFLOW_ROUTING_REPLAY", "qwen3_moe", Rollouts, AGREEMENT, 0.5, id="experts"),
        pytest.param("TINKERFLOW_SUPPORT_REPLAY", "qwen3", FilteredRollouts, SUPPORTED, 1.0, id="supports"),
    ],
)
async def test_rl_that_samples_ahead_replays_its_samples_and_kills_change_no_bit(
    setting: str,
    family: str,
    kind: type[Rollouts],
    metric: str,
    least: float,
    tmp_path: Path,
    start_server: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(setting, "true")
    folder = make_family(tmp_path / family, family)
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
            rollouts = kind(renderer, make, group_size=3, max_tokens=6)
            recipe = RlRecipe(
                run, [row], rollouts, base, "kl_to_base", 0.1, loss="ppo", versions=WeightVersions(1)
            )  # the divergence gives a gradient even if all rewards are equal
            recipe.begin(0)
            for step in range(STEPS):
                await recipe.submit(client, step, tinker.AdamParams(learning_rate=1e-2))
            saved = await plain.save_state("done")
            return client.metrics, Store.open(f"file://{data_dir / 'store'}").load(saved.path)[0].weights

        metrics, weights = await trained(disturbed=True)
        undisturbed, expected = await trained(disturbed=False)
    assert len(metrics) == STEPS and all(one[metric] >= least for one in metrics)
    assert metrics == undisturbed
    assert all(np.array_equal(weights[name], expected[name]) for name in weights | expected)

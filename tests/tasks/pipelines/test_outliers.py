"""Rows that spoil a step are left out, and steps that no row explains are kept. The model is a single number."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tinkerflow.backend.core.errors import ServerError
from tinkerflow.flows.pipelines.sft import SftParameters, SftRecipe
from tinkerflow.tasks.pipelines.connection import ServerClients
from tinkerflow.tasks.pipelines.control import Control
from tinkerflow.tasks.pipelines.outliers import OutlierWatch
from tinkerflow.tasks.pipelines.progress import RunProgress
from tinkerflow.tasks.pipelines.render import TokenizedExample
from tinkerflow.tasks.pipelines.trainer import Lineage, Trainer, train_segment

STEPS, SIZE = 16, 4


def done(result: Any) -> asyncio.Future[Any]:
    future = asyncio.get_running_loop().create_future()
    future.set_result(result)
    return future


class Model:
    """The gradient sums the rows' targets times their weights. A step adds rate times gradient to the weight."""

    def __init__(self, service: Service, weight: float, step: int) -> None:
        self.service, self.weight, self.step, self.gradient = service, weight, step, 0.0
        self.model_id = f"run-{len(service.models)}"
        service.models[self.model_id] = self
        service.live.add(self.model_id)
        assert len(service.live) == 1, "max_live_models"
        self.states = {step: weight}

    def forward_backward(self, data: list[Any], loss: str) -> Any:
        parts = [
            float(np.dot(d.loss_fn_inputs["target_tokens"].to_numpy(), d.loss_fn_inputs["weights"].to_numpy()))
            for d in data
        ]
        self.gradient += sum(parts)
        logprobs = SimpleNamespace(to_numpy=lambda: np.zeros(len(data[0].loss_fn_inputs["weights"].data)))
        return done(SimpleNamespace(metrics={"loss:sum": sum(parts)}, loss_fn_outputs=[{"logprobs": logprobs}]))

    def optim_step(self, params: Any) -> Any:
        norm, self.gradient = self.gradient, 0.0
        self.weight += params.learning_rate * norm
        self.step += 1
        self.states[self.step] = self.weight
        return done(SimpleNamespace(metrics={"grad_norm": norm} if np.isfinite(norm) else {}))

    async def save_state(self, name: str, **_: object) -> Any:
        if self.service.failing_saves:
            self.service.failing_saves -= 1
            raise ServerError("the store is full")
        return SimpleNamespace(path=f"tinker://{self.model_id}/weights/@{self.step}")


class Server(ServerClients):
    async def unload(self, model_id: str) -> None:
        await self.service.unload(model_id)


class Service:
    def __init__(self) -> None:
        self.models: dict[str, Model] = {}
        self.live: set[str] = set()
        self.failing_saves = 0

    async def unload(self, model_id: str) -> None:
        self.live.remove(model_id)

    async def create_lora_training_client(self, *_: object, **__: object) -> Model:
        return Model(self, 0.0, 0)

    async def create_training_client_from_state_with_optimizer(self, path: str, **_: object) -> Model:
        run, step = path.removeprefix("tinker://").split("/weights/@")
        return Model(self, self.models[run].states[int(step)], int(step))


def example(weight: float, target: int = 1) -> TokenizedExample:
    return TokenizedExample(np.array([0, target]), np.array([0, weight], np.float32))


async def trained(
    work: str,
    rows: list[float],
    name: str,
    left_out: set[int] | None = None,
    harmless: int = -1,
    failing_saves: int = 0,
) -> Any:
    """Train on rows with these weights, and return the final model, the segment and the artifacts.

    left_out: rows to leave out, without an outlier watch. harmless: a row whose gradient is always zero. failing_saves:
    how many attempts at the segment fail when its state is saved.
    """
    examples = [example(row, int(number != harmless)) for number, row in enumerate(rows)]
    values = {"steps": STEPS, "learning_rate": 1.0, "schedule": "constant", "segment_steps": STEPS}
    parameters = SftParameters.model_validate({"data": {"url": "rows.jsonl"}, "training": values})
    pages: list[str] = []
    service = Service()
    service.failing_saves = failing_saves

    async def nothing(*_: object) -> list[Any]:
        return []

    async def show(kind: str, page: str, title: str) -> None:
        pages.append(page)

    run: Any = SimpleNamespace(
        parameters=parameters,
        server=Server(service, None, "http://127.0.0.1:9"),  # type: ignore[arg-type]
        model=SimpleNamespace(name="tiny"),
        preview=nothing,
        artifacts=SimpleNamespace(text=show),
        batch=lambda step, size: [(step * SIZE + i) % size for i in range(SIZE)],
    )

    class Recipe(SftRecipe):
        def lessons(self, chosen: Any) -> list[TokenizedExample]:
            return [self.examples[row] for row in chosen]

    recipe = Recipe(run, examples, left_out=left_out or set())
    watch = OutlierWatch(run, recipe) if left_out is None else None
    trainer = Trainer(run, recipe, RunProgress(work, name, name), Lineage("sft", name, "data", "code"), watch)
    train = train_segment.with_options(retries=0).fn
    for _ in range(failing_saves):
        with pytest.raises(ServerError, match="the store is full"):
            await train(trainer, 1, STEPS, Control(), lambda _: None)
    segment = await train(trainer, 1, STEPS, Control(), lambda _: None)
    return await trainer.at(STEPS), segment, pages


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of a run's history always passes."""

    async def checked(watch: OutlierWatch, run_id: str) -> None:
        assert run_id.startswith("run-")

    monkeypatch.setattr(OutlierWatch, "check_history", checked)


async def test_worst_rows_are_left_out_and_the_rest_trains(work: str) -> None:
    rows = [1.0 + number % 3 / 4 for number in range(STEPS * SIZE)]
    rows[12 * SIZE + 1], rows[12 * SIZE + 3] = 90.0, 400.0  # both spoil step 13
    rows[14 * SIZE] = float("inf")  # step 15
    model, segment, pages = await trained(work, rows, "spoiled")
    spoiled = {12 * SIZE + 1, 12 * SIZE + 3, 14 * SIZE}
    assert {one.row for one in segment.left_out} == spoiled and [one.step for one in segment.left_out] == [13, 13, 15]
    assert [step.values["rows_left_out"] for step in segment.steps] == [0.0] * 12 + [2.0] * 2 + [3.0] * 2
    assert [step.step for step in segment.steps] == list(range(1, STEPS + 1))
    clean, other, _ = await trained(work, rows, "clean", left_out=set(spoiled))
    assert model.weight == clean.weight and other.left_out == []
    assert "## Step 13\n\nLeft out from now on: rows 49, 51 of the data." in pages[-1] and "## Step 15" in pages[-1]


async def test_a_retried_segment_leaves_out_the_same_rows(work: str) -> None:
    rows = [1.0 + number % 3 / 4 for number in range(STEPS * SIZE)]
    rows[12 * SIZE + 1] = 400.0
    model, segment, pages = await trained(work, rows, "retried", failing_saves=1)
    assert [(one.step, one.row) for one in segment.left_out] == [(13, 12 * SIZE + 1)]
    clean, _, _ = await trained(work, rows, "clean", left_out={12 * SIZE + 1})
    assert model.weight == clean.weight and pages[-1].count("## Step 13") == 1


async def test_harmless_row_that_looks_worse_than_the_culprit_is_restored(work: str) -> None:
    rows = [1.0 + number % 3 / 4 for number in range(STEPS * SIZE)]
    harmless, culprit = 12 * SIZE, 12 * SIZE + 2
    rows[harmless], rows[culprit] = 1e6, 90.0
    model, segment, pages = await trained(work, rows, "hidden", harmless=harmless)
    assert [(one.step, one.row) for one in segment.left_out] == [(13, culprit)]
    table = pages[-1].splitlines()
    assert [line.split("|")[1].strip() for line in table if line.startswith("| ")][2:4] == ["0", "2"], "worst first"
    clean, *_ = await trained(work, rows, "clean", left_out={culprit}, harmless=harmless)
    assert model.weight == clean.weight


async def test_step_with_only_large_rows_is_kept(work: str) -> None:
    rows = [1.0] * STEPS * SIZE
    rows[12 * SIZE : 13 * SIZE] = [40.0, 50.0, 60.0, 30.0]
    model, segment, pages = await trained(work, rows, "large")
    assert segment.left_out == [] and model.weight == sum(rows) and "No row was left out." in pages[0]


async def test_non_finite_step_is_named_without_a_watch(work: str) -> None:
    rows = [1.0] * STEPS * SIZE
    rows[20] = float("nan")
    with pytest.raises(ServerError, match="step 6: the norm of its gradients is not finite; `tinkerflow blame run-0"):
        await trained(work, rows, "broken", left_out={0})

"""Segments of a training: their steps, their records, and where training continues after a stop or a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from tinker import RequestFailedError
from tinker.types import RequestErrorCategory

from tinkerflow.backend.core.errors import UserError
from tinkerflow.flows.pipelines.fine_tuning import _export
from tinkerflow.flows.pipelines.sft import SftParameters
from tinkerflow.tasks.pipelines.control import Control
from tinkerflow.tasks.pipelines.progress import RunProgress, SegmentRecord, StepMetrics
from tinkerflow.tasks.pipelines.trainer import Lineage, Trainer, data_name, train_segment
from tinkerflow.tasks.pipelines.user_code import InterruptedCodeError


class Client:
    """A client of a model, which records the saves."""

    def __init__(self, origin: str, user_metadata: Mapping[str, str]) -> None:
        self.origin, self.user_metadata, self.model_id = origin, user_metadata, f"run on {origin}"
        self.saved: list[tuple[str, int | None]] = []

    async def save_state(self, name: str, ttl_seconds: int | None, user_metadata: Mapping[str, str]) -> Any:
        self.saved.append((name, ttl_seconds))
        assert user_metadata["step"] == str(int(name.removeprefix("step-")))
        return SimpleNamespace(path=f"tinker://{name}")

    async def save_weights_for_sampler(self, name: str, ttl_seconds: int, user_metadata: Mapping[str, str]) -> Any:
        self.saved.append((name, ttl_seconds))
        return SimpleNamespace(path=f"tinker://{name}")


class Service:
    """Creates clients that report their origin. Only one model may be live."""

    live = 0

    async def unload(self, model_id: str) -> None:
        self.live -= 1

    async def create_lora_training_client(self, base_model: str, user_metadata: Any, **_: object) -> Client:
        return self.made(base_model, user_metadata)

    async def create_training_client_from_state(self, path: str, user_metadata: Any) -> Client:
        return self.made(f"weights of {path}", user_metadata)

    async def create_training_client_from_state_with_optimizer(self, path: str, user_metadata: Any) -> Client:
        return self.made(path, user_metadata)

    def made(self, origin: str, user_metadata: Any) -> Client:
        self.live += 1
        assert self.live == 1, "max_live_models"
        return Client(origin, user_metadata)


class Recipe:
    """Steps that yield to the event loop. fails: the step that fails. most: the most steps at the same time."""

    def __init__(self, ahead: int = 0, fails: int = -1) -> None:
        self.ahead, self.fails = ahead, fails
        self.under_way = self.most = 0
        self.asked: list[int] = []
        self.begun: list[int] = []

    async def prepare(self, trainer: Trainer) -> None:
        """Do nothing."""

    def begin(self, step: int) -> None:
        self.begun.append(step)

    async def submit(self, client: Any, step: int, params: Any) -> Mapping[str, float]:
        self.asked.append(step)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        for _ in range(5):
            await asyncio.sleep(0)
        self.under_way -= 1
        if step == self.fails:
            raise RuntimeError("the step failed")
        return {"loss": float(step)}

    async def held_out(self, client: Any) -> Mapping[str, float]:
        return {"held_out_loss": 1.0}


def trainer(work: str, recipe: Recipe, **model: Any) -> Trainer:
    parameters = SftParameters.model_validate(
        {"data": {"url": "rows.jsonl"}, "model": model, "training": {"steps": 6, "segment_steps": 3}}
    )

    async def preview(client: Client) -> list[Any]:
        return []

    service = Service()
    run: Any = SimpleNamespace(
        parameters=parameters,
        server=SimpleNamespace(service=service, unload=service.unload),
        model=SimpleNamespace(name="tiny"),
        preview=preview,
    )
    lineage, settings = Lineage("sft", "run", "data", "code"), {"loss": "gspo"}
    return Trainer(run, recipe, RunProgress(work, "run", "plan"), lineage, settings=settings)


async def test_segments_are_made_recorded_and_continued_by_another_process(work: str) -> None:
    shown: list[StepMetrics] = []
    first = trainer(work, Recipe())
    segment = await train_segment.fn(first, 1, 3, Control(), shown.append)
    assert segment is not None
    assert (segment.first_step, segment.last_step, segment.state) == (1, 3, "tinker://step-00000003")
    assert [step.values["loss"] for step in segment.steps] == [0.0, 1.0, 2.0]
    assert segment.steps == shown and segment.held_out == {"held_out_loss": 1.0}
    live: Any = await first.at(3)
    assert live.user_metadata["loss"] == "gspo" and live.user_metadata["planned_steps"] == "6"
    assert live.user_metadata["training.segment_steps"] == "3", "in runs of every max_staleness, so that they compare"
    assert live.origin == "tiny" and live.saved == [("step-00000003", 7 * 24 * 3600)]
    second = trainer(work, Recipe())
    client: Any = await second.at(3)
    assert client.origin == "tinker://step-00000003"
    await train_segment.fn(second, 4, 6, Control(), shown.append)
    assert client.saved == [("step-00000006", 7 * 24 * 3600)]
    assert [(one.first_step, one.last_step) for one in second.progress.segments()] == [(1, 3), (4, 6)]


async def test_run_starts_from_other_weights(work: str) -> None:
    client: Any = await trainer(work, Recipe(), start_from="tinker://a/weights/b").at(0)
    assert client.origin == "weights of tinker://a/weights/b"


@pytest.mark.parametrize("ahead", [0, 1, 2])
async def test_configured_number_of_steps_is_submitted_ahead(work: str, ahead: int) -> None:
    recipe = Recipe(ahead)
    segment = await train_segment.fn(trainer(work, recipe), 1, 6, Control(), lambda _: None)
    assert segment is not None and [step.step for step in segment.steps] == [1, 2, 3, 4, 5, 6]
    assert recipe.most == ahead + 1
    assert recipe.begun == [0]


async def test_stop_finishes_the_current_step_without_a_measurement(work: str) -> None:
    control = Control()
    stopped = await train_segment.fn(trainer(work, Recipe()), 1, 6, control, lambda made: control.stop())
    assert stopped is not None
    assert (stopped.last_step, stopped.held_out) == (1, {})
    assert await train_segment.fn(trainer(work, Recipe()), 2, 6, control, lambda _: None) is None


@pytest.mark.parametrize("interrupted", [False, True])
async def test_stop_ends_a_measurement_and_records_its_segment(work: str, interrupted: bool) -> None:
    control, recipe, ended = Control(), Recipe(), asyncio.Event()

    async def held_out(client: Any) -> Mapping[str, float]:
        asyncio.get_running_loop().call_soon(control.stop)
        if interrupted:
            raise InterruptedCodeError("its code was interrupted")
        try:
            return await asyncio.Event().wait()  # type: ignore[return-value]
        finally:
            ended.set()

    recipe.held_out = held_out  # type: ignore[method-assign]
    stopped = await train_segment.fn(trainer(work, recipe), 1, 3, control, lambda _: None)
    assert stopped is not None and (stopped.last_step, stopped.held_out) == (3, {})
    assert trainer(work, Recipe()).progress.segments() == [stopped] and (interrupted or ended.is_set())


async def test_failed_measurement_fails_the_segment(work: str) -> None:
    recipe = Recipe()

    async def held_out(client: Any) -> Mapping[str, float]:
        raise UserError("reward a:b: no")

    recipe.held_out = held_out  # type: ignore[method-assign]
    with pytest.raises(UserError, match="reward a:b: no"):
        await train_segment.fn(trainer(work, recipe), 1, 3, Control(), lambda _: None)
    assert trainer(work, Recipe()).progress.segments() == []


async def test_last_checkpoints_expire_unless_their_run_is_finished(work: str) -> None:
    """A process that is killed before the record, or during the export, leaves checkpoints that no one knows."""
    failing, week = trainer(work, Recipe()), 7 * 24 * 3600
    lifetimes: dict[str, int | None] = {}

    def killed(segment: SegmentRecord) -> None:
        raise UserError("the process was killed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(failing.progress, "add", killed)
        live: Any = await failing.at(0)
        with pytest.raises(UserError, match="the process was killed"):
            await train_segment.fn(failing, 1, 6, Control(), lambda _: None)
    assert live.saved == [("step-00000006", week)]

    async def set_ttl(path: str, seconds: int | None) -> None:
        lifetimes[path] = seconds

    finished = trainer(work, Recipe())
    server: Any = finished.run.server
    server.rest = SimpleNamespace(set_checkpoint_ttl_from_tinker_path=set_ttl)
    segment = await train_segment.fn(finished, 1, 6, Control(), lambda _: None)
    assert segment is not None and await _export(finished, segment) == "tinker://final"
    live = await finished.at(6)
    assert live.saved == [("step-00000006", week), ("final", week)]
    assert lifetimes == {segment.state: None, "tinker://final": None}


async def test_failure_leaves_neither_record_nor_live_model(work: str) -> None:
    recipe = Recipe(ahead=1, fails=1)
    failing = trainer(work, recipe)
    before = await failing.at(0)
    with pytest.raises(RuntimeError, match="the step failed"):
        await train_segment.fn(failing, 1, 3, Control(), lambda _: None)
    service: Any = failing.run.server.service
    assert recipe.under_way == 0 and failing.progress.segments() == [] and service.live == 0
    assert await failing.at(0) is not before


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("/home/me/capitals.csv", "capitals.csv"),
        ("gs://bucket/folder/", "folder"),
        ("https://host/rows.jsonl?signature=secret", "rows.jsonl"),
        ("journal://?rated=true", "journal"),
    ],
)
def test_training_data_has_the_name_of_its_file(url: str, name: str) -> None:
    assert data_name(url, "rendered/6f1b.npz") == f"{name} 6f1b"
    assert data_name(url, "6f1b") == f"{name} 6f1b"


@pytest.mark.parametrize(
    ("error", "may_help"),
    [
        (UserError("data: must be rows"), False),
        (RequestFailedError("nothing is saved (max_stored_bytes)", "1", RequestErrorCategory.User), False),
        (RequestFailedError("the group was lost", "1", RequestErrorCategory.Server), True),
        (ConnectionError("away"), True),
    ],
)
def test_only_retryable_errors_are_retried(error: Exception, may_help: bool) -> None:
    condition: Any = train_segment.retry_condition_fn
    assert condition(train_segment, None, SimpleNamespace(data=error)) == may_help

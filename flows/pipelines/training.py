"""What all training pipelines share: the steps before the first segment, the segments, and what is shown of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING

import orjson
from prefect import tags
from prefect.runtime import flow_run
from pydantic import BaseModel

from tinkerflow.tasks.pipelines.board import Board, cell
from tinkerflow.tasks.pipelines.control import controlled
from tinkerflow.tasks.pipelines.parameters import PipelineParameters
from tinkerflow.tasks.pipelines.progress import Progress, Sample, Segment, StepMetrics
from tinkerflow.tasks.pipelines.trainer import Lineage, Recipe, Trainer, train_segment
from tinkerflow.tasks.pipelines.work import digest

if TYPE_CHECKING:
    import tinker


class Trained(BaseModel):
    """What a training pipeline made.

    data: digest of what it learnt from. state: to train on from; weights: to sample from. Both stay until deleted.

    first, last: the metrics of the first and the last tenth of the steps, means. held_out: after the last segment.
    """

    run: str
    data: str
    state: str
    weights: str
    steps: int
    first: dict[str, float]
    last: dict[str, float]
    held_out: dict[str, float]
    samples: list[Sample]


@dataclass(frozen=True)
class Setting:
    """What a training pipeline knows before its first step. data: digest of what it learns from."""

    pipeline: str
    parameters: PipelineParameters
    service: tinker.ServiceClient
    base_model: str
    work_url: str
    data: str
    board: Board


async def train(setting: Setting, recipe: Recipe) -> Trained:
    """All steps, in segments; those that an earlier run of the same name has made are not made again.

    Raises StoppedError when somebody asks to stop: what is done is recorded and saved.
    """
    parameters = setting.parameters
    run, training = run_name(parameters), parameters.training
    progress = Progress(setting.work_url, run, _plan(setting))
    code = f"tinkerflow {version('tinkerflow')}"
    lineage = Lineage(setting.pipeline, run, setting.data, code, parameters.model.start_from)
    trainer = Trainer(setting.service, setting.base_model, parameters.model, training, recipe, progress, lineage)
    segments = progress.segments()
    if _done(segments) < training.steps:
        await recipe.prepare(trainer)
    async with controlled() as control, _Live(setting.board, training.steps) as live:
        while (done := _done(segments)) < training.steps:
            last = min(done + training.segment_steps, training.steps)
            with tags(*flow_run.tags or ()):  # so that limits on tags are for turns of one segment
                segment = await train_segment(trainer, done + 1, last, control, live.add)
            if segment is not None:
                segments.append(segment)
                await _show(setting.board, segments, lineage)
            if control.stopping:
                control.stopped(f"stopped after step {_done(segments)}")
        weights = await _export(trainer, training.steps)
    await _show(setting.board, segments, lineage, weights)
    steps = [one for segment in segments for one in segment.steps]
    tenth = max(1, len(steps) // 10)
    return Trained(
        run=run,
        data=setting.data,
        state=segments[-1].state,
        weights=weights,
        steps=training.steps,
        first=_mean(steps[:tenth]),
        last=_mean(steps[-tenth:]),
        held_out=segments[-1].held_out,
        samples=segments[-1].samples,
    )


def _done(segments: list[Segment]) -> int:
    """Steps that are made and recorded."""
    return segments[-1].last_step if segments else 0


def _mean(steps: list[StepMetrics]) -> dict[str, float]:
    return {name: sum(one.values[name] for one in steps) / len(steps) for name in steps[0].values}


def run_name(parameters: PipelineParameters) -> str:
    """The name that retries of this run share: what the parameters say, or the flow run's id."""
    return parameters.resume or str(flow_run.id or "")


async def _export(trainer: Trainer, step: int) -> str:
    """The weights to sample from, their path; saved once more when a run that was finished is asked again."""
    client = await trainer.at(step)
    saved = await client.save_weights_for_sampler("final", user_metadata=trainer.lineage.metadata(step))
    return str(saved.path)


def _plan(setting: Setting) -> str:
    """A digest of all that decides the outcome; not of where the work is kept, or what is looked at on the way."""
    decides = setting.parameters.model_dump(
        mode="json", exclude={"name", "connection", "work", "resume", "samples", "data", "held_out"}
    )
    for name in ("segment_steps", "state_days"):
        decides["training"].pop(name)
    return digest(
        setting.pipeline, setting.base_model, setting.data, orjson.dumps(decides, option=orjson.OPT_SORT_KEYS)
    )


async def _show(board: Board, segments: list[Segment], lineage: Lineage, weights: str = "") -> None:
    steps = [one for segment in segments for one in segment.steps]
    held_out: dict[str, list[tuple[float, float]]] = {}
    for segment in segments:
        for name, value in segment.held_out.items():
            held_out.setdefault(name, []).append((segment.last_step, value))
    await board.curves(steps, held_out)
    await board.samples(segments)
    await board.text("checkpoints", checkpoints_page(segments, lineage, weights), "checkpoints and their lineage")


def checkpoints_page(segments: list[Segment], lineage: Lineage, weights: str) -> str:
    """Which checkpoints there are, and where they come from, as Markdown."""
    facts = {
        "pipeline": lineage.pipeline,
        "run": f"`{lineage.run}`",
        "data digest": f"`{lineage.data}`",
        "parent": f"`{lineage.parent}`" if lineage.parent else "the base model",
        "code": lineage.code,
    }
    lines = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items()), ""]
    lines += ["| step | training state | held out |", "|---|---|---|"]
    for segment in segments:
        values = ", ".join(f"{name} {value:.4g}" for name, value in segment.held_out.items())
        lines.append(f"| {segment.last_step} | `{segment.state}` | {cell(values)} |")
    if weights:
        lines += ["", f"Weights to sample from: `{weights}`"]
    return "\n".join(lines)


class _Live:
    """Takes steps from inside a segment to the board, without making the segment wait."""

    def __init__(self, board: Board, steps: int) -> None:
        self._board = board
        self._steps = steps
        self._queue: asyncio.Queue[StepMetrics | None] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> _Live:
        self._task = asyncio.create_task(self._work())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._queue.put_nowait(None)
        await self._task

    @property
    def add(self) -> Callable[[StepMetrics], None]:
        return self._queue.put_nowait

    async def _work(self) -> None:
        while (made := await self._queue.get()) is not None:
            await self._board.progress(made.step, self._steps, made.values)

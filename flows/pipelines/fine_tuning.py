"""The common parts of fine-tuning pipelines: training in segments, showing the progress, and stopping on request.

A pipeline's flow prepares a run, makes its recipe from it, and trains:

    async with prepare(parameters) as run:
        key, examples = run.examples("data")
        return await train(run, key, MyRecipe(run, examples))
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import wraps
from importlib.metadata import version
from typing import Any, ParamSpec, TypeVar

import orjson
from prefect import tags
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Cancelled
from pydantic import BaseModel

from tinkerflow.backend.core.errors import TinkerflowError
from tinkerflow.backend.spec.run_metadata import DEFAULTS, Outcome
from tinkerflow.tasks.pipelines.artifacts import RunArtifacts, begin_phase, cell, log_line
from tinkerflow.tasks.pipelines.control import StoppedError, controlled, stoppable
from tinkerflow.tasks.pipelines.outliers import OutlierWatch
from tinkerflow.tasks.pipelines.parameters import PipelineParameters
from tinkerflow.tasks.pipelines.preparation import PreparedRun, run_name
from tinkerflow.tasks.pipelines.progress import (
    LeftOutRow,
    RecordedValues,
    RunProgress,
    Sample,
    SegmentRecord,
    StepMetrics,
)
from tinkerflow.tasks.pipelines.reported import ReportedMetrics
from tinkerflow.tasks.pipelines.tracked import tracked
from tinkerflow.tasks.pipelines.trainer import Lineage, Recipe, Trainer, data_name, train_segment
from tinkerflow.tasks.pipelines.work import digest

# A resumed run may have other values of these.
_LIMITS = {"environment_seconds", "environment_retries", "margin", "approval_hours"}
_LISTED = 100  # segments on the page of checkpoints
_SHOWN = 200  # characters of a setting on a training run's page
P = ParamSpec("P")
T = TypeVar("T")


class TrainingResult(BaseModel):
    """The result of a training pipeline.

    run: the name that retries share. training_run: the id of the newest training run. data: name and digest of the
    training data. rows: how many rows are used and left out, with the first reason. state: the checkpoint to continue
    training from. weights: the checkpoint to sample from. Both are kept until deleted. steps: optimizer steps made.

    first, last: mean metrics of the first and the last tenth of the steps. held_out: metrics after the last segment.
    samples: the answers after the last segment. left_out: rows that spoiled a step, if the run leaves out such rows.
    left_out_episodes: how many conversations `rl` left out of their groups in all steps; None = none.
    """

    run: str
    training_run: str = ""
    data: str
    rows: str = ""
    state: str
    weights: str
    steps: int
    first: RecordedValues
    last: RecordedValues
    held_out: RecordedValues
    samples: list[Sample]
    left_out: list[LeftOutRow] = []
    left_out_episodes: int | None = None


def cancellable(work: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[Any, Any, T | State[None]]]:
    """Make a flow's function return Prefect's state Cancelled when it raises StoppedError, or is asked to stop.

    Prefect would treat a signal that raises in the function as a crash. The run's logs contain the reason, also for any
    other error.
    """

    @wraps(work)
    async def call(*args: P.args, **kwargs: P.kwargs) -> T | State[None]:
        try:
            async with stoppable("stopped on request, while no step was running"):
                return await work(*args, **kwargs)
        except StoppedError as stopped:
            log_line(str(stopped))
            return Cancelled(message=str(stopped))
        except Exception as error:
            log_line(f"failed: {_reason(error)}", logging.ERROR)
            raise

    # Prefect resolves names of types in the wrapper's module, so they are resolved here in the flow's own module.
    call.__signature__ = inspect.signature(work, eval_str=True)  # type: ignore[attr-defined]
    return call


async def train(run: PreparedRun, data: str, recipe: Recipe, watch: OutlierWatch | None = None) -> TrainingResult:
    """Make all steps in segments, except the steps that an earlier run of the same name has made.

    data: names the training data in the plan. watch: leaves out rows that spoil a step. StoppedError: a stop was
    requested; all steps made so far are recorded and saved.
    """
    parameters, name = run.parameters, run_name(run.parameters)
    training = parameters.training
    decisive = decisive_parameters(parameters)
    plan = digest(run.pipeline, run.model.name, data, orjson.dumps(decisive, option=orjson.OPT_SORT_KEYS))
    progress = RunProgress(run.work_url, name, plan, {"base model": run.model.name, "data": data} | flat(decisive))
    shown = data_name(parameters.data.url, data)
    lineage = Lineage(run.pipeline, name, shown, f"tinkerflow {version('tinkerflow')}", parameters.model.start_from)
    chosen = flat(run.parameters.model_dump(mode="json", exclude_defaults=True))
    shown_values = {name: chosen.get(name, value) for name, value in flat(decisive).items()}
    settings = {name: str(value)[:_SHOWN] for name, value in shown_values.items() if value not in (None, "", [])}
    settings[DEFAULTS] = " ".join(sorted(settings.keys() - chosen.keys()))
    settings["rows"] = run.used_rows[:_SHOWN]
    trainer = Trainer(run, recipe, progress, lineage, watch, settings)
    segments = progress.segments()
    async with (
        _prepared(trainer, segments),
        controlled() as control,
        _outcome_reported(trainer),
        tracked(run, name, segments) as tracked_steps,
        _live_progress(trainer, segments) as show_progress,
    ):

        def show_step(made: StepMetrics) -> None:
            show_progress(made)
            tracked_steps.add([made])

        if (done := _done(segments)) < training.steps:
            begin_phase(f"step {done + 1} of {training.steps}: new shapes are compiled first")
        while (done := _done(segments)) < training.steps:
            last = min(done + training.segment_steps, training.steps)
            with tags(*flow_run.tags or ()):  # a limit on a tag then lets runs alternate after each segment
                segment = await train_segment(trainer, done + 1, last, control, show_step)
            if segment is not None:
                log_line(_segment_line(segment))
                segments.append(segment)
                tracked_steps.add_segment(segment)
                await _show(run.artifacts, segments, lineage)
            if control.stopping:
                control.stopped(_what_is_saved(segments))
        weights = await _export(trainer, segments[-1])
    await _show(run.artifacts, segments, lineage, weights)
    steps = [step for segment in segments for step in segment.steps]
    tenth = max(1, len(steps) // 10)
    names = dict.fromkeys(name for step in reversed(steps) for name in step.values)  # recorded steps are sorted
    return TrainingResult(
        run=name,
        training_run=trainer.newest_run,
        data=shown,
        rows=run.used_rows,
        state=segments[-1].state,
        weights=weights,
        steps=training.steps,
        first=_mean(steps[:tenth], names),
        last=_mean(steps[-tenth:], names),
        held_out=segments[-1].held_out,
        samples=segments[-1].samples,
        left_out=[one for segment in segments for one in segment.left_out],
        left_out_episodes=int(sum(step.values.get("left_out_episodes", 0) for step in steps)) or None,
    )


def checkpoints_page(segments: list[SegmentRecord], lineage: Lineage, weights: str) -> str:
    """The checkpoints of a run and their lineage, as Markdown. weights: path to sample from, empty if not yet saved."""
    facts = {
        "pipeline": lineage.pipeline,
        "run": f"`{lineage.run}`",
        "data": f"`{lineage.data}`",
        "parent": f"`{lineage.parent}`" if lineage.parent else "the base model",
        "code": lineage.code,
    }
    lines = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items()), ""]
    lines += ["| step | training state | held out |", "|---|---|---|"]
    if earlier := len(segments[:-_LISTED]):
        lines.append(f"| and {earlier} before | | |")
    for segment in segments[-_LISTED:]:
        values = ", ".join(f"{name} {value:.4g}" for name, value in segment.held_out.items())
        lines.append(f"| {segment.last_step} | `{segment.state}` | {cell(values)} |")
    left_out = ", ".join(f"{one.row} (step {one.step})" for segment in segments for one in segment.left_out)
    if left_out:
        lines += ["", f"Rows that were left out because they spoiled a step: {left_out}"]
    if weights:
        lines += ["", f"Weights to sample from: `{weights}`"]
    return "\n".join(lines)


def _done(segments: Sequence[SegmentRecord]) -> int:
    """How many steps are made and recorded."""
    return segments[-1].last_step if segments else 0


def _segment_line(segment: SegmentRecord) -> str:
    values = "".join(f", {name} {value:.4g}" for name, value in segment.held_out.items())
    return f"step {segment.last_step} is saved as {segment.state}{values}"


def _what_is_saved(segments: list[SegmentRecord]) -> str:
    if not segments:
        return "stopped after step 0: nothing is saved"
    return f"stopped after step {segments[-1].last_step}, which is saved as {segments[-1].state}"


def _mean(steps: Sequence[StepMetrics], names: Iterable[str]) -> dict[str, float]:
    """The mean of each value, in the order of `names`. Steps without a count such as `left_out_episodes` count as 0."""
    found = [name for name in names if any(name in step.values for step in steps)]
    return {name: sum(step.values.get(name, 0.0) for step in steps) / len(steps) for name in found}


async def _export(trainer: Trainer, last: SegmentRecord) -> str:
    """Save the weights to sample from, and keep them and the last state. Returns the path of the weights.

    Weights that a killed process saved expire. Resuming a finished run saves them once more.
    """
    client, lifetime = await trainer.at(last.last_step), trainer.training.state_seconds
    origin = trainer.lineage.metadata(last.last_step)
    saved = await client.save_weights_for_sampler("final", ttl_seconds=lifetime, user_metadata=origin)
    for path in (last.state, str(saved.path)):
        await trainer.run.server.rest.set_checkpoint_ttl_from_tinker_path(path, None)
    return str(saved.path)


def decisive_parameters(parameters: PipelineParameters) -> dict[str, Any]:
    """The parameters that affect the outcome, without names, places and settings that only observe the run."""
    decides: dict[str, Any] = parameters.model_dump(
        mode="json",
        exclude={"name", "connection", "work", "resume", "samples", "data", "held_out", "tracking", "history"},
    )
    decides["training"].pop("state_days")
    for name, default in (("on_outlier", "report"), ("curriculum", None), ("trust_region", 0.0)):
        if decides.get(name) == default:
            decides.pop(name, None)  # as in releases without this parameter
    for name in _LIMITS & decides.keys():  # their defaults, as in plans of releases whose runs could not change them
        decides[name] = type(parameters).model_fields[name].default
    if "teacher" in decides:
        decides["teacher"].pop("connection")
    if not decides.get("max_staleness"):
        decides["training"].pop("segment_steps")  # otherwise a segment begins with fresh samples
    return decides


def flat(values: Mapping[str, Any], outer: str = "") -> dict[str, object]:
    """Nested values by their dotted names, such as `training.steps`."""
    found: dict[str, object] = {}
    for name, value in values.items():
        found |= flat(value, f"{outer}{name}.") if isinstance(value, dict) else {outer + name: value}
    return found


def _reason(error: Exception) -> str:
    """An error as people read it."""
    return error.message if isinstance(error, TinkerflowError) else f"{type(error).__name__}: {error}"


@asynccontextmanager
async def _prepared(trainer: Trainer, segments: Sequence[SegmentRecord]) -> AsyncIterator[None]:
    """Prepare the recipe if steps are to be made. No model is live after the block, unless it is cancelled."""
    try:
        if _done(segments) < trainer.training.steps:
            await trainer.recipe.prepare(trainer)
        yield
    except Exception:
        await trainer.release()
        raise
    await trainer.release()


@asynccontextmanager
async def _outcome_reported(trainer: Trainer) -> AsyncIterator[None]:
    """Show on the page of the newest training run how the block ended, and why."""

    async def report(outcome: Outcome, reason: str = "") -> None:
        if trainer.newest_run:
            reported = ReportedMetrics(trainer.run.server)
            await reported.end(trainer.newest_run, outcome, reason)
            await reported.close()

    try:
        yield
    except StoppedError as stopped:
        await report("cancelled", str(stopped))
        raise
    except Exception as error:
        await report("failed", _reason(error))
        raise
    await report("completed")


async def _show(artifacts: RunArtifacts, segments: list[SegmentRecord], lineage: Lineage, weights: str = "") -> None:
    steps = [step for segment in segments for step in segment.steps]
    held_out: dict[str, list[tuple[float, float]]] = {}
    for segment in segments:
        for name, value in segment.held_out.items():
            held_out.setdefault(name, []).append((segment.last_step, value))
    await artifacts.curves(steps, held_out)
    await artifacts.samples(segments)
    await artifacts.text("checkpoints", checkpoints_page(segments, lineage, weights), "checkpoints and their lineage")


@asynccontextmanager
async def _live_progress(
    trainer: Trainer, segments: Sequence[SegmentRecord]
) -> AsyncIterator[Callable[[StepMetrics], None]]:
    """Yields a function that shows a step during a segment, without waiting for Prefect or the server.

    Steps go to the artifact `progress`, and to the page of the training run. A training run that continues another one
    also gets the values of the recorded segments.
    """
    steps, artifacts, reported = trainer.training.steps, trainer.run.artifacts, ReportedMetrics(trainer.run.server)
    queue: asyncio.Queue[tuple[str, StepMetrics] | None] = asyncio.Queue()
    sent: dict[str, int] = {}  # by training run, how many segments were sent

    async def report(run_id: str, made: Sequence[StepMetrics]) -> None:
        if run_id not in sent:
            log_line(f"training run {run_id}: {trainer.run.server.url}/training_runs/{run_id}")
        values = {step.step: step.values for step in made}
        for segment in segments[sent.get(run_id, 0) :]:
            values |= {step.step: step.values for step in segment.steps}
            values[segment.last_step] = values[segment.last_step] | segment.held_out
        sent[run_id] = len(segments)
        await reported.send(run_id, values)

    async def show() -> None:
        last = ""
        while (one := await queue.get()) is not None:
            last, made = one
            await artifacts.progress(made.step, steps, made.values)
            await report(last, [made])
        if last:
            await report(last, [])

    showing = asyncio.create_task(show())
    try:
        yield lambda made: queue.put_nowait((trainer.run_id, made))
    finally:
        queue.put_nowait(None)
        await showing
        await reported.close()

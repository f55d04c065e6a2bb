"""The pipeline `sweep`: a fine-tune for each point of a grid, and an evaluation that finds the best."""

from __future__ import annotations

import asyncio
import itertools
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from prefect import flow
from prefect.client.schemas.objects import State
from pydantic import BaseModel

from tinkerflow.backend.core.errors import ServerError, UserError
from tinkerflow.flows.pipelines.evaluate import BASE, figures, on_held_out, refuse_unscorable, score_all
from tinkerflow.flows.pipelines.fine_tuning import TrainingResult, cancellable, decisive_parameters, flat
from tinkerflow.flows.pipelines.registry import Pipeline
from tinkerflow.flows.pipelines.sft import sft
from tinkerflow.tasks.pipelines.artifacts import RunArtifacts
from tinkerflow.tasks.pipelines.control import controlled
from tinkerflow.tasks.pipelines.parameters import Metric, SftParameters, SweepParameters
from tinkerflow.tasks.pipelines.preparation import run_name, share_data
from tinkerflow.tasks.pipelines.progress import refuse_changes
from tinkerflow.tasks.pipelines.scoring import Scores
from tinkerflow.tasks.pipelines.work import create_json, digest, open_work, read_json

_SECTIONS = {"rank": "model", "seed": "model"}  # the other parameters of a grid belong to `training`
_LONGEST_RUN = 128 - 17  # characters of a run's name before the names of its points are shortened
_LOGARITHMIC = {"learning_rate"}


@dataclass(frozen=True)
class Point:
    """One combination of a grid's values.

    values: name -> value of each parameter that the grid lists. axis, x: the first parameter that varies and this
    point's value of it, as its logarithm for learning rates; line: the other values as a text. A picture of the sweep
    draws one line for each `line`, over `x`.
    """

    values: Mapping[str, Any]
    axis: str
    x: float
    line: str

    @property
    def label(self) -> str:
        """The values for people, as in `learning_rate 0.001, rank 8`."""
        return ", ".join(f"{name} {_exact(value)}" for name, value in self.values.items())

    @property
    def slug(self) -> str:
        """The values as a part of a run's name: lower-case letters, digits and dashes."""
        text = "-".join(map(_exact, self.values.values()))
        return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")

    @property
    def changes(self) -> dict[str, dict[str, Any]]:
        """Section of the fine-tune's parameters -> name -> value."""
        changes: dict[str, dict[str, Any]] = {}
        for name, value in self.values.items():
            changes.setdefault(_SECTIONS.get(name, "training"), {})[name] = value
        return changes


def points(parameters: SweepParameters) -> list[Point]:
    """All combinations of the grid, each once."""
    lists: dict[str, list[Any]] = {
        name: list(dict.fromkeys(values)) for name, values in parameters.grid.model_dump().items() if values
    }
    axis = next((name for name, values in lists.items() if len(values) > 1), next(iter(lists)))
    found = []
    for combination in itertools.product(*lists.values()):
        values = dict(zip(lists, combination, strict=True))
        others = [f"{name} {_exact(value)}" for name, value in values.items() if name != axis and len(lists[name]) > 1]
        x = math.log10(values[axis]) if axis in _LOGARITHMIC else float(values[axis])
        shown = f"log10({axis})" if axis in _LOGARITHMIC else axis
        found.append(Point(values, shown, x, ", ".join(others) or "all"))
    return found


def _exact(value: float) -> str:
    """A value as a short text that differs from the texts of all other values."""
    text = f"{value:g}"
    return text if float(text) == value else repr(value)


class SweepResult(BaseModel):
    """The label, weights and state of a sweep's best point, and the scores of each label and of the base model."""

    best: str
    weights: str
    state: str
    scores: dict[str, Scores]


@flow(name="sweep", flow_run_name="sweep {parameters.name}")
@cancellable
async def sweep(parameters: SweepParameters) -> SweepResult:
    """Fine-tune with every combination of the grid's values, score all on the held-out rows, and report the best.

    Each point is a separate flow run `sft`. A retry, or a run with the same `resume`, trains only unfinished points.
    UserError: finished points were trained with other parameters or data, or no evaluation accepts the reward or the
    held-out rows.
    """
    refuse_unscorable(parameters)
    work_url = parameters.work_url
    grid = points(parameters)
    places = asyncio.Semaphore(parameters.at_once)

    async with controlled() as control:

        async def train(point: Point) -> TrainingResult | None:
            share_data(run_name(parameters))
            async with places:
                return await _train(parameters, point, work_url) if await control.may_go_on() else None

        results = await asyncio.gather(*(train(point) for point in grid), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result  # only after the other points have ended, so that none is left running
        if control.stopping:
            control.stopped(f"stopped after {sum(result is not None for result in results)} of {len(grid)} points")
    trained = {
        point.label: result for point, result in zip(grid, results, strict=True) if isinstance(result, TrainingResult)
    }
    if not trained:
        raise ServerError("sweep: every point was cancelled")
    if len(data := sorted({result.data for result in trained.values()})) > 1:
        rule = f"its points were trained on different data ({', '.join(data)}); give it another name"
        raise UserError(f"resume {run_name(parameters)!r}: {rule}")
    candidates = {label: result.weights for label, result in trained.items()}
    scores = await score_all(on_held_out(parameters), candidates | {BASE: ""})
    best = min(trained, key=lambda label: scores[label].worse(parameters.metric))
    await _show(RunArtifacts(f"sweep-{parameters.name}"), grid, trained, scores, best)
    return SweepResult(best=best, weights=trained[best].weights, state=trained[best].state, scores=scores)


async def _train(parameters: SweepParameters, point: Point, work_url: str) -> TrainingResult | None:
    """Fine-tune a point, unless an earlier run of this sweep recorded its result. Returns None if it was stopped.

    UserError: the point was trained with other parameters.
    """
    values = parameters.model_dump(include=set(SftParameters.model_fields))
    if parameters.judge:  # only the judge uses the rows' further fields
        for name in ("data", "held_out"):
            values[name]["ignore"] = [*values[name]["ignore"], "*"]
    values |= {"name": f"{parameters.name}-{point.slug}"[:40].rstrip("-"), "work": work_url}
    for section, changes in point.changes.items():
        values[section] |= changes
    plan = digest(str(sorted(parameters.model_dump(mode="json", include={"data", "held_out"}).items())), point.label)
    run = run_name(parameters)
    unique = run if len(run) <= _LONGEST_RUN else f"{run[: _LONGEST_RUN - 17]}-{digest(run)[:16]}"
    values["resume"] = f"{unique}-{plan[:16]}"
    key = f"progress/{run}/points/{plan}.json"
    work = open_work(work_url)
    wanted = SftParameters.model_validate(values)
    if (done := read_json(work, key)) is not None:
        refuse_changes(work_url, wanted.resume, flat(decisive_parameters(wanted)), run)
        return TrainingResult.model_validate(done)
    call: Callable[..., Awaitable[State[Any]]] = sft
    while True:
        state = await call(wanted, return_state=True)
        if state.is_cancelled() or state.is_paused():
            return None
        result: TrainingResult = await state.aresult()
        if result.run == wanted.resume:
            break  # a retry counts its calls: Prefect answers the first ones with finished runs of other points
    create_json(work, key, result.model_dump(mode="json"))
    return result


async def _show(
    artifacts: RunArtifacts,
    grid: Sequence[Point],
    trained: Mapping[str, TrainingResult],
    scores: Mapping[str, Scores],
    best: str,
) -> None:
    """Make the artifacts of a sweep: all points as a table and as a picture, and a page about the best point.

    artifacts: the run's artifacts. grid: all points. trained, scores: results and scores by the labels of trained
    points; scores also contains the base model's. best: the label of the best point.
    """
    rows = [
        {"point": point.label, **point.values}
        | figures(scores[point.label])
        | {"last training loss": result.last["loss"], "best": "best" if point.label == best else ""}
        | {"weights": result.weights}
        for point in grid
        if (result := trained.get(point.label)) is not None
    ]
    await artifacts.table("points", rows, "points of the grid")
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    measured = [metric for metric in get_args(Metric) if getattr(scores[best], metric) is not None]
    for point in grid:
        if point.label in scores:
            for metric in measured:
                panel = panels.setdefault(f"{metric} over {point.axis}", {})
                panel.setdefault(point.line, []).append((point.x, scores[point.label].value(metric)))
    await artifacts.pictures("comparison", panels, "scores on the held-out rows")
    winner = trained[best]
    lines = [
        f"# Best: {best}",
        "",
        f"{_line(scores[best])}; the base model: {_line(scores[BASE])}",
        "",
        "| | |",
        "|---|---|",
        f"| weights to sample from | `{winner.weights}` |",
        f"| training state | `{winner.state}` |",
        f"| run | `{winner.run}` |",
        f"| data | `{winner.data}` |",
    ]
    await artifacts.text("best", "\n".join(lines), "the best point")


def _line(scores: Scores) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in figures(scores).items() if value is not None)


PIPELINE = Pipeline(sweep, SweepParameters)

"""The pipeline `sweep`: one fine-tune for each point of a grid, some at a time; the best by evaluation is named."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from pydantic import BaseModel

from tinkerflow.backend.errors import ServerError
from tinkerflow.flows.pipelines.evaluate import BASE, score_all
from tinkerflow.flows.pipelines.preparation import or_cancelled
from tinkerflow.flows.pipelines.sft import sft
from tinkerflow.flows.pipelines.training import Trained, run_name
from tinkerflow.tasks.pipelines.board import Board
from tinkerflow.tasks.pipelines.connection import connect
from tinkerflow.tasks.pipelines.control import controlled
from tinkerflow.tasks.pipelines.grid import Point, points
from tinkerflow.tasks.pipelines.parameters import SftParameters, SweepParameters
from tinkerflow.tasks.pipelines.scoring import Scores
from tinkerflow.tasks.pipelines.work import create_json, default_work_url, digest, open_work, read_json


class Swept(BaseModel):
    """What a sweep came to. best: the label of a point; weights, state: its own. scores: by label, and of the base."""

    best: str
    weights: str
    state: str
    scores: dict[str, Scores]


@flow(name="sweep", flow_run_name="sweep {parameters.name}", validate_parameters=True)
async def sweep(parameters: SweepParameters) -> Swept | State[None]:
    """Fine-tune with every combination of the grid's values, score all on the held-out rows, and say which is best.

    Each point is a flow run `sft` of its own. A retry, or a run with the same `resume`, trains only what is not done.
    """
    return await or_cancelled(_sweep(parameters))


async def _sweep(parameters: SweepParameters) -> Swept:
    work_url = parameters.work or default_work_url()
    board = Board(f"sweep-{parameters.name}")
    grid = points(parameters)
    places = asyncio.Semaphore(parameters.at_once)

    async with controlled() as control:

        async def one(point: Point) -> Trained | None:
            async with places:
                return await _train(parameters, point, work_url) if await control.may_go_on() else None

        made = await asyncio.gather(*(one(point) for point in grid), return_exceptions=True)
        for result in made:
            if isinstance(result, BaseException):
                raise result  # when the others have ended, so that none is left running
        if control.stopping:
            control.stopped(f"stopped after {sum(one is not None for one in made)} of {len(grid)} points")
    trained = {point.label: result for point, result in zip(grid, made, strict=True) if isinstance(result, Trained)}
    if not trained:
        raise ServerError("sweep: every point was cancelled")
    async with connect(parameters.connection) as server:
        scores = await score_all(
            server,
            await server.base_model(parameters.model.base_model),
            {label: one.weights for label, one in trained.items()} | {BASE: ""},
            parameters.held_out,
            work_url,
            parameters.model.format,
            parameters.samples.max_tokens,
        )
    best = min(trained, key=lambda label: scores[label].worse(parameters.metric))
    await _show(board, grid, trained, scores, best)
    return Swept(best=best, weights=trained[best].weights, state=trained[best].state, scores=scores)


async def _train(parameters: SweepParameters, point: Point, work_url: str) -> Trained | None:
    """The point's fine-tune, or what an earlier run of this sweep made of it; None when it was stopped."""
    values = parameters.model_dump(exclude={"grid", "metric", "at_once"})
    values |= {"name": f"{parameters.name}-{point.slug}"[:40].rstrip("-"), "work": work_url}
    for section, changes in point.changes.items():
        values[section] |= changes
    plan = digest(str(sorted(parameters.model_dump(mode="json", include={"data", "held_out"}).items())), point.label)
    run = run_name(parameters)
    values["resume"] = f"{run}-{plan[:16]}"
    key = f"progress/{run}/points/{plan}.json"
    work = open_work(work_url)
    if (done := read_json(work, key)) is not None:
        return Trained.model_validate(done)
    call: Callable[..., Awaitable[State[Any]]] = sft
    state = await call(SftParameters.model_validate(values), return_state=True)
    if state.is_cancelled() or state.is_paused():
        return None
    made: Trained = await state.aresult()
    create_json(work, key, made.model_dump(mode="json"))
    return made


async def _show(
    board: Board, grid: Sequence[Point], trained: dict[str, Trained], scores: dict[str, Scores], best: str
) -> None:
    rows = [
        {"point": point.label, **point.values}
        | {"loss": scores[point.label].loss, "exact match": scores[point.label].exact_match}
        | {"last training loss": made.last["loss"], "best": "best" if point.label == best else ""}
        | {"weights": made.weights}
        for point in grid
        if (made := trained.get(point.label)) is not None
    ]
    await board.table("points", rows, "points of the grid")
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for point in grid:
        if point.label in scores:
            for metric in ("loss", "exact_match"):
                panel = panels.setdefault(f"{metric} over {point.axis}", {})
                panel.setdefault(point.line, []).append((point.x, getattr(scores[point.label], metric)))
    await board.pictures("comparison", panels, "scores on the held-out rows")
    found = trained[best]
    lines = [
        f"# Best: {best}",
        "",
        f"loss {scores[best].loss:.4g}, exact match {scores[best].exact_match:.4g}; "
        f"the base model: loss {scores[BASE].loss:.4g}",
        "",
        "| | |",
        "|---|---|",
        f"| weights to sample from | `{found.weights}` |",
        f"| training state | `{found.state}` |",
        f"| run | `{found.run}` |",
        f"| data | `{found.data}` |",
    ]
    await board.text("best", "\n".join(lines), "the best point")

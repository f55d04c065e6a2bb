"""`/training_runs`: training runs, one run with its curves, and runs side by side (`/compare`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Annotated

from fastapi import Query
from fastapi.responses import Response
from markupsafe import Markup

from tinkerflow.api.call import PageOffset
from tinkerflow.api.console.charts import chart
from tinkerflow.api.console.samples import shown
from tinkerflow.api.console.visit import Visit, Visiting, page_router
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.core.plot import LINES, Line
from tinkerflow.backend.journal import Curve, Metric, ModelState, ModelView, StepFigures

PAGE = 50
_OF_A_RUN = 100  # checkpoints of a run, shown
_CURVES: dict[str, Callable[[StepFigures], float | None]] = {
    "Loss per weight": lambda point: point.loss,
    "Gradient norm": lambda point: point.grad_norm,
    "Learning rate": lambda point: point.learning_rate,
    "KL(sampler, trainer)": lambda point: point.kl,
    "Tokens per second": lambda point: point.tokens_per_second,
}
_ALWAYS = ("Loss per weight", "Gradient norm")
Runs = Annotated[list[str], Query(max_length=LINES)]
router = page_router()


@router.get("/training_runs")
async def runs_page(visit: Visiting, offset: PageOffset = 0) -> Response:
    """Training runs, newest first."""
    page = await asyncio.to_thread(visit.journal.models.runs, visit.owner, limit=PAGE, offset=offset)
    return visit.page("runs.html", runs=page, offset=offset, size=page.step(PAGE), most=LINES)


@router.get("/training_runs/{run_id}")
async def run_page(run_id: str, visit: Visiting) -> Response:
    """One training run."""

    def read() -> dict[str, object]:
        journal = visit.journal
        return {
            "run": journal.models.get(run_id, visit.owner),
            "checkpoints": journal.checkpoints.page(visit.owner, run_id=run_id, limit=_OF_A_RUN),
        }

    found = await asyncio.to_thread(read)
    values = await _curves(visit, [run_id])
    return visit.page("run.html", samples=await shown(visit, run_id=run_id), **found, **values)


@router.get("/compare")
async def compare_page(visit: Visiting, run: Runs = []) -> Response:  # noqa: B006  a query's default
    """Runs side by side: their settings, the first steps that differ, and their curves in the same charts."""
    runs = list(dict.fromkeys(run))
    values = await _curves(visit, runs)  # which checks that they are the visitor's
    partings = [await asyncio.to_thread(visit.journal.curves.parting, other, runs[0]) for other in runs[1:]]
    return visit.page("compare.html", most=LINES, partings=[None, *partings], **values)


@router.get("/curves")
async def curves_part(visit: Visiting, run: Runs, seen: str = "") -> Response:
    """The curves of runs, as a part of a page that shows them already; 204 when nothing changed since `seen`."""
    if seen and seen == await asyncio.to_thread(_state, visit, run):
        return Response(status_code=204)
    return visit.page("curves.html", **await _curves(visit, run))


async def _curves(visit: Visit, runs: Sequence[str]) -> dict[str, object]:
    """The values of curves.html."""

    def read() -> tuple[str, list[ModelView], list[Curve], list[list[Metric]]]:
        journal = visit.journal
        state = _state(visit, runs)  # read first, so that later changes count as new
        models = [journal.models.get(run, visit.owner) for run in runs]
        metrics = [journal.run_metrics.of_run(run, visit.owner) for run in runs]
        return state, models, [journal.curves.of_run(run, visit.owner) for run in runs], metrics

    if len(runs) > LINES:
        raise UserError(f"run is given {len(runs)} times: must be at most {LINES}")
    state, models, curves, metrics = await asyncio.to_thread(read)
    going = any(model.state in (ModelState.CREATING, ModelState.LIVE) for model in models)
    names = ["value"] if len(runs) == 1 else list(runs)
    return {
        "models": models,
        "state": state,
        "going": going,
        "measured": any(curve.points for curve in curves) or any(metrics),
        "compared": list(zip(models, curves, strict=True)),
        "charts": await asyncio.to_thread(_charts, names, curves, metrics),
    }


def _state(visit: Visit, runs: Sequence[str]) -> str:
    """What changes when there is something new to see."""
    journal = visit.journal
    models = (journal.models.get(run, visit.owner) for run in runs)
    return ",".join(
        f"{model.state}{model.paused or ''}{journal.curves.last_seq(model.id, None)}"
        f"-{journal.run_metrics.number(model.id)}"
        for model in models
    )


def _charts(names: Sequence[str], curves: Sequence[Curve], metrics: Sequence[Sequence[Metric]]) -> list[Markup]:
    """Charts of the loss, of the metrics that clients stored, and of the other figures."""
    found = []
    for title, value in _CURVES.items():
        lines = [
            Line(
                name,
                [(point.step, value(point)) for point in curve.points],
                [(point.step, point.loss_low, point.loss_high) for point in curve.points]
                if title == "Loss per weight" and curve.steps > len(curve.points)
                else (),
            )
            for name, curve in zip(names, curves, strict=True)
        ]
        if title in _ALWAYS or any(y is not None for line in lines for _, y in line.points):
            found.append(chart(title, lines))
    points = [{metric.name: metric.points for metric in of_run} for of_run in metrics]
    stored = sorted({name for one in points for name in one}, key=lambda name: ("reward" not in name, name))
    found[1:1] = [
        chart(title, [Line(name, one.get(title, ())) for name, one in zip(names, points, strict=True)])
        for title in stored
    ]
    return found

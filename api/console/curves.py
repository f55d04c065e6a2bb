"""The curves of runs as charts, and the view that a person chooses: x axis, logarithmic y axis, smoothing, zoom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from operator import attrgetter
from typing import Annotated, Literal
from urllib.parse import urlencode

import numpy as np
import orjson
from fastapi import Depends, Query
from markupsafe import Markup

from tinkerflow.api.console.charts import chart
from tinkerflow.backend.core.plot import Line
from tinkerflow.backend.journal import Curve, Metric, StepFigures
from tinkerflow.backend.journal.curves import EVERY_STEP, Span
from tinkerflow.backend.journal.run_metrics import REWARD
from tinkerflow.backend.spec.drift import DRIFT_FIGURES

Axis = Literal["step", "time", "tokens"]
AXES: dict[Axis, str] = {"step": "step", "time": "hours since the run was created", "tokens": "trained tokens"}
SMOOTHINGS = (0.0, 0.6, 0.9, 0.97, 0.99)
_LOSS = "Loss per weight"
_ALWAYS = (_LOSS, "Gradient norm")
_FIGURES: dict[str, Callable[[StepFigures], float | None]] = {
    _LOSS: lambda point: point.loss,
    "Gradient norm": lambda point: point.grad_norm,
    "Learning rate": lambda point: point.learning_rate,
    **{one.title: attrgetter(one.column) for one in DRIFT_FIGURES},
    "Tokens per second": lambda point: point.tokens_per_second,
}
_Step = Annotated[int, Query(ge=0, lt=2**53)] | Literal[""]  # "" is an empty field of the form


@dataclass(frozen=True)
class ChartView:
    """How charts are drawn. The page's URL contains every choice, so a shared link opens the same charts.

    x: see AXES. log: whether y axes are logarithmic. smooth: the weight of the past in the exponential mean, in [0, 1);
    0 draws the values themselves. first, last: the range of steps to show; None: no limit.
    """

    x: Axis
    log: bool
    smooth: float
    first: int | None
    last: int | None

    @property
    def steps(self) -> Span:
        """The first and the last step to show."""
        return (
            EVERY_STEP[0] if self.first is None else self.first,
            EVERY_STEP[1] if self.last is None else self.last,
        )

    @property
    def query(self) -> str:
        """The view as the query of a URL, without default values."""
        given: dict[str, object] = {"x": self.x, "log": "yes" if self.log else "", "smooth": self.smooth or ""}
        given |= {"first": self.first, "last": self.last}
        return urlencode({name: value for name, value in given.items() if value not in ("", None, "step")})


def chart_view(
    x: Axis = "step",
    log: bool = False,
    smooth: Annotated[float, Query(ge=0, le=0.999)] = 0.0,
    first: _Step = "",
    last: _Step = "",
) -> ChartView:
    """The view that a URL specifies."""
    return ChartView(x, log, smooth, None if first == "" else first, None if last == "" else last)


AsChartView = Annotated[ChartView, Depends(chart_view)]


@dataclass(frozen=True)
class RunCurves:
    """The measured steps of a run. name: the run's name in legends. created_at: when the run was created."""

    name: str
    created_at: datetime
    curve: Curve
    metrics: Sequence[Metric]

    def places(self, axis: Axis) -> list[float]:
        """The x coordinate of each point of the curve."""
        if axis == "tokens":
            tokens = np.cumsum([point.tokens for point in self.curve.points])
            return [float(self.curve.tokens_before + count) for count in tokens]
        if axis == "time":
            return [round((point.at - self.created_at).total_seconds() / 3600, 5) for point in self.curve.points]
        return [point.step for point in self.curve.points]

    @property
    def reward(self) -> float | None:
        """The last value of the metric `reward`; None if the run has none."""
        return next((one.points[-1][1] for one in self.metrics if one.name == REWARD and one.points), None)

    def placed(self, metric: Sequence[tuple[int, float]], axis: Axis) -> list[tuple[float, float]]:
        """The points of a metric with x coordinates, interpolated between the steps of the curve."""
        if axis == "step":
            return list(metric)
        known = dict(sorted(zip((point.step for point in self.curve.points), self.places(axis), strict=True)))
        if not known:
            return []
        places = np.interp([step for step, _ in metric], list(known), list(known.values()))
        return [(float(place), value) for place, (_, value) in zip(places, metric, strict=True)]


def charts(runs: Sequence[RunCurves], view: ChartView) -> list[Markup]:
    """Charts of the rewards, the loss, the other metrics that clients stored, and all other figures, in this order.

    A metric `loss` of all runs replaces the measured loss.
    """
    figures = dict[str, Markup]()
    for title, value in _FIGURES.items():
        lines = [_line(run, title, value, view) for run in runs]
        if title in _ALWAYS or any(line.known for line in lines):
            figures[title] = _chart(title, lines, view)
    rewards, losses, others = list[Markup](), list[Markup](), list[Markup]()
    metrics = [{metric.name: metric.points for metric in run.metrics} for run in runs]
    for name in sorted({name for of_run in metrics for name in of_run}, key=lambda name: (name != REWARD, name)):
        of_runs = zip(runs, metrics, strict=True)
        lines = [Line(run.name, run.placed(of_run.get(name, ()), view.x)) for run, of_run in of_runs]
        (rewards if REWARD in name else losses if name == "loss" else others).append(_chart(name, lines, view))
    measured = figures.pop(_LOSS)
    if not all("loss" in of_run for of_run in metrics):
        losses.insert(0, measured)
    return [*rewards, *losses, *others, *figures.values()]


def steps_by_place(runs: Sequence[RunCurves], view: ChartView) -> str | None:
    """JSON: for each run, pairs of an x coordinate and its step, which the script needs to zoom.

    None if the x axis shows steps.
    """
    if view.x == "step":
        return None
    pairs = [
        [(place, point.step) for place, point in zip(run.places(view.x), run.curve.points, strict=True)]
        for run in runs
        if run.curve.points
    ]
    return orjson.dumps(pairs).decode()


def _line(run: RunCurves, title: str, value: Callable[[StepFigures], float | None], view: ChartView) -> Line:
    places, points = run.places(view.x), run.curve.points
    ranges = title == _LOSS and run.curve.steps > len(points) and not view.smooth
    band = [(place, point.loss_low, point.loss_high) for place, point in zip(places, points, strict=True)]
    return Line(run.name, list(zip(places, map(value, points), strict=True)), band if ranges else ())


def _chart(title: str, lines: Sequence[Line], view: ChartView) -> Markup:
    if view.smooth:
        lines = [Line(line.name, smoothed(line.points, view.smooth), faint=line.points) for line in lines]
    return chart(title, lines, across=AXES[view.x], log=view.log, zooms=True)


def smoothed(points: Sequence[tuple[float, float | None]], weight: float) -> list[tuple[float, float | None]]:
    """Exponential means of the values so far. Each further value multiplies the weight of earlier ones by `weight`.

    The means are divided by the sum of the weights, so the first mean is the first value (Kingma & Ba, 2015, "Adam",
    section 3). Gaps stay gaps.
    """
    found: list[tuple[float, float | None]] = []
    mean = total = 0.0
    for x, y in points:
        if y is not None:
            mean, total = weight * mean + (1 - weight) * y, weight * total + (1 - weight)
        found.append((x, None if y is None else mean / total))
    return found

"""A pipeline's run as people see it in Prefect: log lines, and artifacts that are updated while it runs."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from datetime import timedelta
from typing import Any
from uuid import UUID

import httpx
import orjson
from prefect import get_client, get_run_logger
from prefect.artifacts import (
    acreate_image_artifact,
    acreate_markdown_artifact,
    acreate_progress_artifact,
    acreate_table_artifact,
)
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.context import FlowRunContext, TaskRunContext
from prefect.exceptions import PrefectException

from tinkerflow.backend.core.clock import Clock, SystemClock
from tinkerflow.tasks.pipelines.curves import Points, data_url, picture
from tinkerflow.tasks.pipelines.data import DataReport
from tinkerflow.tasks.pipelines.progress import Sample, SegmentRecord, StepMetrics

log = logging.getLogger(__name__)

LIVE_SECONDS = 2.0  # seconds between two updates of the progress
LINE_SECONDS = 10.0  # seconds between two log lines about steps
MOST_ROWS = 200
MOST_POINTS = 1000  # points of a line in a picture

# Code that runs a flow in this process may set these variables. follower: shows progress; called with the step, the
# number of steps and the step's metrics.
follower: ContextVar[Callable[[int, int, Mapping[str, float]], None] | None] = ContextVar("follower", default=None)
# phases: shows the phase of the run before its next step.
phases: ContextVar[Callable[[str], None] | None] = ContextVar("phases", default=None)
# notes: shows permanent lines.
notes: ContextVar[Callable[[str], None] | None] = ContextVar("notes", default=None)
# training_runs: for links; collects the id of each training run, or the path of a page below that of its weights.
training_runs: ContextVar[list[str] | None] = ContextVar("training_runs", default=None)

# has_lasting_page: whether the flow run's page in Prefect stays after the run, so that the console can link to it.
has_lasting_page: ContextVar[bool] = ContextVar("has_lasting_page", default=True)


def begin_phase(text: str) -> None:
    """Show the current phase of the run to the code that follows it, and in the run's logs."""
    if (show := phases.get()) is not None:
        show(text)
    log_line(text)


def show_note(text: str) -> None:
    """Show a line to the code that follows the run, or else in the process's log, and always in the run's logs."""
    if (show := notes.get()) is not None:
        show(text)
    else:
        log.warning(text)
    log_line(text, logging.WARNING)


def log_line(text: str, level: int = logging.INFO) -> None:
    """Add a line to the logs of the current flow or task run. Does nothing outside a run."""
    if FlowRunContext.get() is not None or TaskRunContext.get() is not None:
        get_run_logger().log(level, text)


class RunArtifacts:
    """The artifacts of one run. Outside a flow run, or if Prefect cannot be reached, the run continues without them.

    Keys are `<pipeline>-<name>-<kind>`, so that runs of the same name follow one another under one key.
    """

    def __init__(self, prefix: str, clock: Clock | None = None) -> None:
        """`prefix`: `<pipeline>-<name>`. clock: limits how often the progress is written."""
        self._prefix = prefix
        self._clock = clock or SystemClock()
        self._made: dict[str, UUID] = {}
        self._written_at = self._logged_at = -math.inf
        self._first: tuple[int, float] | None = None  # the number and the time of this process's first step

    async def progress(self, step: int, steps: int, values: Mapping[str, float]) -> None:
        """Show the progress of the run: a line every LINE_SECONDS, an artifact every LIVE_SECONDS, both at the end."""
        if (follow := follower.get()) is not None:
            follow(step, steps, values)
        now = self._clock.monotonic()
        text = f"step {step} of {steps}: " + ", ".join(f"{name} {value:.4g}" for name, value in values.items())
        text += self._left(step, steps, now)
        if step == steps or now - self._logged_at >= LINE_SECONDS:
            self._logged_at = now
            log_line(text)
        if step == steps or now - self._written_at >= LIVE_SECONDS:
            self._written_at = now
            await self.put("progress", acreate_progress_artifact, 100 * step / steps, text, "progress")

    def _left(self, step: int, steps: int, now: float) -> str:
        """The remaining time as a text, at the mean pace of this process; empty after the first and last step."""
        if self._first is None:
            self._first = (step, now)
        first, began = self._first
        if step in (first, steps):
            return ""
        return f"; about {timedelta(seconds=round((steps - step) * (now - began) / (step - first)))} left"

    async def curves(self, steps: Sequence[StepMetrics], held_out: Mapping[str, Points]) -> None:
        """Show every metric of the steps as a picture and as a table. Those of long runs have means and fewer steps."""
        panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
        for metrics in steps:
            for name, value in metrics.values.items():
                panels.setdefault(name, {}).setdefault(name, []).append((metrics.step, value))
        for name, points in held_out.items():
            panels.setdefault(name.removeprefix("held_out_"), {})[name] = list(points)
        shown = {title: {name: _means(line) for name, line in lines.items()} for title, lines in panels.items()}
        await self.pictures("curves", shown, "curves over steps")
        every = max(1, -(-len(steps) // MOST_ROWS))
        rows = [{"step": m.step} | m.values for i, m in enumerate(steps) if i % every == 0 or m is steps[-1]]
        await self.table("steps", rows, f"one of every {every} steps" if every > 1 else "all steps")

    async def pictures(self, kind: str, panels: Mapping[str, Mapping[str, Points]], title: str) -> None:
        """Show a picture. panels: title of a panel -> name of a line -> its points."""
        await self.put(kind, acreate_image_artifact, data_url(picture(panels)), title, "image_url")

    async def table(self, kind: str, rows: Sequence[Mapping[str, Any]], title: str) -> None:
        """Show a table with one row for each mapping."""
        await self.put(kind, acreate_table_artifact, [dict(row) for row in rows], title, "table")

    async def text(self, kind: str, markdown: str, title: str) -> None:
        """Show a page of Markdown."""
        await self.put(kind, acreate_markdown_artifact, markdown, title, "markdown")

    async def data(self, reports: Mapping[str, DataReport]) -> None:
        """Show the results of the data checks. reports: name of the data set -> report."""
        await self.text("data", "\n\n".join(data_page(name, report) for name, report in reports.items()), "data report")

    async def samples(self, segments: Sequence[SegmentRecord]) -> None:
        """Show the answers after the first segment and after the last four segments, with one column for each segment.

        A run may be resumed with other prompts for samples. A prompt that a segment did not sample has no answer there.
        """
        found = [segment for segment in segments if segment.samples]
        if not found:
            return
        shown = [found[0], *found[1:][-4:]]
        sampled = {f"after step {segment.last_step}": _by_prompt(segment.samples) for segment in shown}
        rows = [
            {"prompt": first.prompt}
            | {name: samples[key].answer if key in samples else "" for name, samples in sampled.items()}
            | ({"wanted": first.wanted} if first.wanted else {})
            for key, first in {key: one for samples in sampled.values() for key, one in samples.items()}.items()
        ]
        await self.table("samples", rows, "greedy answers over time")

    async def put(self, kind: str, create: Any, data: object, title: str, name: str) -> None:
        """Make the artifact `kind` with `create`, or update it if this run has already made it.

        data: the content, the argument `name` of `create`. title: the artifact's description.
        """
        if FlowRunContext.get() is None and TaskRunContext.get() is None:
            return
        try:
            if kind not in self._made:
                self._made[kind] = await create(
                    **{name: data}, key=f"{self._prefix}-{kind}".replace("_", "-"), description=title
                )
                return
            stored = orjson.dumps(data).decode() if name == "table" else data  # a table is stored as a text
            async with get_client() as client:
                update = ArtifactUpdate(data=stored, description=title)
                await client.update_artifact(self._made[kind], update)
        except (httpx.HTTPError, PrefectException) as error:
            log.warning("artifact %s was not written: %s: %s", kind, type(error).__name__, error)


def _means(points: Sequence[tuple[float, float]]) -> Points:
    """At most MOST_POINTS points: means over neighbors, each at its last step."""
    every = -(-len(points) // MOST_POINTS) or 1
    parts = [points[start : start + every] for start in range(0, len(points), every)]
    return [(part[-1][0], sum(value for _, value in part) / len(part)) for part in parts]


def _by_prompt(samples: Sequence[Sample]) -> dict[tuple[str, int], Sample]:
    """Samples by their prompts, which are numbered because rows may end with the same message."""
    found: dict[tuple[str, int], Sample] = {}
    seen: Counter[str] = Counter()
    for sample in samples:
        found[sample.prompt, seen[sample.prompt]] = sample
        seen[sample.prompt] += 1
    return found


def data_page(name: str, report: DataReport) -> str:
    facts = {
        "schema": report.schema_name,
        "good rows": report.rows,
        "bad rows, left out": report.bad_rows,
        "too long, left out": report.too_long,
        "duplicates": report.duplicates,
        "characters": report.characters,
        "tokens": f"{report.tokens}, of which {report.trained_tokens} are trained on",
        "digest": f"`{report.digest}`",
        "quarantine": f"`{report.quarantine}`" if report.quarantine else "empty",
    }
    lines = [f"## {name}: `{report.url}`", "", "| | |", "|---|---|", *(f"| {k} | {v} |" for k, v in facts.items())]
    lines += ["", *(f"- {cell(note)}" for note in report.notes)] if report.notes else []
    if report.first_errors:
        lines += ["", "| first row | rows | error |", "|---|---|---|"]
        lines += [f"| {cell(bad.where)} | {bad.rows} | {cell(bad.error)} |" for bad in report.first_errors]
    return "\n".join(lines)


def cell(value: object) -> str:
    """A value as a cell of a Markdown table."""
    return str(value).replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")

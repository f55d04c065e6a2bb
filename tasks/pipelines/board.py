"""What people see of a run: Prefect artifacts, one for each key, updated while the run goes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any
from uuid import UUID

import httpx
import orjson
from prefect import get_client
from prefect.artifacts import (
    acreate_image_artifact,
    acreate_markdown_artifact,
    acreate_progress_artifact,
    acreate_table_artifact,
)
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.context import FlowRunContext, TaskRunContext
from prefect.exceptions import PrefectException

from tinkerflow.tasks.pipelines.curves import Points, data_url, picture
from tinkerflow.tasks.pipelines.data import DataReport
from tinkerflow.tasks.pipelines.progress import Segment, StepMetrics

log = logging.getLogger(__name__)

LIVE_SECONDS = 2.0  # between two updates of what changes with every step
MOST_ROWS = 200

# Whoever runs a flow in this process may follow it, for a progress bar: gets step, of how many, and the step's values.
follower: ContextVar[Callable[[int, int, Mapping[str, float]], None] | None] = ContextVar("follower", default=None)


class Board:
    """The artifacts of one run. Outside of a flow run, or when Prefect does not take them, work goes on without.

    Keys are `<pipeline>-<name>-<what>`, so that the runs of one name follow one another under one key.
    """

    def __init__(self, prefix: str) -> None:
        """`prefix`: `<pipeline>-<name>`."""
        self._prefix = prefix
        self._made: dict[str, UUID] = {}
        self._live = 0.0

    async def progress(self, step: int, steps: int, values: Mapping[str, float]) -> None:
        """How far the run is; at most every LIVE_SECONDS, and at the end."""
        if (follow := follower.get()) is not None:
            follow(step, steps, values)
        if step < steps and time.monotonic() - self._live < LIVE_SECONDS:
            return
        self._live = time.monotonic()
        text = f"step {step} of {steps}: " + ", ".join(f"{name} {value:.4g}" for name, value in values.items())
        await self._put("progress", acreate_progress_artifact, 100 * step / steps, text, "progress")

    async def curves(self, steps: Sequence[StepMetrics], held_out: Mapping[str, Points]) -> None:
        """Every metric of the steps as a picture and as a table."""
        panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
        for one in steps:
            for name, value in one.values.items():
                panels.setdefault(name, {}).setdefault(name, []).append((one.step, value))
        for name, points in held_out.items():
            panels.setdefault(name.removeprefix("held_out_"), {})[name] = list(points)
        await self.pictures("curves", panels, "curves over steps")
        every = max(1, -(-len(steps) // MOST_ROWS))
        rows = [{"step": one.step} | one.values for i, one in enumerate(steps) if i % every == 0 or one is steps[-1]]
        await self.table("steps", rows, f"every {every}. step" if every > 1 else "all steps")

    async def pictures(self, what: str, panels: Mapping[str, Mapping[str, Points]], title: str) -> None:
        """A picture of panels: title -> name of a line -> its points."""
        await self._put(what, acreate_image_artifact, data_url(picture(panels)), title, "image_url")

    async def table(self, what: str, rows: Sequence[Mapping[str, Any]], title: str) -> None:
        """A table with one row for each mapping."""
        await self._put(what, acreate_table_artifact, [dict(row) for row in rows], title, "table")

    async def text(self, what: str, markdown: str, title: str) -> None:
        """A page of Markdown."""
        await self._put(what, acreate_markdown_artifact, markdown, title, "markdown")

    async def data(self, reports: Mapping[str, DataReport]) -> None:
        """What the data checks found: name of the data set -> report."""
        await self.text("data", "\n\n".join(data_page(name, report) for name, report in reports.items()), "data report")

    async def samples(self, segments: Sequence[Segment]) -> None:
        """What was answered after each segment, one column for each of the last few."""
        told = [segment for segment in segments if segment.samples]
        if not told:
            return
        shown = [told[0], *told[1:][-4:]]
        rows = []
        for i, first in enumerate(shown[0].samples):
            answers = {f"after step {one.last_step}": one.samples[i].answer for one in shown}
            rows.append({"prompt": first.prompt} | answers | ({"wanted": first.wanted} if first.wanted else {}))
        await self.table("samples", rows, "greedy answers over time")

    async def _put(self, what: str, create: Any, data: object, title: str, name: str) -> None:
        if FlowRunContext.get() is None and TaskRunContext.get() is None:
            return
        try:
            if what not in self._made:
                self._made[what] = await create(
                    **{name: data}, key=f"{self._prefix}-{what}".replace("_", "-"), description=title
                )
                return
            stored = orjson.dumps(data).decode() if name == "table" else data  # a table is stored as a text
            async with get_client() as client:
                update = ArtifactUpdate(data=stored, description=title)
                await client.update_artifact(self._made[what], update)
        except (httpx.HTTPError, PrefectException) as error:
            log.warning("artifact %s was not written: %s: %s", what, type(error).__name__, error)


def data_page(name: str, report: DataReport) -> str:
    """A data report as Markdown."""
    facts = {
        "schema": report.schema_name,
        "good rows": report.rows,
        "bad rows, left out": report.bad_rows,
        "duplicates": report.duplicates,
        "characters": report.characters,
        "digest": f"`{report.digest}`",
        "quarantine": f"`{report.quarantine}`" if report.quarantine else "empty",
    }
    lines = [f"## {name}: `{report.url}`", "", "| | |", "|---|---|", *(f"| {k} | {v} |" for k, v in facts.items())]
    if report.first_errors:
        lines += ["", "| row | error |", "|---|---|"]
        lines += [f"| {cell(bad.where)} | {cell(bad.error)} |" for bad in report.first_errors]
    return "\n".join(lines)


def cell(value: object) -> str:
    """A value as a cell of a Markdown table."""
    return str(value).replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")

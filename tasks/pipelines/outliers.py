"""Leaves out the rows that spoil a step: the step is made again without them, from the state before it.

After each step, its gradient norm and loss are compared with those of earlier steps. If the step is unusual, each of
its rows is computed alone, in a fork of the training run before the step (docs/history.md). Rows that differ from the
other rows are left out until the step is usual, and rows that do not spoil it are put back. Training then continues in
a new run that begins with the fork, so its weights are those of a run that never had the rows. All of this depends only
on the data and on recorded steps, so a retry finds the same rows.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Protocol
from urllib.parse import quote

import httpx

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.spec.outliers import (
    MOST_ROWS,
    BlamedRow,
    UsualSteps,
    examined,
    for_pages,
    markdown_table,
    ranked,
)
from tinkerflow.tasks.pipelines.preparation import PreparedRun
from tinkerflow.tasks.pipelines.progress import LeftOutRow, SegmentRecord
from tinkerflow.tasks.pipelines.render import TokenizedExample

if TYPE_CHECKING:
    import tinker

log = logging.getLogger(__name__)

_IN_FLIGHT = 16  # rows that are sent before the result of the first row is awaited
_SECONDS = 30.0  # time limit of a request to the server
HISTORY = {"history": "true"}  # metadata of runs with steps that can be forked


class RowRecipe(Protocol):
    """A recipe whose steps learn from rows by cross entropy, and can leave some of them out. Steps count from 0."""

    @property
    def left_out(self) -> set[int]:
        """Indices of the rows that no later step learns from."""

    def batch(self, step: int) -> list[int]:
        """The indices of the rows of a step, excluding rows that are left out."""

    def lessons(self, rows: Sequence[int]) -> list[TokenizedExample]:
        """The rows with these indices, weighted as in a step with exactly these rows."""


class OutlierWatch:
    """Finds unusual steps, and leaves out their worst rows."""

    def __init__(self, run: PreparedRun, recipe: RowRecipe) -> None:
        """run: the parameters, connection and artifacts. recipe: makes the steps."""
        self._run, self._recipe = run, recipe
        self._usual = UsualSteps()
        self._accepted = 0  # the step that was made again, which passes however unusual it is
        self.left_out: list[LeftOutRow] = []
        self._pages: dict[int, str] = {}  # by step; a retry replaces them

    def begin(self, segments: Sequence[SegmentRecord]) -> None:
        """Begin after the recorded segments."""
        self._usual, self._accepted = UsualSteps(), 0
        for segment in segments:
            for step in segment.steps:
                self._usual.add(step.values["grad_norm"], step.values["loss"])
        self.left_out = [one for segment in segments for one in segment.left_out]
        self._recipe.left_out.clear()
        self._recipe.left_out.update(one.row for one in self.left_out)

    async def check_history(self, run_id: str) -> None:
        """Check that the steps of a run can be forked. UserError: the server keeps no histories."""
        path = f"api/v1/training_runs/{quote(run_id, safe='')}/history"
        async with self._run.server.http(_SECONDS) as http:
            answer = await http.get(path, params={"payloads": False, "after": 2**62})
        if answer.status_code == 404:
            raise UserError(
                "on_outlier 'skip': the server keeps no histories (TINKERFLOW_HISTORY=off), so no step can be "
                "repeated; use 'report'"
            )

    def passes(self, step: int, norm: float, loss: float) -> bool:
        """Whether training continues after a step, counted from 1, with this gradient norm and loss per token."""
        if step != self._accepted and self._usual.unusual(norm, loss):
            return False
        self._usual.add(norm, loss)
        return True

    async def go_back(self, run_id: str, step: int, metadata: Mapping[str, str]) -> tinker.TrainingClient:
        """Restore the model of a run before `step` in a new run. The step's worst rows are left out from now on.

        step: counted from 1. metadata: the new run's metadata. If no rows explain the step, no rows are left out, and
        the step passes unchanged.
        """
        path = f"tinker://{run_id}/weights/@{step - 1}"
        rows = self._recipe.batch(step - 1)
        service = self._run.server.service
        probe = await service.create_training_client_from_state_with_optimizer(path, user_metadata=dict(metadata))
        try:
            worst = ranked(await self._each_alone(probe, rows))
            chosen = await self._spoilers(probe, rows, worst)
        finally:
            await self._run.server.unload(probe.model_id)
        spoilers = sorted(rows[number] for number in chosen)
        self._recipe.left_out.update(spoilers)
        self.left_out += [LeftOutRow(step=step, row=row) for row in spoilers]
        self._accepted = step
        await self._show(run_id, step, worst, spoilers)
        client: tinker.TrainingClient = await service.create_training_client_from_state_with_optimizer(
            path, user_metadata=dict(metadata)
        )
        return client

    async def _each_alone(self, probe: tinker.TrainingClient, rows: Sequence[int]) -> list[BlamedRow]:
        """Measure each row of a step alone. Equal rows are computed once."""
        lessons = self._recipe.lessons(rows)
        equal: dict[tuple[bytes, bytes], list[int]] = {}
        for number, lesson in enumerate(lessons):
            equal.setdefault((lesson.tokens.tobytes(), lesson.weights.tobytes()), []).append(number)
        found = []
        groups = iter(equal.values())
        while some := list(islice(groups, _IN_FLIGHT)):
            asked = [(numbers, *_measured(probe, [lessons[numbers[0]]])) for numbers in some]
            for (number, *repeated), forward, update in asked:
                output, lesson = await forward, lessons[number]
                logprobs = output.loss_fn_outputs[0]["logprobs"].to_numpy().tolist()
                loss, norm = output.metrics.get("loss:sum"), ((await update).metrics or {}).get("grad_norm")
                size = len(lesson.tokens) - 1
                row = BlamedRow(number, size, _finite(loss), _finite(norm), repeated=tuple(repeated))
                found.append(examined(row, lesson.tokens[1:].tolist(), logprobs, lesson.weights[1:].tolist()))
        return found

    async def _spoilers(
        self, probe: tinker.TrainingClient, rows: Sequence[int], worst: Sequence[BlamedRow]
    ) -> list[int]:
        """Find the worst rows without which the step is usual. Returns their numbers; none if there are no such rows.

        Rows are left out one after another, worst first, until the step is usual. Then each of them, worst first, is
        put back if the step stays usual with it: a harmless row may differ more from the other rows than the row that
        spoils the step. Only rows with a reason are left out, because the gradients of all rows are large after too
        large a step. worst: the rows of the step, from `ranked`.
        """
        chosen: list[Collection[int]] = []
        for row in worst:
            if not row.reason:
                break
            for numbers in (row.spoilers, {row.number} - {*row.spoilers}):
                if not numbers:
                    continue
                chosen.append(numbers)
                if await self._is_usual(probe, rows, chosen):
                    return await self._needed(probe, rows, chosen)
        return []

    async def _needed(
        self, probe: tinker.TrainingClient, rows: Sequence[int], chosen: Sequence[Collection[int]]
    ) -> list[int]:
        """Numbers of the chosen rows that cannot be put back. The last group is known to be needed."""
        needed = list(chosen)
        for numbers in chosen[:-1]:
            fewer = [one for one in needed if one is not numbers]
            if await self._is_usual(probe, rows, fewer):
                needed = fewer
        return [number for numbers in needed for number in numbers]

    async def _is_usual(
        self, probe: tinker.TrainingClient, rows: Sequence[int], without: Sequence[Collection[int]]
    ) -> bool:
        """Whether the step would be usual without the rows in `without`."""
        left_out = {number for numbers in without for number in numbers}
        kept = [index for number, index in enumerate(rows) if number not in left_out]
        if not kept:
            return False
        forward, update = _measured(probe, self._recipe.lessons(kept))
        loss, metrics = (await forward).metrics.get("loss:sum", math.nan), (await update).metrics or {}
        return not self._usual.unusual(metrics.get("grad_norm", math.nan), loss)

    async def _show(self, run_id: str, step: int, worst: Sequence[BlamedRow], chosen: Sequence[int]) -> None:
        """Show the rows of a step on the page of its training run and as an artifact."""
        rows = ", ".join(map(str, chosen))
        decision = f"Left out from now on: rows {rows} of the data." if chosen else "No row was left out."
        log.warning("step %d of %s is unusual. %s", step, run_id, decision)
        self._pages[step] = "\n".join([f"## Step {step}", "", decision, "", *markdown_table(worst[:MOST_ROWS]), ""])
        await self._run.artifacts.text("outliers", "\n".join(self._pages.values()), "rows of unusual steps")
        path = f"api/v1/training_runs/{quote(run_id, safe='')}/blames"
        try:
            async with self._run.server.http(_SECONDS) as http:
                (await http.post(path, json={"step": step, "rows": for_pages(worst)})).raise_for_status()
        except httpx.HTTPError as error:
            log.warning("the page of %s does not show the rows of step %d: %s", run_id, step, error)


def _measured(
    probe: tinker.TrainingClient, lessons: Sequence[TokenizedExample]
) -> tuple[tinker.APIFuture[tinker.ForwardBackwardOutput], tinker.APIFuture[tinker.OptimStepResponse]]:
    """Request the loss and gradient norm of some rows. An optimizer step with learning rate 0 changes no weights."""
    import tinker

    forward = probe.forward_backward([lesson.datum() for lesson in lessons], "cross_entropy")
    return forward, probe.optim_step(tinker.AdamParams(learning_rate=0.0, weight_decay=0.0))


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None

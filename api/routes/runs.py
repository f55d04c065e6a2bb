"""Training runs, and the metrics and outcomes that clients store for them."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Annotated

from pydantic import Field

from tinkerflow.api.call import AccessScope, Authorized, PageLimit, PageOffset, Router
from tinkerflow.api.checkpoints import CheckpointDetails, checkpoint
from tinkerflow.api.openapi import takes
from tinkerflow.api.schemas import Cursor, Strict, Wire
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.journal import ModelState, RunView
from tinkerflow.backend.spec.run_metadata import LARGEST_METRIC, Outcome

router = Router(busy=3)

_MOST_VALUES = 10_000  # values in one request, which take the database about 0.1 s
_NAME = r"^[A-Za-z0-9][A-Za-z0-9 ._/:@()-]{0,63}$"
MetricName = Annotated[str, Field(pattern=_NAME)]
MetricValue = Annotated[float, Field(allow_inf_nan=False, ge=-LARGEST_METRIC, le=LARGEST_METRIC)]


class TrainingRun(Wire):
    """A training run (a model). corrupted: its state was lost with a worker group."""

    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool
    corrupted: bool
    lora_rank: int
    last_request_time: datetime
    last_checkpoint: CheckpointDetails | None = None
    last_sampler_checkpoint: CheckpointDetails | None = None
    user_metadata: dict[str, str]


class TrainingRuns(Wire):
    """A list of training runs, newest first."""

    training_runs: list[TrainingRun]
    cursor: Cursor


class StepValues(Strict):
    """Named values at one step. Steps count optimizer steps from 1."""

    step: int = Field(ge=0, lt=2**53)
    values: dict[MetricName, MetricValue]


class RunMetricsBody(Strict):
    """Values of metrics of a run."""

    steps: list[StepValues] = Field(min_length=1, max_length=1000)


class RunOutcome(Strict):
    """The outcome of a run's program, for the run's page. reason: a text for people."""

    outcome: Outcome
    reason: str = Field("", max_length=1000)


class RecordedMetrics(Wire):
    """recorded: the number of new values."""

    recorded: int


@router.get("/training_runs", response_model_exclude_none=True)
async def training_runs(
    call: Authorized,
    limit: PageLimit = 20,
    offset: PageOffset = 0,
    access_scope: AccessScope = "owned",
    project_id: str | None = None,
) -> TrainingRuns:
    """Training runs of the access_scope, newest first; with project_id, the runs of sessions with that label.

    limit, offset: the part of the list to return. call: the caller's.
    """
    owner = call.visible(access_scope)
    page = await asyncio.to_thread(call.journal.models.runs, owner, limit=limit, offset=offset, project_id=project_id)
    return TrainingRuns(
        training_runs=[_training_run(row) for row in page.rows],
        cursor=Cursor(offset=offset, limit=page.step(limit), total_count=page.total),
    )


@router.get("/training_runs/{run_id}", response_model_exclude_none=True)
async def training_run(run_id: str, call: Authorized, access_scope: AccessScope = "owned") -> TrainingRun:
    """One training run with its newest checkpoints."""
    return _training_run(await asyncio.to_thread(call.journal.models.run, run_id, call.visible(access_scope)))


@router.post("/training_runs/{run_id}/metrics", openapi_extra=takes(RunMetricsBody))
async def record_metrics(run_id: str, call: Authorized) -> RecordedMetrics:
    """Store named values of the project's own run, for its page. Repeating stored values has no effect."""
    body = await call.parsed(RunMetricsBody)
    steps: dict[int, dict[str, float]] = {}
    for one in body.steps:
        if one.step in steps:
            raise UserError(f"steps: step {one.step} is given twice")
        steps[one.step] = one.values
    if (number := sum(map(len, steps.values()))) > _MOST_VALUES:
        raise UserError(f"steps has {number} values: must have at most {_MOST_VALUES}")
    limits = call.limits
    return RecordedMetrics(
        recorded=await asyncio.to_thread(call.journal.run_metrics.record, run_id, call.owner, steps, limits)
    )


@router.post("/training_runs/{run_id}/outcome", openapi_extra=takes(RunOutcome))
async def record_outcome(run_id: str, call: Authorized) -> RunOutcome:
    """Store the outcome of the program that trains the project's own run, in the run's metadata and events."""
    body = await call.parsed(RunOutcome)
    await asyncio.to_thread(call.journal.models.note_outcome, run_id, call.owner, body.outcome, body.reason)
    return body


def _training_run(run: RunView) -> TrainingRun:
    model = run.model
    return TrainingRun(
        training_run_id=model.id,
        base_model=model.base_model,
        model_owner=model.owner,
        corrupted=model.state is ModelState.LOST,
        is_lora=model.is_lora,
        lora_rank=model.rank,
        last_request_time=model.last_request_at,
        last_checkpoint=checkpoint(run.last_checkpoint) if run.last_checkpoint else None,
        last_sampler_checkpoint=checkpoint(run.last_sampler_checkpoint) if run.last_sampler_checkpoint else None,
        user_metadata=dict(model.user_metadata),
    )

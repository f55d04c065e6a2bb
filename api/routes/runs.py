"""Looking at training runs."""

from __future__ import annotations

import asyncio
from datetime import datetime

from tinkerflow.api.call import AccessScope, Authorised, PageLimit, PageOffset, Router
from tinkerflow.api.checkpoints import CheckpointDetails, checkpoint
from tinkerflow.api.schemas import Cursor, Wire
from tinkerflow.backend.journal import ModelState, RunView

router = Router(busy=3)


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


@router.get("/training_runs", response_model_exclude_none=True)
async def training_runs(
    call: Authorised,
    limit: PageLimit = 20,
    offset: PageOffset = 0,
    access_scope: AccessScope = "owned",
    project_id: str | None = None,
) -> TrainingRuns:
    """Training runs of the access_scope, newest first; with project_id, the runs of sessions with that label.

    limit, offset: which part of the list. call: whose runs they are.
    """
    owner = call.visible(access_scope)
    page = await asyncio.to_thread(call.journal.models.runs, owner, limit=limit, offset=offset, project_id=project_id)
    return TrainingRuns(
        training_runs=[_training_run(row) for row in page.rows],
        cursor=Cursor(offset=offset, limit=page.step(limit), total_count=page.total),
    )


@router.get("/training_runs/{run_id}", response_model_exclude_none=True)
async def training_run(run_id: str, call: Authorised, access_scope: AccessScope = "owned") -> TrainingRun:
    """One training run with its newest checkpoints."""
    return _training_run(await asyncio.to_thread(call.journal.models.run, run_id, call.visible(access_scope)))


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

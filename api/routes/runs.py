"""Training runs, as people look at them afterwards."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter

from tinkerflow.api.deps import Authorised, PageLimit, PageOffset
from tinkerflow.api.models import Cursor, TrainingRun, TrainingRuns
from tinkerflow.api.routes.weights import checkpoint
from tinkerflow.api.scope import AccessScope, visible
from tinkerflow.backend.journal import ModelState, RunView

router = APIRouter()


@router.get("/training_runs", response_model_exclude_none=True)
async def training_runs(
    call: Authorised,
    limit: PageLimit = 20,
    offset: PageOffset = 0,
    access_scope: AccessScope = "owned",
    project_id: str | None = None,
) -> TrainingRuns:
    """Training runs, newest first; with project_id those of sessions in that project."""
    owner = visible(call, access_scope)
    page = await asyncio.to_thread(call.journal.training_runs, owner, limit=limit, offset=offset, project_id=project_id)
    return TrainingRuns(
        training_runs=[_training_run(row) for row in page.rows],
        cursor=Cursor(offset=offset, limit=limit, total_count=page.total),
    )


@router.get("/training_runs/{run_id}", response_model_exclude_none=True)
async def training_run(run_id: str, call: Authorised, access_scope: AccessScope = "owned") -> TrainingRun:
    """One training run with its newest checkpoints."""
    return _training_run(await asyncio.to_thread(call.journal.training_run, run_id, visible(call, access_scope)))


def _training_run(run: RunView) -> TrainingRun:
    model = run.model
    return TrainingRun(
        training_run_id=model.id,
        base_model=model.base_model,
        model_owner=model.owner,
        corrupted=model.state is ModelState.LOST,
        lora_rank=model.rank,
        last_request_time=model.last_request_at,
        last_checkpoint=checkpoint(run.last_checkpoint) if run.last_checkpoint else None,
        last_sampler_checkpoint=checkpoint(run.last_sampler_checkpoint) if run.last_sampler_checkpoint else None,
        user_metadata=dict(model.user_metadata),
    )

"""Training runs, as people look at them afterwards."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query

from api.deps import Authorised
from api.models import Cursor, TrainingRun, TrainingRuns
from api.routes.weights import checkpoint
from backend.journal import ModelState, RunView

router = APIRouter()


@router.get("/training_runs", response_model_exclude_none=True)
async def training_runs(
    call: Authorised,
    limit: Annotated[int, Query(ge=1, le=1000)] = 20,
    offset: Annotated[int, Query(ge=0)] = 0,
) -> TrainingRuns:
    """The owner's training runs, newest first."""
    page = await asyncio.to_thread(call.journal.training_runs, call.owner, limit=limit, offset=offset)
    return TrainingRuns(
        training_runs=[_training_run(row) for row in page.rows],
        cursor=Cursor(offset=offset, limit=limit, total_count=page.total),
    )


@router.get("/training_runs/{run_id}", response_model_exclude_none=True)
async def training_run(run_id: str, call: Authorised) -> TrainingRun:
    """One training run with its newest checkpoints."""
    return _training_run(await asyncio.to_thread(call.journal.training_run, run_id, call.owner))


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

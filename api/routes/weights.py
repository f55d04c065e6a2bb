"""Saves weights, and lists, describes, publishes and deletes checkpoints."""

from __future__ import annotations

import asyncio

from fastapi.responses import Response

from tinkerflow.api.call import Authorized, PageLimit, PageOffset, Router
from tinkerflow.api.checkpoints import CHECKPOINT, CheckpointDetails, checkpoint
from tinkerflow.api.openapi import takes
from tinkerflow.api.schemas import Cursor, Wire
from tinkerflow.api.submit import submit_for_model
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.journal import CheckpointKind, Kind
from tinkerflow.backend.spec.optimizers import OPTIMIZERS
from tinkerflow.backend.store import CheckpointPath
from tinkerflow.backend.wire import OnModel, SaveExternal, SaveForSampler, SaveWeights, TtlSeconds, parse

router = Router(busy=4)

_MOST_PAGES = 16  # pages of 4 MiB in a complete list
# The SDK gives a retried unnamed save a new number, although it is the same save.
_RENUMBERED = ("sampling_session_seq_id",)


class CheckpointList(Wire):
    """A list of checkpoints, newest first."""

    checkpoints: list[CheckpointDetails]
    cursor: Cursor | None = None


class WeightsPath(Wire):
    """The requested checkpoint, as a tinker:// path."""

    tinker_path: str


class WeightsInfo(Wire):
    """The properties of a checkpoint that a client needs before loading it."""

    base_model: str
    is_lora: bool
    lora_rank: int
    train_unembed: bool
    train_mlp: bool
    train_attn: bool
    optimizer_config: dict[str, str | int]


@router.post("/save_weights", openapi_extra=takes(OnModel, SaveWeights))
async def save_weights(call: Authorized) -> Response:
    """Accept a save of the training state."""
    return await submit_for_model(call, Kind.SAVE_WEIGHTS, SaveWeights.from_values)


@router.post("/save_weights_for_sampler", openapi_extra=takes(OnModel, SaveForSampler))
async def save_weights_for_sampler(call: Authorized) -> Response:
    """Accept a save for sampling. A named save is stored. An unnamed save opens a sampling session."""
    return await submit_for_model(call, Kind.SAVE_FOR_SAMPLER, SaveForSampler.from_values, not_content=_RENUMBERED)


@router.post("/save_weights_external", openapi_extra=takes(OnModel, SaveExternal))
async def save_weights_external(call: Authorized) -> Response:
    """Accept an export of the weights for download."""
    return await submit_for_model(call, Kind.SAVE_EXTERNAL, SaveExternal.from_values)


@router.get("/checkpoints", response_model_exclude_none=True)
async def user_checkpoints(
    call: Authorized,
    limit: PageLimit = 100,
    offset: PageOffset = 0,
) -> CheckpointList:
    """All checkpoints of the owner, newest first."""
    page = await asyncio.to_thread(call.journal.checkpoints.page, call.owner, limit=limit, offset=offset)
    return CheckpointList(
        checkpoints=[checkpoint(row) for row in page.rows],
        cursor=Cursor(offset=offset, limit=page.step(limit), total_count=page.total),
    )


@router.get("/training_runs/{run_id}/checkpoints", response_model_exclude_none=True)
async def run_checkpoints(run_id: str, call: Authorized) -> CheckpointList:
    """All checkpoints of one training run, newest first. 400: there are too many for one answer."""

    def read() -> CheckpointList:
        found: dict[str, CheckpointDetails] = {}  # by path, because a save may shift a row to the next page
        for _ in range(_MOST_PAGES):
            page = call.journal.checkpoints.page(call.owner, run_id=run_id, limit=100_000, offset=len(found))
            found |= {row.path: checkpoint(row) for row in page.rows}
            if not page.cut:
                return CheckpointList(checkpoints=list(found.values()))
        raise UserError(
            f"training run {run_id!r} has {page.total} checkpoints with long metadata: must be fewer to be listed at "
            "once; /api/v1/checkpoints lists them in pages"
        )

    return await asyncio.to_thread(read)


@router.delete(f"{CHECKPOINT}", status_code=204)
async def delete_checkpoint(run_id: str, kind: CheckpointKind, name: str, call: Authorized) -> None:
    """Delete a checkpoint. It becomes unreadable immediately; the engine removes its files within seconds."""
    await asyncio.to_thread(call.journal.checkpoints.delete, _path(run_id, kind, name), call.owner, call.key_id)


@router.post(f"{CHECKPOINT}/publish", status_code=204)
async def publish(run_id: str, kind: CheckpointKind, name: str, call: Authorized) -> None:
    """Let all keys read a checkpoint. Repeats succeed, because the SDK would retry a 409 for minutes."""
    path = _path(run_id, kind, name)
    await asyncio.to_thread(call.journal.checkpoints.publish, path, call.owner, key_id=call.key_id)


@router.delete(f"{CHECKPOINT}/publish", status_code=204)
async def unpublish(run_id: str, kind: CheckpointKind, name: str, call: Authorized) -> None:
    """Let only the checkpoint's own project read it again. Repeats succeed."""
    path = _path(run_id, kind, name)
    await asyncio.to_thread(call.journal.checkpoints.publish, path, call.owner, public=False, key_id=call.key_id)


@router.put(f"{CHECKPOINT}/ttl", status_code=204, openapi_extra=takes(TtlSeconds))
async def set_ttl(run_id: str, kind: CheckpointKind, name: str, call: Authorized) -> None:
    """Let a checkpoint expire `ttl_seconds` from now, or never if the value is null."""
    values = parse(await call.body())
    if "ttl_seconds" not in values:
        raise UserError("ttl_seconds is absent: must be a number of seconds, or null for never")
    seconds = TtlSeconds.from_values(values).ttl_seconds
    await asyncio.to_thread(
        call.journal.checkpoints.set_ttl, _path(run_id, kind, name), call.owner, seconds, call.key_id
    )


@router.post("/weights_info", openapi_extra=takes(WeightsPath))
async def weights_info(call: Authorized) -> WeightsInfo:
    """The properties of a checkpoint that a client needs before loading it."""
    body = await call.parsed(WeightsPath)
    saved = await asyncio.to_thread(call.journal.checkpoints.get, body.tinker_path, call.owner)
    config = OPTIMIZERS[saved.optimizer].config
    return WeightsInfo.of(saved, is_lora=saved.rank > 0, lora_rank=saved.rank, optimizer_config=config)


def _path(run_id: str, kind: CheckpointKind, name: str) -> str:
    return str(CheckpointPath(run_id, kind, name))

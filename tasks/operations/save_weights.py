"""save_weights: a training checkpoint (adapter and optimizer) in the store."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial

from tinkerflow.backend.commands import AdapterState, ExportAdapter
from tinkerflow.backend.index import row_of
from tinkerflow.backend.journal import CheckpointKind, CheckpointSaved, Kind, Outcome, Pending, UsageKind, Used
from tinkerflow.backend.store import CheckpointMeta, CheckpointPath
from tinkerflow.backend.wire import SaveWeights, encode_saved
from tinkerflow.tasks.execution.context import ExecutionContext
from tinkerflow.tasks.execution.sequencer import Slot

SAVES = frozenset((Kind.SAVE_WEIGHTS, Kind.SAVE_FOR_SAMPLER, Kind.SAVE_EXTERNAL))  # what may step aside (turns.py)


async def execute(context: ExecutionContext, request: Pending, slot: Slot) -> Outcome:
    """Copy the state at this point of the line, then write it. A name is never reused.

    Training goes on meanwhile, and is answered.
    """
    wanted = SaveWeights.decode(request.payload)
    state = await export_aside(context, request, slot)
    effect = await save(
        context,
        request,
        CheckpointKind.WEIGHTS,
        wanted.name,
        state,
        ttl_seconds=wanted.ttl_seconds,
        user_metadata=wanted.user_metadata,
        overwrite=wanted.overwrite,
    )
    return request.done(encode_saved(effect.path), "json", effect, one_checkpoint(context, request))


async def export_aside(context: ExecutionContext, request: Pending, slot: Slot) -> AdapterState:
    """The state that a save under a name writes. With it the save is aside, and every earlier one is settled."""
    state = await export(context, request, slot)
    await slot.step_aside()
    await slot.settled()  # a later save must not overtake an earlier one
    return state


async def export(context: ExecutionContext, request: Pending, slot: Slot) -> AdapterState:
    """The state at the save's place in the line, which a replay may have passed already."""
    async with slot:
        if (held := context.exported.pop(request.id, None)) is not None:
            return held
        command = ExportAdapter(str(request.model_id), optimizer=request.kind is Kind.SAVE_WEIGHTS)
        reply = context.send(command, AdapterState)
    return await reply


async def save(
    context: ExecutionContext,
    request: Pending,
    kind: CheckpointKind,
    name: str,
    state: AdapterState,
    *,
    ttl_seconds: int | None,
    user_metadata: Mapping[str, str] | None = None,
    overwrite: bool = False,
    recipients: Sequence[str] = (),
) -> CheckpointSaved:
    """Commit `state` to the store under the request's model; the row that goes with it.

    A name whose checkpoint was deleted or expired is free, whether or not its files are gone by now. recipients: who
    can read an export.
    """
    run_id = str(request.model_id)
    expires = None if ttl_seconds is None else context.clock.now() + timedelta(seconds=ttl_seconds)
    meta = CheckpointMeta(
        base_model=context.card.name,
        owner=request.owner,
        user_metadata=user_metadata or {},
        expires_at=expires,
        request_id=request.id,
        generation=context.pool.generation,
        run_metadata=(await context.read(context.journal.models.get, run_id, None)).user_metadata,
    )
    path = str(CheckpointPath(run_id, kind, name))
    over = overwrite or await context.read(context.journal.checkpoints.is_gone, path)
    if kind is CheckpointKind.EXTERNAL_WEIGHTS:
        write = partial(context.store.export, run_id, name, state, meta, recipients=recipients, overwrite=over)
    else:
        write = partial(context.store.save, run_id, kind, name, state, meta, overwrite=over)
    return row_of(await asyncio.to_thread(write))


def one_checkpoint(context: ExecutionContext, request: Pending) -> Used:
    """That the request saved one."""
    return Used(request.session_id, context.card.name, UsageKind.CHECKPOINT, 1)

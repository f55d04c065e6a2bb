"""save_weights: a training checkpoint (adapter and optimizer) in the store."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial

from tinkerflow.backend.commands import AdapterState, ExportAdapter
from tinkerflow.backend.index import row_of
from tinkerflow.backend.journal import CheckpointKind, CheckpointSaved, Kind, Outcome, UsageKind, Used
from tinkerflow.backend.store import CheckpointMeta, CheckpointPath
from tinkerflow.backend.wire import SaveWeights, encode_saved
from tinkerflow.tasks.execution.context import Execution


async def execute(execution: Execution) -> Outcome:
    """Copy the state at this place in the order, then write it while training goes on. A name is never reused."""
    wanted = SaveWeights.decode(execution.request.payload)
    state = await copy_and_detach(execution)
    effect = await save(
        execution,
        CheckpointKind.WEIGHTS,
        wanted.name,
        state,
        ttl_seconds=wanted.ttl_seconds,
        user_metadata=wanted.user_metadata,
        overwrite=wanted.overwrite,
    )
    return execution.request.done(encode_saved(effect.path), "json", effect, one_checkpoint(execution))


async def copy_and_detach(execution: Execution) -> AdapterState:
    """The state that a save under a name writes; the save is detached then, and every earlier save has ended."""
    state = await copy(execution)
    await execution.slot.detach()
    await execution.slot.earlier_saves()  # a later save must not overtake an earlier one
    return state


async def copy(execution: Execution) -> AdapterState:
    """The model's state at the save's place in the order. A replay may have passed that place, and copied it."""
    async with execution.slot:
        if execution.copy is not None:
            return execution.copy
        with_optimizer = execution.request.kind is Kind.SAVE_WEIGHTS
        reply = execution.send(ExportAdapter(execution.model_id, optimizer=with_optimizer), AdapterState)
    return await reply


async def save(
    execution: Execution,
    kind: CheckpointKind,
    name: str,
    state: AdapterState,
    *,
    ttl_seconds: int | None,
    user_metadata: Mapping[str, str] | None = None,
    overwrite: bool = False,
    recipients: Sequence[str] = (),
) -> CheckpointSaved:
    """Commit `state` to the store as the checkpoint `name` of this `kind`, of the request's model; its row.

    execution: of the save. ttl_seconds: when it expires; None: never. user_metadata: for people, none by default.
    overwrite: a checkpoint of this name may be replaced; a name whose checkpoint was deleted or has expired is free
    anyway. recipients: the keys that can decrypt an export; empty: it is not encrypted. StoreError when the store
    fails, UserError when the name is taken.
    """
    context, request, run_id = execution.context, execution.request, execution.model_id
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


def one_checkpoint(execution: Execution) -> Used:
    """The usage of a request that saved a checkpoint."""
    return Used(execution.request.session_id, execution.context.card.name, UsageKind.CHECKPOINT, 1)

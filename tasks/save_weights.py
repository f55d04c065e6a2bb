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
from tinkerflow.backend.wire import decode_save_weights, encode_saved
from tinkerflow.tasks.runtime import Runtime
from tinkerflow.tasks.turns import Turn

SAVES = frozenset((Kind.SAVE_WEIGHTS, Kind.SAVE_FOR_SAMPLER, Kind.SAVE_EXTERNAL))  # what may step aside (turns.py)


async def execute(runtime: Runtime, request: Pending, turn: Turn) -> Outcome:
    """Copy the state at this point of the line, then write it. A name is never reused.

    Training goes on meanwhile, and is answered.
    """
    wanted = decode_save_weights(request.payload)
    state = await export_aside(runtime, request, turn)
    effect = await save(
        runtime,
        request,
        CheckpointKind.WEIGHTS,
        wanted.name,
        state,
        ttl_seconds=wanted.ttl_seconds,
        user_metadata=wanted.user_metadata,
        overwrite=wanted.overwrite,
    )
    return request.done(encode_saved(effect.path), "json", effect, one_checkpoint(runtime, request))


async def export_aside(runtime: Runtime, request: Pending, turn: Turn) -> AdapterState:
    """The state that a save under a name writes. With it the save is aside, and every earlier one is settled."""
    state = await export(runtime, request, turn)
    await turn.step_aside()
    await turn.settled()  # a later save must not overtake an earlier one
    return state


async def export(runtime: Runtime, request: Pending, turn: Turn) -> AdapterState:
    """The state at the save's place in the line, which a replay may have passed already."""
    async with turn:
        if (held := runtime.exported.pop(request.id, None)) is not None:
            return held
        command = ExportAdapter(str(request.model_id), optimizer=request.kind is Kind.SAVE_WEIGHTS)
        reply = runtime.send(command, AdapterState)
    return await reply


async def save(
    runtime: Runtime,
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
    expires = None if ttl_seconds is None else runtime.clock.now() + timedelta(seconds=ttl_seconds)
    meta = CheckpointMeta(
        base_model=runtime.card.name,
        owner=request.owner,
        user_metadata=user_metadata or {},
        expires_at=expires,
        request_id=request.id,
        generation=runtime.pool.generation,
        run_metadata=(await runtime.read(runtime.journal.model, run_id, None)).user_metadata,
    )
    path = str(CheckpointPath(run_id, kind, name))
    over = overwrite or await runtime.read(runtime.journal.checkpoint_is_gone, path)
    if kind is CheckpointKind.EXTERNAL_WEIGHTS:
        write = partial(runtime.store.export, run_id, name, state, meta, recipients=recipients, overwrite=over)
    else:
        write = partial(runtime.store.save, run_id, kind, name, state, meta, overwrite=over)
    return row_of(await asyncio.to_thread(write))


def one_checkpoint(runtime: Runtime, request: Pending) -> Used:
    """That the request saved one."""
    return Used(request.session_id, runtime.card.name, UsageKind.CHECKPOINT, 1)

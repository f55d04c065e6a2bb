"""save_weights_for_sampler: named, a checkpoint to sample from; unnamed, a snapshot in memory and its sampler.

An unnamed one of kind `snapshot` keeps its weights. It is answered as soon as they are published in the worker group,
and stored beside what follows it: a sampler does not wait for the store. How that is safe is told in recovery.py. While
the store fails, it does wait, and fails with it.

Those of kind `inflight` share one snapshot per model, and every later inflight save replaces its weights, for new
requests of all these samplers and for those that are being decoded: they keep what they have cached and go on with the
new weights from their next chunk. The replacement comes after the commit, so the samplers never use what could be lost,
and a save that fails changes nothing. When the worker group dies, samplers come back with the last weights that were
committed and answered; a request that had begun is decoded from its beginning with the same seed, but where in it the
weights change is then another place, so its tokens may be others.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from tinkerflow.backend.commands import (
    AdapterState,
    Done,
    DropSnapshot,
    ExportAdapter,
    MoveSnapshot,
    PublishSnapshot,
    SnapshotHeld,
)
from tinkerflow.backend.errors import FencedError, GroupFailedError, StoreError
from tinkerflow.backend.ids import inflight_id, sampler_id
from tinkerflow.backend.journal import (
    CheckpointKind,
    Effect,
    NewSampler,
    Outcome,
    Pending,
    SamplerOpened,
    SnapshotTaken,
)
from tinkerflow.backend.retry import backoff
from tinkerflow.backend.wire import SaveForSampler, encode_sampler_opened, encode_saved
from tinkerflow.tasks.execution.commit import commit, record
from tinkerflow.tasks.execution.context import ExecutionContext
from tinkerflow.tasks.execution.sequencer import Slot
from tinkerflow.tasks.operations.save_weights import export_aside, one_checkpoint, save

log = logging.getLogger(__name__)


async def execute(context: ExecutionContext, request: Pending, slot: Slot) -> Outcome:
    """Freeze the weights at this point of the line; the answer names the checkpoint, or the sampler."""
    wanted = SaveForSampler.decode(request.payload)
    if wanted.sampling_session_seq_id is not None:
        opened = sampler_id(request.session_id, wanted.sampling_session_seq_id)
        return await _publish(context, request, slot, opened, inflight=wanted.inflight)
    return await _save(context, request, slot, wanted)


async def _publish(context: ExecutionContext, request: Pending, slot: Slot, opened: str, *, inflight: bool) -> Outcome:
    """Publish, and have the same weights in the store, so that the sampler `opened` outlives the worker group."""
    if request.answered:  # in a worker group that has ended: a replay has copied what it published
        async with slot:
            context.rest.append(partial(_store, context, request, slot, context.exported.pop(request.id)))
        return _opened(context, request, opened, request.id)
    model_id = str(request.model_id)
    async with slot:
        # The request's id, and not the sampler's, names the snapshot: the client chooses the latter's number.
        reply = context.send(PublishSnapshot(model_id, request.id), SnapshotHeld)
        copy = context.send(ExportAdapter(model_id, optimizer=False), AdapterState)
    host_bytes = (await reply).host_bytes
    context.snapshots.published(request.id, host_bytes)
    if not (inflight or slot.line.failing):
        context.rest.append(partial(_store_copy, context, request, slot, copy))
        return replace(_opened(context, request, opened, request.id), replays=True)
    snapshot_id = inflight_id(model_id) if inflight else request.id
    try:
        taken = await _commit(context, request, await copy, snapshot_id)
        slot.line.failing = False
        if inflight:
            await slot.to_answer()  # an earlier save must not replace a later one
            moved = context.send(MoveSnapshot(request.id, snapshot_id), Done)
            context.snapshots.moving(request.id, snapshot_id)
            await moved
            context.snapshots.published(snapshot_id, host_bytes)
        context.snapshots.stored(snapshot_id)
    except Exception:
        context.snapshots.dropped(request.id)
        with suppress(GroupFailedError):
            await context.send(DropSnapshot(request.id), Done)
        raise
    return _opened(context, request, opened, snapshot_id, taken)


async def _store_copy(
    context: ExecutionContext, request: Pending, slot: Slot, copy: asyncio.Task[AdapterState]
) -> None:
    """Not aside before the copy is there: nothing that happens to the group may touch who is aside."""
    try:
        state = await copy
    except GroupFailedError:
        raise
    except Exception:
        log.exception("what %s published cannot be copied; it is stored when its model is next restored", request.id)
    else:
        await _store(context, request, slot, state)


async def _store(context: ExecutionContext, request: Pending, slot: Slot, state: AdapterState) -> None:
    """Commit what was published, as often as it takes while a sampler uses it; whatever fails does not end the lane."""
    await slot.step_aside()
    with context.snapshots.storing(request.id):
        for failures in itertools.count(1):
            try:
                if await context.read(context.journal.samplers.unused_snapshots, {request.id}):
                    return
                await record(context, await _commit(context, request, state, request.id))
                context.snapshots.stored(request.id)
                slot.line.failing = False
                return
            except FencedError:  # another engine has this model, and stores it
                raise
            except Exception as error:
                slot.line.failing = True
                pause, unknown = backoff(failures), not isinstance(error, StoreError)
                text = "what %s published is not stored, again in %.1f s: %s"
                log.warning(text, request.id, pause, error, exc_info=unknown)
            await asyncio.sleep(pause)


def _commit(
    context: ExecutionContext, request: Pending, state: AdapterState, snapshot_id: str
) -> Awaitable[SnapshotTaken]:
    return commit(context, str(request.model_id), request.owner, int(request.seq_id or 0), state, snapshot_id)


def _opened(context: ExecutionContext, request: Pending, opened: str, snapshot_id: str, *effects: Effect) -> Outcome:
    sampler = NewSampler(opened, request.session_id, request.owner, context.card.name, snapshot_id=snapshot_id)
    return request.done(encode_sampler_opened(opened), "json", SamplerOpened(sampler), *effects)


async def _save(context: ExecutionContext, request: Pending, slot: Slot, wanted: SaveForSampler) -> Outcome:
    state = await export_aside(context, request, slot)
    effect = await save(
        context,
        request,
        CheckpointKind.SAMPLER_WEIGHTS,
        str(wanted.name),
        state,
        ttl_seconds=wanted.ttl_seconds,
        user_metadata=wanted.user_metadata,
    )
    return request.done(
        encode_saved(effect.path, kind="save_weights_for_sampler"), "json", effect, one_checkpoint(context, request)
    )

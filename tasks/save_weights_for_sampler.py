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
from tinkerflow.backend.processes import backoff
from tinkerflow.backend.wire import SaveForSampler, decode_save_for_sampler, encode_sampler_opened, encode_saved
from tinkerflow.tasks.commit import commit, record
from tinkerflow.tasks.runtime import Runtime
from tinkerflow.tasks.save_weights import export_aside, one_checkpoint, save
from tinkerflow.tasks.turns import Turn

log = logging.getLogger(__name__)


async def execute(runtime: Runtime, request: Pending, turn: Turn) -> Outcome:
    """Freeze the weights at this point of the line; the answer names the checkpoint, or the sampler."""
    wanted = decode_save_for_sampler(request.payload)
    if wanted.sampling_session_seq_id is not None:
        opened = sampler_id(request.session_id, wanted.sampling_session_seq_id)
        return await _publish(runtime, request, turn, opened, inflight=wanted.inflight)
    return await _save(runtime, request, turn, wanted)


async def _publish(runtime: Runtime, request: Pending, turn: Turn, opened: str, *, inflight: bool) -> Outcome:
    """Publish, and have the same weights in the store, so that the sampler `opened` outlives the worker group."""
    if request.answered:  # in a worker group that has ended: a replay has copied what it published
        async with turn:
            runtime.rest.append(partial(_store, runtime, request, turn, runtime.exported.pop(request.id)))
        return _opened(runtime, request, opened, request.id)
    model_id = str(request.model_id)
    async with turn:
        # The request's id, and not the sampler's, names the snapshot: the client chooses the latter's number.
        reply = runtime.send(PublishSnapshot(model_id, request.id), SnapshotHeld)
        copy = runtime.send(ExportAdapter(model_id, optimizer=False), AdapterState)
    host_bytes = (await reply).host_bytes
    runtime.snapshots.published(request.id, host_bytes)
    if not (inflight or turn.line.failing):
        runtime.rest.append(partial(_store_copy, runtime, request, turn, copy))
        return replace(_opened(runtime, request, opened, request.id), replays=True)
    snapshot_id = inflight_id(model_id) if inflight else request.id
    try:
        taken = await _commit(runtime, request, await copy, snapshot_id)
        turn.line.failing = False
        if inflight:
            await turn.to_answer()  # an earlier save must not replace a later one
            moved = runtime.send(MoveSnapshot(request.id, snapshot_id), Done)
            runtime.snapshots.moving(request.id, snapshot_id)
            await moved
            runtime.snapshots.published(snapshot_id, host_bytes)
        runtime.snapshots.stored(snapshot_id)
    except Exception:
        runtime.snapshots.dropped(request.id)
        with suppress(GroupFailedError):
            await runtime.send(DropSnapshot(request.id), Done)
        raise
    return _opened(runtime, request, opened, snapshot_id, taken)


async def _store_copy(runtime: Runtime, request: Pending, turn: Turn, copy: asyncio.Task[AdapterState]) -> None:
    """Not aside before the copy is there: nothing that happens to the group may touch who is aside."""
    try:
        state = await copy
    except GroupFailedError:
        raise
    except Exception:
        log.exception("what %s published cannot be copied; it is stored when its model is next restored", request.id)
    else:
        await _store(runtime, request, turn, state)


async def _store(runtime: Runtime, request: Pending, turn: Turn, state: AdapterState) -> None:
    """Commit what was published, as often as it takes while a sampler uses it; whatever fails does not end the lane."""
    await turn.step_aside()
    with runtime.snapshots.storing(request.id):
        for failures in itertools.count(1):
            try:
                if await runtime.read(runtime.journal.unused_snapshots, {request.id}):
                    return
                await record(runtime, await _commit(runtime, request, state, request.id))
                runtime.snapshots.stored(request.id)
                turn.line.failing = False
                return
            except FencedError:  # another engine has this model, and stores it
                raise
            except Exception as error:
                turn.line.failing = True
                pause, unknown = backoff(failures), not isinstance(error, StoreError)
                text = "what %s published is not stored, again in %.1f s: %s"
                log.warning(text, request.id, pause, error, exc_info=unknown)
            await asyncio.sleep(pause)


def _commit(runtime: Runtime, request: Pending, state: AdapterState, snapshot_id: str) -> Awaitable[SnapshotTaken]:
    return commit(runtime, str(request.model_id), request.owner, int(request.seq_id or 0), state, snapshot_id)


def _opened(runtime: Runtime, request: Pending, opened: str, snapshot_id: str, *effects: Effect) -> Outcome:
    sampler = NewSampler(opened, request.session_id, request.owner, runtime.card.name, snapshot_id=snapshot_id)
    return request.done(encode_sampler_opened(opened), "json", SamplerOpened(sampler), *effects)


async def _save(runtime: Runtime, request: Pending, turn: Turn, wanted: SaveForSampler) -> Outcome:
    state = await export_aside(runtime, request, turn)
    effect = await save(
        runtime,
        request,
        CheckpointKind.SAMPLER_WEIGHTS,
        str(wanted.name),
        state,
        ttl_seconds=wanted.ttl_seconds,
        user_metadata=wanted.user_metadata,
    )
    return request.done(
        encode_saved(effect.path, kind="save_weights_for_sampler"), "json", effect, one_checkpoint(runtime, request)
    )

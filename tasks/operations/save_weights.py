"""The saves: save_weights, save_weights_for_sampler, and save_weights_external.

A named save copies the model's state at its place in the order, and writes it to the store while training continues.
The state includes the optimizer for further training (save_weights), and omits it for sampling
(save_weights_for_sampler). An export is a PEFT folder for download, encrypted if there are recipients
(save_weights_external).

An unnamed save_weights_for_sampler makes a snapshot in memory and a sampler for it. The weights of a snapshot of kind
`snapshot` never change. The save is answered as soon as they are published in the worker group, and stored while later
operations are executed (sequencer.py). A sampler waits for the store only if the store fails.

Samplers of kind `inflight` share one snapshot per model. Every later inflight save replaces its weights for all these
samplers. Requests that are being decoded continue with the new weights from their next chunk. They keep the keys and
values of the old weights, unless the save or the setting requests recomputation. The weights are replaced after the
commit, so samplers never use weights that could be lost, and a failed save changes nothing. After a worker group ends,
samplers use the last weights that were committed and answered. A request that had begun is decoded again from its
beginning with the same seed. Its tokens may differ, because the weights change at another token.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial

from tinkerflow.backend.core.errors import FencedError, GroupFailedError
from tinkerflow.backend.core.ids import inflight_id, sampler_id
from tinkerflow.backend.core.retry import retry
from tinkerflow.backend.journal import (
    CheckpointKind,
    CheckpointSaved,
    Effect,
    Kind,
    NewSampler,
    Outcome,
    SamplerOpened,
    UsageKind,
    Used,
)
from tinkerflow.backend.spec.commands import (
    AdapterState,
    Done,
    DropSnapshot,
    ExportAdapter,
    MoveSnapshot,
    PublishSnapshot,
    SnapshotHeld,
)
from tinkerflow.backend.store import CheckpointPath
from tinkerflow.backend.wire import SaveExternal, SaveForSampler, SaveWeights, encode_sampler_opened, encode_saved
from tinkerflow.tasks.execution.operation import Execution
from tinkerflow.tasks.execution.sequencer import SaveState
from tinkerflow.tasks.execution.state_transfers import commit, drop_surplus_full_models, meta_of, record

log = logging.getLogger(__name__)


async def save_weights(execution: Execution) -> Outcome:
    """Copy the state at this place in the order, then write it while training continues. A name is never reused."""
    wanted = SaveWeights.decode(execution.request.payload)
    saved = await _save(
        execution,
        CheckpointKind.WEIGHTS,
        wanted.name,
        ttl_seconds=wanted.ttl_seconds,
        user_metadata=wanted.user_metadata,
        overwrite=wanted.overwrite,
    )
    return _answered(execution, saved, encode_saved(saved.path))


async def save_weights_for_sampler(execution: Execution) -> Outcome:
    """Freeze the weights at this place in the order. The answer names the checkpoint or the sampler."""
    wanted = SaveForSampler.decode(execution.request.payload)
    if wanted.sampling_session_seq_id is None:
        saved = await _save(
            execution,
            CheckpointKind.SAMPLER_WEIGHTS,
            str(wanted.name),
            ttl_seconds=wanted.ttl_seconds,
            user_metadata=wanted.user_metadata,
        )
        return _answered(execution, saved, encode_saved(saved.path, kind="save_weights_for_sampler"))
    context, request, model_id = execution.context, execution.request, execution.model_id
    # A snapshot is named by the request's id, because the client chooses the number in the sampler's id.
    snapshot_id = inflight_id(model_id) if wanted.inflight else request.id
    opened = sampler_id(request.session_id, wanted.sampling_session_seq_id)
    sampler = NewSampler(opened, request.session_id, request.owner, context.card.name, snapshot_id=snapshot_id)
    if request.answered:  # a worker group that has ended published the weights; a replay has copied them
        return await _store_again(execution, sampler)
    await context.read(context.journal.samplers.check_free, sampler)
    recompute = (wanted.kv_cache or context.inflight_kv_cache) == "recompute"
    return await _publish(execution, sampler, inflight=wanted.inflight, recompute=recompute)


async def save_weights_external(execution: Execution) -> Outcome:
    """Copy the weights at this place in the order, then write them while training continues."""
    wanted = SaveExternal.decode(execution.request.payload)
    saved = await _save(
        execution,
        CheckpointKind.EXTERNAL_WEIGHTS,
        wanted.name,
        ttl_seconds=wanted.ttl_seconds,
        recipients=wanted.recipients,
    )
    result = encode_saved(saved.path, kind="save_weights_external", size_bytes=saved.size_bytes)
    return _answered(execution, saved, result)


# ------------------------------------------------------------------ named saves
async def copy_state(execution: Execution) -> AdapterState:
    """Copy the model's state at the save's place in the order, unless a replay has copied it there."""
    async with execution.slot:
        if execution.copy is not None:
            return execution.copy
        with_optimizer = execution.request.kind is Kind.SAVE_WEIGHTS
        reply = execution.send(ExportAdapter(execution.model_id, optimizer=with_optimizer), AdapterState)
    return await reply


async def _save(
    execution: Execution,
    kind: CheckpointKind,
    name: str,
    *,
    ttl_seconds: int | None,
    user_metadata: Mapping[str, str] | None = None,
    overwrite: bool = False,
    recipients: Sequence[str] = (),
) -> CheckpointSaved:
    """Copy the state, and commit it to the store as the checkpoint `name` of this `kind`. Returns its row.

    The save is detached once the state is copied. execution: the save's execution. ttl_seconds: seconds until the
    checkpoint expires; None: never. user_metadata: for people, none by default. overwrite: replace a checkpoint of this
    name. The name of a deleted or expired checkpoint can always be reused. recipients: the keys that can decrypt an
    export; without recipients, the export is not encrypted. StoreError: the store failed. UserError: the name is taken.
    """
    state = await copy_state(execution)
    await execution.slot.detach()
    await execution.slot.earlier_saves()  # a later save must not overtake an earlier one
    context, request, run_id = execution.context, execution.request, execution.model_id
    path = str(CheckpointPath(run_id, kind, name))
    known = await context.read(context.journal.checkpoints.before_save, path, run_id)
    expires = None if ttl_seconds is None else context.clock.now() + timedelta(seconds=ttl_seconds)
    meta = replace(
        meta_of(context, request.owner, request.id),
        user_metadata=user_metadata or {},
        expires_at=expires,
        run_metadata=known.run_metadata,
    )
    over = overwrite or known.is_gone
    if kind is CheckpointKind.EXTERNAL_WEIGHTS:
        write = partial(context.store.export, run_id, name, state, meta, recipients=recipients, overwrite=over)
    else:
        write = partial(context.store.save, run_id, kind, name, state, meta, overwrite=over)
    return CheckpointSaved.of(await context.in_store(write))


def _answered(execution: Execution, saved: CheckpointSaved, result: bytes) -> Outcome:
    """The outcome of a named save, with its usage."""
    request, base_model = execution.request, execution.context.card.name
    return request.done(result, "json", saved, Used(request.session_id, base_model, UsageKind.CHECKPOINT, 1))


# ------------------------------------------------------------------ snapshots to sample from
async def _publish(execution: Execution, sampler: NewSampler, *, inflight: bool, recompute: bool) -> Outcome:
    """Publish the weights and store them, so that the sampler outlives the worker group.

    recompute: whether to recompute the keys and values of requests whose weights an inflight save replaces.
    """
    context, request, model_id = execution.context, execution.request, execution.model_id
    async with execution.slot:
        reply = execution.send(PublishSnapshot(model_id, request.id), SnapshotHeld)
        copied = execution.send(ExportAdapter(model_id, optimizer=False), AdapterState)
    held = await reply
    context.snapshots.published(request.id, held)
    if held.on_host:
        await drop_surplus_full_models(context, coming=False)
    if not (inflight or context.saves.store_fails(model_id)):
        execution.then = partial(_store_copy, execution, copied)
        return replace(_opened(execution, sampler), replays=True)
    snapshot_id = str(sampler.snapshot_id)
    try:
        taken = await commit(execution, await copied, snapshot_id)
        context.saves.store_works(model_id)
        if inflight:
            await execution.slot.predecessors()  # an earlier save must not replace a later one
            moved = execution.send(MoveSnapshot(request.id, snapshot_id, recompute), Done)
            context.snapshots.moving(request.id, snapshot_id)
            await moved
            context.snapshots.published(snapshot_id, held)
    except Exception:
        context.snapshots.dropped(request.id)
        with suppress(GroupFailedError):
            await execution.send(DropSnapshot(request.id), Done)
        raise
    return _opened(execution, sampler, taken)


async def _store_again(execution: Execution, sampler: NewSampler) -> Outcome:
    """Store the weights of an answered save whose worker group ended before they were stored."""
    assert execution.copy is not None, f"save {execution.request.id}: the replay copies what is not stored"
    async with execution.slot:
        execution.then = partial(_store, execution, execution.copy)
    return _opened(execution, sampler)


async def _store_copy(execution: Execution, copied: asyncio.Task[AdapterState]) -> SaveState:
    """Wait for the copy, and store it. The save is detached only then, because the worker group may end earlier."""
    try:
        state = await copied
    except GroupFailedError:
        raise
    except Exception:
        text = "the published weights of %s cannot be copied, and are stored when the model is next restored"
        log.exception(text, execution.request.id)
        return SaveState.FAILED
    return await _store(execution, state)


async def _store(execution: Execution, state: AdapterState) -> SaveState:
    """Commit the published weights. Retries while a sampler uses them. No failure ends the model's runner."""
    context, request, saves = execution.context, execution.request, execution.context.saves
    await execution.slot.detach()

    async def store() -> SaveState:
        try:
            if await context.read(context.journal.samplers.unused_snapshots, {request.id}):
                return SaveState.FAILED
            await record(context, await commit(execution, state, request.id))
        except FencedError:  # another engine has taken over this model, and stores its weights
            raise
        except Exception:
            saves.store_failed(request.id)
            raise
        saves.store_works(execution.model_id)
        return SaveState.STORED

    what = f"the published weights of {request.id} are not stored"
    return await retry(store, on=Exception, unless=FencedError, what=what, log=log)


def _opened(execution: Execution, sampler: NewSampler, *effects: Effect) -> Outcome:
    return execution.request.done(encode_sampler_opened(sampler.id), "json", SamplerOpened(sampler), *effects)

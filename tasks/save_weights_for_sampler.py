"""save_weights_for_sampler: named, a checkpoint to sample from; unnamed, a snapshot in memory and its sampler.

An unnamed one of kind `snapshot` keeps its weights. Those of kind `inflight` share one snapshot per model, and every
later inflight save replaces its weights, for new requests of all these samplers and for those that are being decoded:
they keep what they have cached and go on with the new weights from their next chunk. The replacement comes after the
commit, so the samplers never use what could be lost, and a save that fails changes nothing. When the worker group dies,
samplers come back with the last weights that were committed and answered; a request that had begun is decoded from its
beginning with the same seed, but where in it the weights change is then another place, so its tokens may be others.
"""

from __future__ import annotations

from contextlib import suppress

from backend.commands import AdapterState, Done, DropSnapshot, ExportAdapter, MoveSnapshot, PublishSnapshot
from backend.errors import GroupFailedError
from backend.ids import inflight_id, sampler_id
from backend.journal import CheckpointKind, NewSampler, Outcome, Pending, SamplerOpened
from backend.wire import SaveForSampler, decode_save_for_sampler, encode_sampler_opened, encode_saved
from tasks.commit import commit
from tasks.runtime import Runtime
from tasks.save_weights import export_aside, one_checkpoint, save
from tasks.turns import Turn


async def execute(runtime: Runtime, request: Pending, turn: Turn) -> Outcome:
    """Freeze the weights at this point of the line; the answer names the checkpoint, or the sampler."""
    wanted = decode_save_for_sampler(request.payload)
    if wanted.sampling_session_seq_id is not None:
        opened = sampler_id(request.session_id, wanted.sampling_session_seq_id)
        return await _publish(runtime, request, turn, opened, inflight=wanted.inflight)
    return await _save(runtime, request, turn, wanted)


async def _publish(runtime: Runtime, request: Pending, turn: Turn, opened: str, *, inflight: bool) -> Outcome:
    """Publish, and commit the same weights to the store, so that the sampler `opened` outlives the worker group."""
    model_id = str(request.model_id)
    # The request's id, and not the sampler's, names the snapshot: the client chooses the latter's number.
    snapshot_id = inflight_id(model_id) if inflight else request.id
    async with turn:
        reply = runtime.send(PublishSnapshot(model_id, request.id), Done)
        copy = runtime.send(ExportAdapter(model_id, optimizer=False), AdapterState)
    await reply
    runtime.snapshots.published(request.id)
    try:
        taken = await commit(runtime, model_id, request.owner, int(request.seq_id or 0), await copy, snapshot_id)
        if inflight:
            await turn.to_answer()  # an earlier save must not replace a later one
            moved = runtime.send(MoveSnapshot(request.id, snapshot_id), Done)
            runtime.snapshots.moving(request.id, snapshot_id)
            await moved
            runtime.snapshots.published(snapshot_id)
    except Exception:
        runtime.snapshots.dropped(request.id)
        with suppress(GroupFailedError):
            await runtime.send(DropSnapshot(request.id), Done)
        raise
    sampler = NewSampler(opened, request.session_id, request.owner, runtime.card.name, snapshot_id=snapshot_id)
    return request.done(encode_sampler_opened(opened), "json", SamplerOpened(sampler), taken)


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

"""save_weights_for_sampler: named, a checkpoint to sample from; unnamed, a snapshot in memory and its sampler."""

from __future__ import annotations

from backend.commands import AdapterState, Done, ExportAdapter, PublishSnapshot
from backend.ids import sampler_id
from backend.journal import CheckpointKind, NewSampler, Outcome, Pending, SamplerOpened
from backend.wire import SaveForSampler, decode_save_for_sampler, encode_sampler_opened, encode_saved
from tasks.commit import commit
from tasks.runtime import Runtime
from tasks.save_weights import one_checkpoint, save
from tasks.turns import Turn


async def execute(runtime: Runtime, request: Pending, turn: Turn) -> Outcome:
    """Freeze the weights at this point of the line; the answer names the checkpoint, or the sampler."""
    wanted = decode_save_for_sampler(request.payload)
    if wanted.sampling_session_seq_id is not None:
        return await _publish(runtime, request, turn, wanted.sampling_session_seq_id)
    return await _save(runtime, request, turn, wanted)


async def _publish(runtime: Runtime, request: Pending, turn: Turn, seq_id: int) -> Outcome:
    """Publish, and commit the same weights to the store, so that the sampler outlives the worker group."""
    opened, model_id = sampler_id(request.session_id, seq_id), str(request.model_id)
    # The request's id, and not the sampler's, names the snapshot: the client chooses the latter's number.
    async with turn:
        reply = runtime.send(PublishSnapshot(model_id, request.id), Done)
        copy = runtime.send(ExportAdapter(model_id, optimizer=False), AdapterState)
    await reply
    runtime.snapshots.published(request.id)
    taken = await commit(runtime, model_id, request.owner, int(request.seq_id or 0), await copy, request.id)
    sampler = NewSampler(opened, request.session_id, request.owner, runtime.card.name, snapshot_id=request.id)
    return request.done(encode_sampler_opened(opened), "json", SamplerOpened(sampler), taken)


async def _save(runtime: Runtime, request: Pending, turn: Turn, wanted: SaveForSampler) -> Outcome:
    async with turn:
        reply = runtime.send(ExportAdapter(str(request.model_id), optimizer=False), AdapterState)
    state = await reply
    await turn.to_answer()
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

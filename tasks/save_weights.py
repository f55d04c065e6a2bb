"""save_weights: a training checkpoint (adapter and optimizer) in the store."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import timedelta

from backend.commands import AdapterState, ExportAdapter
from backend.journal import CheckpointKind, CheckpointSaved, Outcome, Pending
from backend.store import CheckpointMeta, Saved
from backend.wire import decode_save_weights, encode_saved
from tasks.runtime import Runtime
from tasks.turns import Turn


async def execute(runtime: Runtime, request: Pending, turn: Turn) -> Outcome:
    """Copy the state at this point of the line, then write it; training goes on meanwhile. A name is never reused."""
    wanted = decode_save_weights(request.payload)
    async with turn:
        reply = runtime.send(ExportAdapter(str(request.model_id), optimizer=True), AdapterState)
    state = await reply
    await turn.to_answer()  # a later save must not overtake an earlier one
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
    return request.done(encode_saved(effect.path), "json", effect)


async def save(
    runtime: Runtime,
    request: Pending,
    kind: CheckpointKind,
    name: str,
    state: AdapterState,
    *,
    ttl_seconds: int | None,
    user_metadata: Mapping[str, str],
    overwrite: bool = False,
) -> CheckpointSaved:
    """Commit `state` to the store under the request's model; the row that goes with it."""
    expires = None if ttl_seconds is None else runtime.clock.now() + timedelta(seconds=ttl_seconds)
    meta = CheckpointMeta(
        base_model=runtime.card.name,
        owner=request.owner,
        user_metadata=user_metadata,
        expires_at=expires,
        request_id=request.id,
        generation=runtime.pool.generation,
    )
    saved = await asyncio.to_thread(
        runtime.store.save, str(request.model_id), kind, name, state, meta, overwrite=overwrite
    )
    return _row(saved)


def _row(saved: Saved) -> CheckpointSaved:
    return CheckpointSaved(
        path=saved.path,
        run_id=saved.run_id,
        kind=CheckpointKind(saved.kind),
        name=saved.name,
        owner=saved.meta.owner,
        base_model=saved.meta.base_model,
        rank=saved.spec.rank,
        train_attn=saved.spec.train_attn,
        train_mlp=saved.spec.train_mlp,
        train_unembed=saved.spec.train_unembed,
        step=saved.step,
        size_bytes=saved.size_bytes,
        user_metadata=saved.meta.user_metadata,
        expires_at=saved.meta.expires_at,
    )

"""save_weights_external: the adapter as a PEFT folder to be downloaded, encrypted when recipients are named."""

from __future__ import annotations

from tinkerflow.backend.journal import CheckpointKind, Outcome, Pending
from tinkerflow.backend.wire import decode_save_external, encode_saved
from tinkerflow.tasks.runtime import Runtime
from tinkerflow.tasks.save_weights import export_aside, one_checkpoint, save
from tinkerflow.tasks.turns import Turn


async def execute(runtime: Runtime, request: Pending, turn: Turn) -> Outcome:
    """Copy the weights at this point of the line, then write them; training goes on meanwhile."""
    wanted = decode_save_external(request.payload)
    state = await export_aside(runtime, request, turn)
    effect = await save(
        runtime,
        request,
        CheckpointKind.EXTERNAL_WEIGHTS,
        wanted.name,
        state,
        ttl_seconds=wanted.ttl_seconds,
        recipients=wanted.recipients,
    )
    result = encode_saved(effect.path, kind="save_weights_external", size_bytes=effect.size_bytes)
    return request.done(result, "json", effect, one_checkpoint(runtime, request))

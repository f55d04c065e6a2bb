"""save_weights_external: the adapter as a PEFT folder to be downloaded, encrypted when recipients are named."""

from __future__ import annotations

from tinkerflow.backend.journal import CheckpointKind, Outcome, Pending
from tinkerflow.backend.wire import SaveExternal, encode_saved
from tinkerflow.tasks.execution.context import ExecutionContext
from tinkerflow.tasks.execution.sequencer import Slot
from tinkerflow.tasks.operations.save_weights import export_aside, one_checkpoint, save


async def execute(context: ExecutionContext, request: Pending, slot: Slot) -> Outcome:
    """Copy the weights at this point of the line, then write them; training goes on meanwhile."""
    wanted = SaveExternal.decode(request.payload)
    state = await export_aside(context, request, slot)
    effect = await save(
        context,
        request,
        CheckpointKind.EXTERNAL_WEIGHTS,
        wanted.name,
        state,
        ttl_seconds=wanted.ttl_seconds,
        recipients=wanted.recipients,
    )
    result = encode_saved(effect.path, kind="save_weights_external", size_bytes=effect.size_bytes)
    return request.done(result, "json", effect, one_checkpoint(context, request))

"""save_weights_external: the adapter as a PEFT folder to be downloaded, encrypted when recipients are named."""

from __future__ import annotations

from tinkerflow.backend.journal import CheckpointKind, Outcome
from tinkerflow.backend.wire import SaveExternal, encode_saved
from tinkerflow.tasks.execution.context import Execution
from tinkerflow.tasks.operations.save_weights import copy_and_detach, one_checkpoint, save


async def execute(execution: Execution) -> Outcome:
    """Copy the weights at this place in the order, then write them while training goes on."""
    wanted = SaveExternal.decode(execution.request.payload)
    state = await copy_and_detach(execution)
    effect = await save(
        execution,
        CheckpointKind.EXTERNAL_WEIGHTS,
        wanted.name,
        state,
        ttl_seconds=wanted.ttl_seconds,
        recipients=wanted.recipients,
    )
    result = encode_saved(effect.path, kind="save_weights_external", size_bytes=effect.size_bytes)
    return execution.request.done(result, "json", effect, one_checkpoint(execution))

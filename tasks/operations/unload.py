"""unload: the last operation on a model. The client requests it, or the service when the session is over."""

from __future__ import annotations

from tinkerflow.backend.journal import ModelEnded, ModelState, Outcome
from tinkerflow.backend.spec.commands import Done, DropAdapter
from tinkerflow.backend.wire import encode_unloaded
from tinkerflow.tasks.execution.operation import Execution


async def execute(execution: Execution) -> Outcome:
    """Drop the adapter, if a worker group holds it, and end the model for the reason in the payload."""
    request, model_id = execution.request, execution.model_id
    async with execution.slot:
        reply = None if execution.context.generation is None else execution.send(DropAdapter(model_id), Done)
    if reply is not None:
        await reply
    await execution.slot.predecessors()
    await execution.slot.earlier_saves()  # the end of a model fails all requests that are not answered
    return request.done(
        encode_unloaded(model_id), "json", ModelEnded(model_id, ModelState.UNLOADED, request.payload.decode())
    )

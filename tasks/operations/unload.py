"""unload: the service's own last operation on a model whose session is over."""

from __future__ import annotations

from tinkerflow.backend.commands import Done, DropAdapter
from tinkerflow.backend.journal import ModelEnded, ModelState, Outcome, Pending
from tinkerflow.tasks.execution.context import ExecutionContext
from tinkerflow.tasks.execution.sequencer import Slot


async def execute(context: ExecutionContext, request: Pending, slot: Slot) -> Outcome:
    """Drop the adapter; the model is unloaded, for the reason in the payload. Nobody reads the answer."""
    model_id = str(request.model_id)
    async with slot:
        reply = context.send(DropAdapter(model_id), Done)
    await reply
    await slot.to_answer()
    await slot.settled()  # the end of a model fails what it has not answered
    return request.done(b"{}", "json", ModelEnded(model_id, ModelState.UNLOADED, request.payload.decode()))

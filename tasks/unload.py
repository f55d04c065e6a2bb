"""unload: the service's own last operation on a model whose session is over."""

from __future__ import annotations

from tinkerflow.backend.commands import Done, DropAdapter
from tinkerflow.backend.journal import ModelEnded, ModelState, Outcome, Pending
from tinkerflow.tasks.runtime import Runtime
from tinkerflow.tasks.turns import Turn


async def execute(runtime: Runtime, request: Pending, turn: Turn) -> Outcome:
    """Drop the adapter; the model is unloaded, for the reason in the payload. Nobody reads the answer."""
    model_id = str(request.model_id)
    async with turn:
        reply = runtime.send(DropAdapter(model_id), Done)
    await reply
    await turn.to_answer()
    await turn.settled()  # the end of a model fails what it has not answered
    return request.done(b"{}", "json", ModelEnded(model_id, ModelState.UNLOADED, request.payload.decode()))

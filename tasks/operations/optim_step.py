"""optim_step: one AdamW step with the gradients accumulated so far."""

from __future__ import annotations

from tinkerflow.backend.commands import OptimResult, OptimStep
from tinkerflow.backend.journal import Outcome, Pending, StepMade
from tinkerflow.backend.wire import OptimStepBody, encode_optim_step
from tinkerflow.tasks.execution.context import ExecutionContext
from tinkerflow.tasks.execution.sequencer import Slot


async def execute(context: ExecutionContext, request: Pending, slot: Slot) -> Outcome:
    """Make the step and note in the model's row where it stands."""
    params = OptimStepBody.decode(request.payload).params
    model_id = str(request.model_id)
    async with slot:
        reply = context.send(OptimStep(model_id, params), OptimResult)
    result = await reply
    return request.done(encode_optim_step(result), "json", StepMade(model_id, result.step))

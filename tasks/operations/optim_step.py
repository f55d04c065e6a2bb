"""optim_step: one step of the model's optimizer with the accumulated gradients."""

from __future__ import annotations

from tinkerflow.backend.journal import Outcome, StepMade, StepMeasured
from tinkerflow.backend.spec.commands import OptimResult, OptimStep
from tinkerflow.backend.wire import OptimStepBody, encode_optim_step
from tinkerflow.tasks.execution.operation import Execution


async def execute(execution: Execution) -> Outcome:
    """Make the step, and store its number in the model's row."""
    request, model_id = execution.request, execution.model_id
    params = OptimStepBody.decode(request.payload).params
    async with execution.slot:
        reply = execution.send(OptimStep(execution.adapter_id, params), OptimResult)
    result = await reply
    seq_id = 0 if request.seq_id is None else request.seq_id
    measured = StepMeasured(model_id, seq_id, result.step, result.grad_norm, getattr(params, "learning_rate", None))
    return request.done(encode_optim_step(result), "json", StepMade(model_id, result.step), measured)

"""create_model: a fresh adapter in the worker group."""

from __future__ import annotations

from tinkerflow.backend.core.errors import ServerError
from tinkerflow.backend.journal import CheckpointView, ModelLive, ModelView, Outcome
from tinkerflow.backend.spec.commands import CreateAdapter, Done, LoraSpec
from tinkerflow.backend.wire import encode_model_created
from tinkerflow.tasks.execution.operation import Execution


async def execute(execution: Execution) -> Outcome:
    """Create the adapter that the model's row describes. The answer makes the model live."""
    context, request = execution.context, execution.request
    async with execution.slot:
        model = await context.read(context.journal.models.get, execution.model_id, None)
        if model.seed is None:
            raise ServerError(f"model {model.id} has no seed in the journal: the API must draw one if none was given")
        reply = execution.send(CreateAdapter(execution.adapter_id, spec_of(model), model.seed, model.optimizer), Done)
    await reply
    return request.done(encode_model_created(model.id), "json", ModelLive(model.id))


def spec_of(model: ModelView | CheckpointView) -> LoraSpec:
    """The shape of the adapter that a model's or checkpoint's row describes."""
    return LoraSpec(model.rank, model.train_attn, model.train_mlp, model.train_unembed, model.expert_rank)

"""load_weights in both forms: into a model that exists, and as the beginning of a new one."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from tinkerflow.backend.commands import AdapterState, Done, ImportAdapter
from tinkerflow.backend.errors import NotFoundError, UserError
from tinkerflow.backend.journal import ModelLive, ModelView, Outcome, Pending, StepMade
from tinkerflow.backend.wire import LoadModel, LoadWeights, encode_loaded
from tinkerflow.tasks.execution.commit import commit
from tinkerflow.tasks.execution.context import ExecutionContext
from tinkerflow.tasks.execution.sequencer import Slot
from tinkerflow.tasks.operations.create_model import spec_of


async def execute(context: ExecutionContext, request: Pending, slot: Slot) -> Outcome:
    """Replace the model's weights by a checkpoint's, of the same base model and shape."""
    wanted = LoadWeights.decode(request.payload)
    model_id = str(request.model_id)
    async with slot:
        model, state = await asyncio.gather(
            context.read(context.journal.models.get, model_id, None),
            load(context, request.owner, wanted.path, optimizer=wanted.optimizer, access=wanted.access),
        )
        if state.spec != spec_of(model):
            raise UserError(f"path {wanted.path!r}: it holds {state.spec}, but model {model_id} has {spec_of(model)}")
        reply = context.send(ImportAdapter(model_id, _for(model, state, wanted.path)), Done)
    await reply
    taken = await commit(context, model_id, request.owner, int(request.seq_id or 0), state)
    await slot.to_answer()
    await slot.settled()  # a replay begins with this snapshot: it must pass no save that is still to be answered
    return request.done(encode_loaded(model_id, wanted.path), "json", StepMade(model_id, state.step), taken)


async def execute_create(context: ExecutionContext, request: Pending, slot: Slot) -> Outcome:
    """Make a model from a checkpoint (create-via-load); its shape is the checkpoint's."""
    wanted = LoadModel.decode(request.payload)
    model_id = str(request.model_id)
    async with slot:
        model, state = await asyncio.gather(
            context.read(context.journal.models.get, model_id, None),
            load(context, request.owner, wanted.path, optimizer=wanted.optimizer, access=wanted.access),
        )
        reply = context.send(ImportAdapter(model_id, _for(model, state, wanted.path)), Done)
    await reply
    spec = state.spec
    live = ModelLive(model_id, state.step, spec.rank, spec.train_attn, spec.train_mlp, spec.train_unembed)
    taken = await commit(context, model_id, request.owner, 0, state)
    return request.done(encode_loaded(model_id, wanted.path), "json", live, taken)


def _for(model: ModelView, state: AdapterState, path: str) -> AdapterState:
    """The state with the optimizer that the model's row has; UserError when it is another's that is to be restored."""
    if state.moments and state.optimizer != model.optimizer:
        raise UserError(
            f"path {path!r}: it holds the state of {state.optimizer}, but model {model.id} was made with "
            f"{model.optimizer}; load it with optimizer false"
        )
    return replace(state, optimizer=model.optimizer)


async def load(
    context: ExecutionContext, owner: str, path: str, *, optimizer: bool, access: str | None = None
) -> AdapterState:
    """A checkpoint's state, if `owner` may read it (or has a token for it, whose hash is `access`) and it fits.

    Without `optimizer` its moments are left out and its step is 0: the optimizer starts fresh.
    """
    row = await context.read(context.journal.checkpoints.get, path, owner, access=access)
    if row.base_model != context.card.name:
        raise UserError(f"path {path!r}: it belongs to base model {row.base_model!r}, not {context.card.name!r}")
    try:
        state, saved = await asyncio.to_thread(context.store.load, path)
    except NotFoundError as error:
        raise NotFoundError(f"path {path!r}: the store has it no longer") from error
    if context.as_of is not None and saved.created_at > context.as_of:
        raise NotFoundError(f"path {path!r}: what was loaded from it was replaced since")
    if not optimizer:
        return replace(state, moments={}, step=0)
    if not state.moments:
        raise UserError(f"path {path!r}: it holds no optimizer state; load it with optimizer false")
    return state

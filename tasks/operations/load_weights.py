"""load_weights in both forms: into an existing model, and as the beginning of a new one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict, replace

from tinkerflow.backend.core.errors import NotFoundError, UserError
from tinkerflow.backend.journal import CheckpointView, Kind, ModelLive, ModelView, Outcome
from tinkerflow.backend.spec.commands import AdapterState, Done, ImportAdapter
from tinkerflow.backend.store import Saved
from tinkerflow.backend.wire import LoadModel, LoadWeights, encode_loaded
from tinkerflow.tasks.execution.fork import make_fork
from tinkerflow.tasks.execution.operation import Execute, Execution, ExecutionContext
from tinkerflow.tasks.execution.state_transfers import commit
from tinkerflow.tasks.operations import create_model, forward_backward, optim_step
from tinkerflow.tasks.operations.create_model import spec_of


async def execute(execution: Execution) -> Outcome:
    """Replace the model's weights with those of a checkpoint of the same base model and shape, or make a model from it.

    The rank of experts may differ: in old checkpoints it was not divided. The model then gets the checkpoint's rank. A
    new model (create-via-load) gets the checkpoint's shape.
    """
    context, request, model_id = execution.context, execution.request, execution.model_id
    creates = request.kind is Kind.LOAD_MODEL
    wanted = LoadModel.decode(request.payload) if creates else LoadWeights.decode(request.payload)
    async with execution.slot:
        model, row = await asyncio.gather(
            context.read(context.journal.models.get, model_id, None),
            check_readable(context, request.owner, wanted.path, wanted.access),
        )
        if not creates:  # checked before the state is read: a full-parameter state is large
            _check_shape(model, row, wanted.path)
        state = await _load(execution, wanted)
        reply = execution.send(ImportAdapter(execution.adapter_id, _for(model, state, wanted.path)), Done)
    await reply
    if execution.fork is not None:
        return request.done(encode_loaded(model_id, wanted.path), "json")
    taken = await commit(execution, state)
    await execution.slot.predecessors()
    # A replay begins with this snapshot, so every earlier save must be answered.
    await execution.slot.earlier_saves()
    live = ModelLive(model_id, state.step, **asdict(state.spec))  # the row gets the checkpoint's step and shape
    return request.done(encode_loaded(model_id, wanted.path), "json", live, taken)


def _check_shape(model: ModelView, row: CheckpointView, path: str) -> None:
    """UserError: the checkpoint's shape is not the model's; the message names each field that differs."""
    found, wanted = asdict(replace(spec_of(row), expert_rank=model.expert_rank)), asdict(spec_of(model))
    wrong = [f"{name} {value}: must be {wanted[name]}" for name, value in found.items() if value != wanted[name]]
    if wrong:
        raise UserError(
            f"path {path!r} has {', '.join(wrong)}, as in model {model.id}; create a model from the checkpoint instead"
        )


def _for(model: ModelView, state: AdapterState, path: str) -> AdapterState:
    """The state with the optimizer of the model's row. UserError: the state holds moments of another optimizer."""
    if state.moments and state.optimizer != model.optimizer:
        raise UserError(
            f"path {path!r} contains the state of {state.optimizer}, but model {model.id} was created with "
            f"{model.optimizer}; load it with optimizer false"
        )
    return state.copy_with(optimizer=model.optimizer)


async def _load(execution: Execution, wanted: LoadWeights | LoadModel) -> AdapterState:
    state, saved = await read_checkpoint(execution.context, wanted.path, optimizer=wanted.optimizer)
    if execution.as_of is not None and saved.created_at > execution.as_of:
        raise NotFoundError(f"path {wanted.path!r}: the checkpoint was replaced after it was loaded")
    return state


async def read_checkpoint(context: ExecutionContext, path: str, *, optimizer: bool) -> tuple[AdapterState, Saved]:
    """The state and the commit of a checkpoint that passed `check_readable`.

    optimizer: include the optimizer's moments. Without them, the step is 0 and the optimizer starts fresh.
    NotFoundError: the checkpoint is no longer in the store. UserError: moments are wanted, but the checkpoint contains
    none.
    """
    try:
        state, saved = await context.in_store(context.store.load, path)
    except NotFoundError as error:
        raise gone(path) from error
    if not optimizer:
        return state.copy_with(moments={}, step=0), saved
    if not state.moments:
        raise UserError(f"path {path!r} contains no optimizer state; load it with optimizer false")
    return state, saved


async def check_readable(context: ExecutionContext, owner: str, path: str, access: str | None = None) -> CheckpointView:
    """The checkpoint's row. NotFoundError or UserError: `owner` may not load it, or its base model differs.

    A state that exists only in its run's history is first recomputed and saved (fork.py).
    """
    row = await context.read(context.journal.checkpoints.get, path, owner, access=access)
    if row.base_model != context.card.name:
        raise UserError(f"path {path!r} belongs to base model {row.base_model!r}, not {context.card.name!r}")
    if row.only_in_history:
        await make_fork(context, row, CHANGES)
    return row


# The operations that change a model. A fork executes them again.
CHANGES: Mapping[Kind, Execute] = {
    Kind.CREATE_MODEL: create_model.execute,
    Kind.LOAD_MODEL: execute,
    Kind.LOAD_WEIGHTS: execute,
    Kind.FORWARD_BACKWARD: forward_backward.execute,
    Kind.OPTIM_STEP: optim_step.execute,
}


def gone(path: str) -> NotFoundError:
    """The error for a checkpoint that is in the journal but not in the store."""
    return NotFoundError(f"path {path!r}: this checkpoint is no longer in the store")

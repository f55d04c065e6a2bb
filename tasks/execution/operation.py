"""One operation from its pending request to its answer in the journal."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from tinkerflow.backend import tracing
from tinkerflow.backend.errors import AllocationError, GroupFailedError, StateLostError, TinkerflowError
from tinkerflow.backend.journal import (
    Effect,
    Kind,
    ModelEnded,
    ModelState,
    Outcome,
    Pending,
)
from tinkerflow.tasks.execution.context import Execution
from tinkerflow.tasks.execution.crashes import attribute_crash
from tinkerflow.tasks.execution.sequencer import SaveState
from tinkerflow.tasks.operations import (
    create_model,
    forward_backward,
    load_weights,
    optim_step,
    save_weights,
    save_weights_external,
    save_weights_for_sampler,
    unload,
)

log = logging.getLogger(__name__)

Execute = Callable[[Execution], Awaitable[Outcome]]

EXECUTE: dict[Kind, Execute] = {
    Kind.CREATE_MODEL: create_model.execute,
    Kind.LOAD_MODEL: load_weights.execute,
    Kind.FORWARD: forward_backward.execute,
    Kind.FORWARD_BACKWARD: forward_backward.execute,
    Kind.OPTIM_STEP: optim_step.execute,
    Kind.SAVE_WEIGHTS: save_weights.execute,
    Kind.LOAD_WEIGHTS: load_weights.execute,
    Kind.SAVE_FOR_SAMPLER: save_weights_for_sampler.execute,
    Kind.SAVE_EXTERNAL: save_weights_external.execute,
    Kind.UNLOAD: unload.execute,
}


SAVES = frozenset((Kind.SAVE_WEIGHTS, Kind.SAVE_FOR_SAMPLER, Kind.SAVE_EXTERNAL))  # they may be detached


@dataclass(frozen=True)
class Operation:
    """An operation on its way; `answered` ends with its outcome when that is in the journal, and nothing left to do.

    None: its worker group ended first. It must be begun again.
    """

    request: Pending
    answered: asyncio.Task[Outcome | None]


def begin(execution: Execution, group: asyncio.TaskGroup) -> Operation:
    """Start an operation. Whatever happens to it becomes its outcome, and later operations go on.

    Only an answer that the journal does not take ends `group`.
    """
    request = execution.request
    return Operation(request, group.create_task(_perform(execution), name=f"{request.kind} {request.id}"))


async def _perform(execution: Execution) -> Outcome | None:
    request = execution.request
    with tracing.span(request.kind, request.trace, request_id=request.id, model_id=execution.model_id):
        return await _execute_and_answer(execution)


async def _execute_and_answer(execution: Execution) -> Outcome | None:
    """Execute, wait until every earlier operation is answered, answer, and do what is left."""
    request, slot = execution.request, execution.slot
    answered, stored = request.answered, SaveState.LOST
    try:
        try:
            outcome = await EXECUTE[request.kind](execution)
            await slot.predecessors()
        except GroupFailedError as error:
            return await _interrupted(execution, error)
        except Exception as error:  # noqa: BLE001  a failure becomes a stored, named outcome
            try:
                await slot.predecessors()
            except GroupFailedError as interrupted:
                return await _interrupted(execution, interrupted)
            outcome = failure(request, error)
            execution.changed &= not isinstance(error, AllocationError)  # which leaves all as it was
        if not answered:
            replays = outcome.replays or execution.changed
            await execution.context.answer(replace(outcome, replays=replays, started_at=execution.started_at))
            answered = outcome.error is None
        stored = SaveState.FAILED if outcome.error is not None else SaveState.STORED
        if execution.then is not None:
            stored = SaveState.LOST
            try:
                stored = await execution.then()
            except GroupFailedError as error:
                slot.interrupt()
                name = f"{request.kind} {request.id} of {request.model_id}"
                log.info("%s is answered, and was interrupted after that: %s", name, error)
                return None
        return outcome
    finally:
        if slot.save is not None:
            execution.context.saves.end(slot.save, stored, answered=answered)
        await slot.end()


async def _interrupted(execution: Execution, error: GroupFailedError) -> Outcome | None:
    request = execution.request
    execution.slot.interrupt()
    log.info("%s %s of %s is executed again: %s", request.kind, request.id, request.model_id, error)
    blamed = (await attribute_crash(execution.context, [request], error)).get(request.id)
    if blamed is not None:
        await execution.context.answer(blamed)
    return blamed


def failure(request: Pending, error: Exception) -> Outcome:
    """The outcome of a request that ended with `error`, which is logged here and nowhere else.

    Ours speak for themselves. Of others the client gets type and text; the trace is in the log.
    """
    name = f"{request.kind} {request.id}" + (f" of {request.model_id}" if request.model_id else "")
    effects: tuple[Effect, ...] = ()
    if isinstance(error, TinkerflowError):
        level = logging.INFO if error.category == "user" else logging.WARNING
        log.log(level, "%s failed: %s: %s", name, type(error).__name__, error.message)
        if isinstance(error, StateLostError) and request.model_id is not None:
            effects = (ModelEnded(request.model_id, ModelState.LOST, error.message),)
        return request.failed(error, None, *effects)
    log.error("%s failed", name, exc_info=error)
    return request.failed(f"{request.kind} failed in the service ({type(error).__name__}: {error})", "server")

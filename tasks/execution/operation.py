"""One operation from its pending request to its answer in the journal."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import datetime

from tinkerflow.backend.commands import Command, CreateAdapter, Forward, ImportAdapter, OptimStep
from tinkerflow.backend.errors import GroupFailedError, StateLostError, TinkerflowError
from tinkerflow.backend.journal import (
    Effect,
    Kind,
    ModelEnded,
    ModelState,
    Outcome,
    Pending,
    SamplerLoaded,
    SamplerOpened,
)
from tinkerflow.tasks.execution.context import ExecutionContext
from tinkerflow.tasks.execution.crashes import judge
from tinkerflow.tasks.execution.sequencer import Slot
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

Execute = Callable[[ExecutionContext, Pending, Slot], Awaitable[Outcome]]

EXECUTE: dict[Kind, Execute] = {
    Kind.CREATE_MODEL: create_model.execute,
    Kind.LOAD_MODEL: load_weights.execute_create,
    Kind.FORWARD: forward_backward.execute,
    Kind.FORWARD_BACKWARD: forward_backward.execute,
    Kind.OPTIM_STEP: optim_step.execute,
    Kind.SAVE_WEIGHTS: save_weights.execute,
    Kind.LOAD_WEIGHTS: load_weights.execute,
    Kind.SAVE_FOR_SAMPLER: save_weights_for_sampler.execute,
    Kind.SAVE_EXTERNAL: save_weights_external.execute,
    Kind.UNLOAD: unload.execute,
}


@dataclass(frozen=True)
class Operation:
    """An operation on its way; `answered` ends with its outcome when that is in the journal, and nothing left to do.

    None: its worker group ended first. It must be begun again.
    """

    request: Pending
    answered: asyncio.Task[Outcome | None]


def begin(context: ExecutionContext, request: Pending, slot: Slot, group: asyncio.TaskGroup) -> Operation:
    """Start an operation. Whatever happens to it becomes its outcome, and later turns go on.

    Only an answer that the journal does not take ends `group`.
    """
    return Operation(request, group.create_task(_perform(context, request, slot), name=f"{request.kind} {request.id}"))


async def _perform(context: ExecutionContext, request: Pending, slot: Slot) -> Outcome | None:
    sent: list[Command] = []
    times: list[datetime] = []
    context = replace(context, rest=[])

    def note(command: Command) -> None:
        sent.append(command)
        times.append(context.clock.now())

    try:
        try:
            outcome = await EXECUTE[request.kind](replace(context, note=note), request, slot)
            await slot.to_answer()
        except GroupFailedError as error:
            return await _interrupted(context, request, slot, error)
        except Exception as error:  # noqa: BLE001  a failure becomes a stored, named outcome
            try:
                await slot.to_answer()
            except GroupFailedError as interrupted:
                return await _interrupted(context, request, slot, interrupted)
            outcome = failure(request, error)
        started, replays = times[0] if times else None, outcome.replays or any(map(_changes, sent))
        if not request.answered:
            await answer(context, replace(outcome, replays=replays, started_at=started))
        try:
            for work in context.rest:
                await work()
        except GroupFailedError as error:
            slot.line.broken = True
            log.info("%s %s of %s is answered, and ended later: %s", request.kind, request.id, request.model_id, error)
            return None
        return outcome
    finally:
        await slot.end()


async def _interrupted(
    context: ExecutionContext, request: Pending, slot: Slot, error: GroupFailedError
) -> Outcome | None:
    slot.line.broken = True
    log.info("%s %s of %s is executed again: %s", request.kind, request.id, request.model_id, error)
    poisoned = (await judge(context, [request], error)).get(request.id)
    if poisoned is not None:
        await answer(context, poisoned)
    return poisoned


def _changes(command: Command) -> bool:
    return isinstance(command, CreateAdapter | ImportAdapter | OptimStep) or (
        isinstance(command, Forward) and command.backward
    )


async def answer(context: ExecutionContext, outcome: Outcome) -> None:
    """Put an outcome into the journal, and remember the snapshots that its rows name."""
    await context.answers.put(outcome)
    for effect in outcome.effects:
        snapshot = effect.sampler.snapshot_id if isinstance(effect, SamplerOpened) else None
        snapshot = effect.snapshot_id if isinstance(effect, SamplerLoaded) else snapshot
        if snapshot is not None:
            context.snapshots.recorded(snapshot)


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

"""Detection of silent data corruption: some operations are executed a second time, and the results are compared.

A recovery snapshot ends an interval of a run. If the run has a history, a share of the intervals is executed again in a
separate adapter, each from the snapshot before it. Each result must equal the recorded one, byte for byte. The first
difference shows the step at which a device, the memory or a program computed different bits. A third execution decides
whether the recorded result was wrong. If so, or if all three differ, the run stops. The hosts of the worker group are
always taken out of service, because one of its results was wrong.

A base model has one worker group, whose processes compute each result together. All executions therefore use the same
devices, and the hosts of the group are the smallest unit that can be taken out.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tinkerflow.backend.core.errors import FencedError, GroupFailedError, TinkerflowError
from tinkerflow.backend.journal import AWAY, Kind, ModelState, ModelView, SnapshotTaken, SnapshotView
from tinkerflow.tasks.execution.history_replay import HistoryReplay
from tinkerflow.tasks.execution.operation import Execute, ExecutionContext

log = logging.getLogger(__name__)

Wrong = Literal["recorded", "repeated", "unknown"]
_MEANINGS: Mapping[Wrong, str] = {
    "recorded": "the third result equals the second, so the weights of the run are wrong",
    "repeated": "the third result equals the first, so the run continues",
    "unknown": "no two results are equal, so the weights of the run may be wrong",
}


@dataclass(frozen=True)
class Difference:
    """A result that differs when it is computed again.

    kind, seq_id: the first such request's. step: the step that the request made or belongs to. devices: the worker
    group's devices. places: the group's ranks with their hosts. wrong: which result was wrong, according to a third
    execution.
    """

    kind: str
    seq_id: int
    step: int
    devices: tuple[str, ...]
    places: tuple[str, ...]
    wrong: Wrong

    def __str__(self) -> str:
        what = f"step {self.step}: the result of {self.kind} (request {self.seq_id}) differs"
        where = f"{', '.join(self.places)} ({', '.join(self.devices)})"
        return f"{what} when it is computed again, on {where}; {_MEANINGS[self.wrong]}"


async def recheck(
    context: ExecutionContext, taken: SnapshotTaken, execute: Mapping[Kind, Execute]
) -> Difference | None:
    """Execute again the interval that ends with the snapshot, if the interval is drawn. Returns the first difference.

    context: bound to the worker group. execute: the operations that change a model. An interval that cannot be executed
    again is logged.
    """
    if random.random() >= context.recheck_share:
        return None
    model_id, journal = taken.model_id, context.journal
    try:
        model = await context.read(journal.models.get, model_id, None)
        if not model.history:
            return None
        earlier = await context.read(journal.recovery.snapshots, model_id)
        before = next((view for view in earlier if view.seq_id < taken.seq_id), None)
        replay = await _again(context, model, before, taken.seq_id, execute)
        if (differs := replay.differs) is None:
            log.info(
                "model %s: %d requests up to request %d have equal results when executed again",
                model_id,
                replay.requests,
                taken.seq_id,
            )
            return None
        steps = await context.read(journal.histories.steps, model_id)
        step = next((step for seq_id, step in steps.items() if seq_id >= differs.seq_id), taken.step)
        places, devices = context.pool.info.places, context.pool.info.devices
        try:
            wrong = _wrong(replay, await _again(context, model, before, differs.seq_id, execute))
        except (TinkerflowError, *AWAY):
            log.warning(
                "request %d of model %s cannot be executed a third time", differs.seq_id, model_id, exc_info=True
            )
            wrong = "unknown"
        difference = Difference(differs.kind, differs.seq_id, step, devices, places, wrong)
        log.error("model %s, %s", model_id, difference)
        return difference
    except (GroupFailedError, FencedError) as error:
        log.info("requests of model %s are not executed again: %s", model_id, error)
    except (TinkerflowError, *AWAY):
        log.warning("requests of model %s cannot be executed again", model_id, exc_info=True)
    return None


async def take_out(context: ExecutionContext, model_id: str, difference: Difference) -> None:
    """Take the hosts of the worker group out of service, and stop the run unless its recorded results are right.

    context: bound to the worker group that computed the difference. The history and the checkpoints of the run stay.
    """
    try:
        if difference.wrong != "repeated":
            text = (
                f"{difference}. The run is stopped. To continue from the step before: "
                f"tinkerflow rerun {model_id} --from {difference.step}, or load "
                f"tinker://{model_id}/weights/@{difference.step - 1}"
            )
            await context.read(context.journal.models.end, model_id, ModelState.FAILED, text)
    finally:
        if context.generation is not None:
            context.pool.take_out(context.generation, f"run {model_id}, {difference}")


async def _again(
    context: ExecutionContext,
    model: ModelView,
    before: SnapshotView | None,
    last: int,
    execute: Mapping[Kind, Execute],
) -> HistoryReplay:
    """Execute the requests of a model again. before: the snapshot to begin with; None = its creation. last: seq_id."""
    replay = HistoryReplay(context, model, f"{model.id}@recheck-{last}", execute)
    try:
        if before is not None:
            await replay.load(before.path)
        await replay.run(-1 if before is None else before.seq_id, last)
    finally:
        await replay.drop()
    return replay


def _wrong(second: HistoryReplay, third: HistoryReplay) -> Wrong:
    if third.differs is None:
        return "repeated"
    same = (third.differs.seq_id, third.found) == (second.differs and second.differs.seq_id, second.found)
    return "recorded" if same else "unknown"

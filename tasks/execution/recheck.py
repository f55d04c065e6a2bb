"""The watch for silent corruption: some operations are executed a second time, and the results are compared.

A recovery snapshot ends an interval of a run. A share of the intervals is executed again if the run has a history: from
the snapshot before, in a separate adapter. Each result must equal the recorded one, byte for byte. The first that
does not names the step at which a device, the memory or a program has computed other bits.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from dataclasses import dataclass

from tinkerflow.backend.core.errors import FencedError, GroupFailedError, TinkerflowError
from tinkerflow.backend.journal import AWAY, Kind, SnapshotTaken
from tinkerflow.tasks.execution.history_replay import HistoryReplay
from tinkerflow.tasks.execution.operation import Execute, ExecutionContext

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Difference:
    """A result that is another one when it is computed again.

    kind, seq_id: of the first such request. step: that it made or belongs to. devices: of the worker group.
    """

    kind: str
    seq_id: int
    step: int
    devices: tuple[str, ...]


async def recheck(
    context: ExecutionContext, taken: SnapshotTaken, execute: Mapping[Kind, Execute]
) -> Difference | None:
    """Execute the interval that ends with the snapshot again if its turn has come. Returns the first difference.

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
        replay = HistoryReplay(context, model, f"{model_id}@recheck-{taken.seq_id}", execute)
        try:
            earlier = await context.read(journal.recovery.snapshots, model_id)
            before = next((view for view in earlier if view.seq_id < taken.seq_id), None)
            if before is not None:
                await replay.load(before.path)
            await replay.run(-1 if before is None else before.seq_id, taken.seq_id)
        finally:
            await replay.drop()
        if (differs := replay.differs) is None:
            log.info("model %s: %d requests up to request %d are equal again", model_id, replay.requests, taken.seq_id)
            return None
        steps = await context.read(journal.histories.steps, model_id)
        step = next((step for seq_id, step in steps.items() if seq_id >= differs.seq_id), taken.step)
        devices = context.pool.info.devices
        text = "model %s: the result of %s of step %d (seq_id %d) is another one when it is computed again, on %s"
        log.error(text, model_id, differs.kind, step, differs.seq_id, ", ".join(devices))
        return Difference(differs.kind, differs.seq_id, step, devices)
    except (GroupFailedError, FencedError) as error:
        log.info("requests of model %s are not executed again: %s", model_id, error)
    except (TinkerflowError, *AWAY):
        log.warning("requests of model %s cannot be executed again", model_id, exc_info=True)
    return None

"""When a recovery snapshot of a model is due, and the tasks that take and check snapshots."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tinkerflow.backend.journal import SnapshotTaken
from tinkerflow.flows.observers import RunObserver
from tinkerflow.tasks.execution.operation import ExecutionContext
from tinkerflow.tasks.execution.recheck import recheck, take_out
from tinkerflow.tasks.execution.sequencer import Sequencer, Slot
from tinkerflow.tasks.execution.state_transfers import take_snapshot
from tinkerflow.tasks.operations import CHANGES


@dataclass(frozen=True)
class SnapshotPolicy:
    """When a changed model's snapshot is due: after `steps` optimizer steps or `seconds` since the last snapshot."""

    steps: int
    seconds: float


class SnapshotSchedule:
    """How much a model has changed since its last snapshot."""

    def __init__(self, policy: SnapshotPolicy, now: float) -> None:
        """The model has not changed. now: the monotonic time."""
        self._policy = policy
        self._since = now
        self._steps = 0
        self._last = -1  # the last request that the model in the group executed
        self.seq_id: int | None = None  # the last dispatched request that no snapshot covers
        self.taking = self.hurried = False

    def dispatched(self, seq_id: int, *, step: bool) -> None:
        """Note that a request was dispatched. During a replay, a save may arrive after requests with higher seq_ids."""
        self.seq_id = self._last = max(seq_id, self._last)
        self._steps += step

    def interrupted(self) -> None:
        """Note that some dispatched requests were not executed."""
        self.seq_id, self._last, self.hurried = None, -1, False

    def restored(self, replayed: int, last: int) -> None:
        """Note that a replay restored the model, up to request `last`, with `replayed` optimizer steps.

        These steps count toward the next snapshot; otherwise repeated crashes would replay more each time.
        """
        self._steps, self._last = replayed, last

    def hurry(self) -> None:
        """Note that the worker group is about to end: a snapshot is due if the model has changed."""
        self.hurried = self.seq_id is not None

    def is_due(self, now: float) -> bool:
        """Whether a snapshot should be taken now."""
        late = self.hurried or self._steps >= self._policy.steps or now - self._since >= self._policy.seconds
        return late and not self.taking and self.seq_id is not None

    def begin(self, now: float) -> int:
        """Note that a snapshot is being taken. Returns the last request that it covers."""
        assert self.seq_id is not None
        seq_id, self.seq_id = self.seq_id, None
        self._since, self._steps, self.taking, self.hurried = now, 0, True, False
        return seq_id


class SnapshotTaker:
    """Takes the recovery snapshots of one model, one at a time."""

    def __init__(self, model_id: str, observers: Sequence[RunObserver], schedule: SnapshotSchedule) -> None:
        """No snapshot is being taken. observers: get a report about each snapshot."""
        self._model_id = model_id
        self._observers = observers
        self._schedule = schedule
        self._changed = asyncio.Event()
        self._rechecks: set[asyncio.Task[None]] = set()

    def take(self, context: ExecutionContext, sequencer: Sequencer, group: asyncio.TaskGroup) -> None:
        """Give a snapshot the model's next slot, if the model has changed."""
        last = sequencer.last
        if self._schedule.seq_id is None or self._schedule.taking or last is None or last.interrupted:
            return
        seq_id = self._schedule.begin(context.clock.monotonic())
        group.create_task(self._take(context, seq_id, sequencer.slot(), group), name="snapshot")

    def stop_rechecks(self) -> None:
        """Cancel the repeated executions that check snapshots."""
        for task in self._rechecks:
            task.cancel()

    async def _take(self, context: ExecutionContext, seq_id: int, slot: Slot, group: asyncio.TaskGroup) -> None:
        try:
            taken = await take_snapshot(context, self._model_id, seq_id, slot)
        finally:
            self._schedule.taking = False
            self._changed.set()
        if taken is None:
            return
        for observer in self._observers:
            observer.log(f"snapshot taken at request {taken.seq_id}: {taken.size_bytes / 2**20:.1f} MiB")
        if context.recheck_share and not context.pool.draining:
            task = group.create_task(self._recheck(context, taken), name="recheck")
            self._rechecks.add(task)
            task.add_done_callback(self._rechecks.discard)

    async def _recheck(self, context: ExecutionContext, taken: SnapshotTaken) -> None:
        if (difference := await recheck(context, taken, CHANGES)) is not None:
            for observer in self._observers:
                observer.differed(difference)
            await take_out(context, self._model_id, difference)

    def interrupted(self) -> None:
        """Note that the worker group ended, so that no hurried snapshot can be taken."""
        self._schedule.interrupted()
        self._changed.set()

    async def hurried_snapshot(self, is_paused: Callable[[], bool]) -> None:
        """Wait until the hurried snapshot is taken, or cannot be taken."""
        while (self._schedule.taking or self._schedule.hurried) and not is_paused():
            self._changed.clear()
            await self._changed.wait()

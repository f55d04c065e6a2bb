"""Restores a live model in a worker group: loads a snapshot, and replays later requests in order.

The newest readable snapshot is used. The journal keeps all requests after the second newest snapshot, or from the
model's creation if there are fewer than two. Once an older snapshot was read, an unreadable one is forgotten, so that
no later snapshot depends on it. Its files stay in the store for inspection, until the model has ended and `tinkerflow
checkpoint gc` removes them. While the store is away, the restore waits.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from tinkerflow.backend.core.errors import (
    AllocationError,
    GroupFailedError,
    NotFoundError,
    ServerError,
    StoreAwayError,
    StoreError,
    TinkerflowError,
    UserError,
)
from tinkerflow.backend.core.retry import retry
from tinkerflow.backend.journal import Executed, Kind, SnapshotTaken, SnapshotView
from tinkerflow.backend.spec.commands import AdapterState, Done, DropAdapter, ImportAdapter, StoredState
from tinkerflow.backend.store import Saved
from tinkerflow.tasks.execution.operation import Execution, ExecutionContext, OperationTable
from tinkerflow.tasks.execution.sequencer import Slot, replay_in_order
from tinkerflow.tasks.execution.state_transfers import bring, record

log = logging.getLogger(__name__)

_PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0, *[15.0] * 20)  # seconds between attempts if the store fails or memory is short
_PAGE = 16  # requests that are replayed together; their payloads are in memory


@dataclass(frozen=True)
class Restored:
    """How a model was restored.

    snapshot: None if the replay began with the model's creation. requests, steps: replayed requests, and the optimizer
    steps among them. last: the seq_id of the last replayed request, or of the snapshot. seconds: the total duration.
    unreadable: errors of newer snapshots. copies: states of saves that must be stored again, by request id.
    """

    snapshot: SnapshotView | None
    requests: int
    steps: int
    last: int
    seconds: float
    unreadable: tuple[str, ...]
    copies: Mapping[str, AdapterState]


async def restore(
    context: ExecutionContext,
    model_id: str,
    operations: OperationTable,
    detached: Collection[str] = (),
) -> Restored:
    """Restore a live model to its state after its answered requests.

    context: bound to the worker group that gets the model. operations: execute the requests. detached: ids of saves
    that are being written. The state is copied again for all other saves that are not answered or not stored.

    Raises GroupFailedError if that group ends. Any other error explains why this model cannot be restored. While the
    devices have no memory left, the restore is retried for some minutes.
    """

    async def attempt() -> Restored:
        try:
            return await _restore(context, model_id, operations, detached)
        except AllocationError as error:
            await _note_progress(context, model_id, f"waiting for device memory ({error})")
            await context.send(DropAdapter(model_id), Done)  # other models may need the memory
            raise

    what = f"model {model_id} waits for device memory"
    return await retry(attempt, on=AllocationError, pauses=_PAUSES, what=what, log=log)


async def _restore(
    context: ExecutionContext, model_id: str, operations: OperationTable, detached: Collection[str]
) -> Restored:
    began = context.clock.monotonic()
    snapshot, unreadable = await _load(context, model_id)
    loaded = context.clock.monotonic()
    after = -1 if snapshot is None else snapshot.seq_id
    replay = _Replay(context, model_id, operations, after, frozenset(detached))
    await replay.run(older=bool(unreadable))
    await context.read(context.journal.models.note_progress, model_id, None)
    ended = context.clock.monotonic()
    log.info(
        "model %s is restored in worker group %s: %d requests replayed in %.2f s after %.2f s for %s",
        model_id,
        context.generation,
        replay.requests,
        ended - loaded,
        loaded - began,
        f"its snapshot at request {snapshot.seq_id}" if snapshot else "a search that found no snapshot",
    )
    return Restored(snapshot, replay.requests, replay.steps, replay.after, ended - began, unreadable, replay.copies)


async def _load(context: ExecutionContext, model_id: str) -> tuple[SnapshotView | None, tuple[str, ...]]:
    """Load the newest readable snapshot into the group. Returns it, and the errors of newer snapshots."""
    recovery, floor, unreadable = context.journal.recovery, -1, dict[str, str]()
    while True:
        snapshots = await context.read(recovery.restorable, model_id)
        floor = max(floor, *(view.seq_id for view in snapshots[1:]), -1)  # earlier requests may be deleted
        good: tuple[SnapshotView, AdapterState | StoredState, Saved] | None = None
        for snapshot in (view for view in snapshots if view.path not in unreadable and view.seq_id >= floor):
            await _note_progress(context, model_id, "loading its snapshot")
            try:
                state, saved = await _read_snapshot(context, model_id, snapshot.path)
            except StoreAwayError:
                raise  # the snapshot may be intact, so it is not forgotten
            except (StoreError, NotFoundError) as error:
                log.error("the snapshot of model %s at request %d cannot be read: %s", model_id, snapshot.seq_id, error)
                unreadable[snapshot.path] = str(error)
            else:
                good = snapshot, state, saved
                break
        if good is None and not await _begins_with_creation(context, model_id):
            raise ServerError(
                "none of its snapshots can be read: " + ("; ".join(unreadable.values()) or "none is left")
            )
        if not (bad := [view.path for view in snapshots if view.path in unreadable]):
            if good is not None:
                await context.send(ImportAdapter(model_id, good[1]), Done)
                _compare_programs(context, model_id, good[2])
            return good[0] if good else None, tuple(unreadable.values())
        for path in bad:  # then read the list again: a new snapshot may depend on the unreadable ones
            await context.read(recovery.forget_snapshot, path)


def _compare_programs(context: ExecutionContext, model_id: str, saved: Saved) -> None:
    """Log a warning if the snapshot was computed by different programs than this worker group's."""
    if saved.meta.programs not in ("", now := context.pool.info.programs):
        log.warning(
            "the snapshot of model %s was computed by the programs %s, and this worker group has %s (another release, "
            "device, flag or setting). Later results may differ in the last bits",
            model_id,
            saved.meta.programs,
            now,
        )


async def _read_snapshot(
    context: ExecutionContext, model_id: str, path: str
) -> tuple[AdapterState | StoredState, Saved]:
    """Read the state under `path`. Waits while the store is away. Otherwise, retries for some minutes."""

    async def load() -> tuple[AdapterState | StoredState, Saved]:
        try:
            return await bring(context, model_id, path)
        except StoreAwayError as error:
            await _note_progress(context, model_id, f"waiting for the store ({error})")
            await retry(partial(context.in_store, context.store.mark), on=StoreAwayError, what=waits, log=log)
            raise

    waits = f"model {model_id} waits for the store"
    return await retry(load, on=StoreAwayError, pauses=_PAUSES, what=waits, log=log)


async def _begins_with_creation(context: ExecutionContext, model_id: str) -> bool:
    first = await context.read(context.journal.recovery.executed, model_id, -1, 1)
    return bool(first) and first[0].request.seq_id == 0


async def _note_progress(context: ExecutionContext, model_id: str, progress: str) -> None:
    await context.read(context.journal.models.note_progress, model_id, f"restoring model {model_id}: {progress}")


class _Replay:
    """Executes the requests after request `after` again. Their answers in the journal do not change."""

    def __init__(
        self,
        context: ExecutionContext,
        model_id: str,
        operations: OperationTable,
        after: int,
        detached: frozenset[str],
    ) -> None:
        self.requests = self.steps = 0
        self.after = after
        self.copies: dict[str, AdapterState] = {}
        self._context = context
        self._model_id = model_id
        self._operations = operations
        self._detached = detached

    async def run(self, *, older: bool) -> None:
        """Execute the requests, page by page. older: the newest snapshot could not be read; the progress shows it."""
        context, recovery = self._context, self._context.journal.recovery
        total = await context.read(recovery.count_executed, self._model_id, self.after)
        why = " after an older snapshot: the newest cannot be read" if older else ""
        while page := await context.read(recovery.executed, self._model_id, self.after, _PAGE):
            await _note_progress(context, self._model_id, f"replaying {self.requests} of {total}{why}")
            await self._execute([executed for executed in page if executed.request.id not in self._detached])
            self.requests += sum(executed.answered_at is not None for executed in page)
            self.steps += sum(executed.request.kind == Kind.OPTIM_STEP for executed in page)
            self.after = int(page[-1].request.seq_id or 0)

    async def _execute(self, page: Sequence[Executed]) -> None:
        await replay_in_order(self._model_id, [partial(self._execute_again, executed) for executed in page])

    async def _execute_again(self, executed: Executed, slot: Slot) -> None:
        request = executed.request
        execution = Execution(self._context, request, slot, as_of=executed.answered_at)
        try:
            if executed.answered_at is None or request.kind is Kind.SAVE_FOR_SAMPLER:
                self.copies[request.id] = await self._operations.copy_state(execution)
                return
            outcome = await self._operations.execute[request.kind](execution)
            if executed.succeeded is False and outcome.error is None:  # the answer was not stored, or came too late
                log.error(
                    "%s (seq_id %s) of model %s was answered as failed, but succeeds when it is replayed",
                    request.kind,
                    request.seq_id,
                    request.model_id,
                )
            for effect in outcome.effects:
                if isinstance(effect, SnapshotTaken):  # after a load with an unreadable first snapshot
                    await record(self._context, effect)
        except (GroupFailedError, AllocationError):  # not a failure of the request
            raise
        except TinkerflowError as error:
            if executed.succeeded or (executed.succeeded is None and not isinstance(error, UserError)):
                raise ServerError(f"the replay of {request.kind} (seq_id {request.seq_id}) failed: {error}") from error
        finally:
            await execution.slot.end()

"""A live model made again in a worker group: a snapshot of it, and what was executed since, in order.

The newest snapshot that can be read is taken, of those after which the journal still has everything: the two newest,
and the model's creation before there are two. One that cannot be read is forgotten once an older one can be, so that
none that is recorded later counts on it; its files stay in the store, for people to look at (`tinkerflow checkpoint gc`
removes them when the model has ended). A store that is away for some minutes is waited for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

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
from tinkerflow.tasks.execution.sequencer import Saves, Sequencer
from tinkerflow.tasks.execution.state_transfers import bring, record

log = logging.getLogger(__name__)

_PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0, *[15.0] * 20)  # seconds between attempts: a store is away, or memory is short
_PAGE = 16  # requests replayed at once; their payloads are in memory


@dataclass(frozen=True)
class Restored:
    """What it took: the snapshot (None: from the model's creation), and how much was replayed after it.

    steps: optimizer steps among the `requests`. last: the seq_id of the last of these, or of the snapshot. unreadable:
    newer snapshots that could not be read, and why. copies: the states of saves that must be stored again, by request.
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
    """Make a live model in the worker group that `context` is bound to, as its answered requests have left it.

    context: bound to that worker group. operations: execute the requests. detached: ids of saves that are being
    written; other saves that are not answered, or not stored, are copied again.

    GroupFailedError when that group ends meanwhile; any other error says why this model cannot be restored. Where the
    devices have no memory left, as they had when it was first executed, it is tried again for some minutes.
    """

    async def attempt() -> Restored:
        try:
            return await _restore(context, model_id, operations, detached)
        except AllocationError as error:
            await _tell(context, model_id, f"waiting for memory of the devices ({error})")
            await context.send(DropAdapter(model_id), Done)  # others may need it to go on
            raise

    what = f"model {model_id} waits for memory of the devices"
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
        f"its snapshot at request {snapshot.seq_id}" if snapshot else "a look for snapshots: none",
    )
    return Restored(snapshot, replay.requests, replay.steps, replay.after, ended - began, unreadable, replay.copies)


async def _load(context: ExecutionContext, model_id: str) -> tuple[SnapshotView | None, tuple[str, ...]]:
    """Put the newest snapshot that can be read into the group; which one, and what is wrong with newer ones."""
    recovery, floor, unreadable = context.journal.recovery, -1, dict[str, str]()
    while True:
        found = await context.read(recovery.restorable, model_id)
        floor = max(floor, *(one.seq_id for one in found[1:]), -1)  # up to there requests may be gone
        good: tuple[SnapshotView, AdapterState | StoredState, Saved] | None = None
        for snapshot in (one for one in found if one.path not in unreadable and one.seq_id >= floor):
            await _tell(context, model_id, "loading its snapshot")
            try:
                state, saved = await _read(context, model_id, snapshot.path)
            except StoreAwayError:
                raise  # no snapshot is to be forgotten for that
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
        if not (bad := [one.path for one in found if one.path in unreadable]):
            if good is not None:
                await context.send(ImportAdapter(model_id, good[1]), Done)
                _compare_programs(context, model_id, good[2])
            return good[0] if good else None, tuple(unreadable.values())
        for path in bad:  # and look again: one that was recorded before this has counted on them
            await context.read(recovery.forget_snapshot, path)


def _compare_programs(context: ExecutionContext, model_id: str, saved: Saved) -> None:
    """Say so in the log where the snapshot was computed by other programs than those of this worker group."""
    if saved.meta.programs not in ("", now := context.pool.info.programs):
        log.warning(
            "model %s: its snapshot was computed by the programs %s, and this worker group has %s (another release, "
            "device, flag or setting): what it computes from here on may differ in the last bits",
            model_id,
            saved.meta.programs,
            now,
        )


async def _read(context: ExecutionContext, model_id: str, path: str) -> tuple[AdapterState | StoredState, Saved]:
    """What the store has under `path`; a store that is away is asked again for some minutes."""

    async def load() -> tuple[AdapterState | StoredState, Saved]:
        try:
            return await bring(context, model_id, path)
        except StoreAwayError as error:
            await _tell(context, model_id, f"waiting for the store ({error})")
            raise

    return await retry(load, on=StoreAwayError, pauses=_PAUSES, what=f"model {model_id} waits for the store", log=log)


async def _begins_with_creation(context: ExecutionContext, model_id: str) -> bool:
    first = await context.read(context.journal.recovery.executed, model_id, -1, 1)
    return bool(first) and first[0].request.seq_id == 0


async def _tell(context: ExecutionContext, model_id: str, what: str) -> None:
    await context.read(context.journal.models.note_progress, model_id, f"restoring model {model_id}: {what}")


class _Replay:
    """Executes again what came after request `after`; their answers are in the journal already, and stay."""

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
        """Execute page by page; `older`: the newest snapshot could not be read, which people are told."""
        context, recovery = self._context, self._context.journal.recovery
        total = await context.read(recovery.count_executed, self._model_id, self.after)
        why = " after an older snapshot: the newest cannot be read" if older else ""
        while page := await context.read(recovery.executed, self._model_id, self.after, _PAGE):
            await _tell(context, self._model_id, f"replaying {self.requests} of {total}{why}")
            await self._execute([one for one in page if one.request.id not in self._detached])
            self.requests += sum(one.answered_at is not None for one in page)
            self.steps += sum(one.request.kind == Kind.OPTIM_STEP for one in page)
            self.after = int(page[-1].request.seq_id or 0)

    async def _execute(self, page: Sequence[Executed]) -> None:
        sequencer = Sequencer(self._model_id, Saves())  # the replay detaches no saves, and waits for none
        running = []
        for one in page:
            execution = Execution(self._context, one.request, sequencer.slot(), as_of=one.answered_at)
            running.append(asyncio.create_task(self._again(one, execution)))
        try:
            for task in running:
                await task
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _again(self, one: Executed, execution: Execution) -> None:
        request = one.request
        try:
            if one.answered_at is None or request.kind is Kind.SAVE_FOR_SAMPLER:
                self.copies[request.id] = await self._operations.copy_state(execution)
                return
            outcome = await self._operations.execute[request.kind](execution)
            if one.succeeded is False and outcome.error is None:  # the answer could not be stored, or came too late
                log.error(
                    "%s (seq_id %s) of model %s is answered as failed, and succeeds when it is replayed",
                    request.kind,
                    request.seq_id,
                    request.model_id,
                )
            for effect in outcome.effects:
                if isinstance(effect, SnapshotTaken):  # of a load, whose first one could not be read
                    await record(self._context, effect)
        except (GroupFailedError, AllocationError):  # which says nothing about the request
            raise
        except TinkerflowError as error:
            if one.succeeded or (one.succeeded is None and not isinstance(error, UserError)):
                raise ServerError(f"the replay of {request.kind} (seq_id {request.seq_id}) failed: {error}") from error
        finally:
            await execution.slot.end()

"""Forks: the state of a run after one of its optimizer steps, made again from its history and saved as a checkpoint.

`tinker://RUN/weights/@812` can be loaded and sampled as any checkpoint. The first use loads the newest earlier state of
the run into an adapter of its own, executes the requests between that state and the step again, and saves the result
under the path. The state is that of a recovery snapshot or of a checkpoint that the run has saved; else the fork begins
with the creation of the model. The adapter never has the id of the model, so a fork does not disturb a live run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import islice

from tinkerflow.backend.catalog.history import past_requests
from tinkerflow.backend.core.errors import GroupFailedError, NotFoundError, ServerError, StoreError, TinkerflowError
from tinkerflow.backend.journal import CheckpointKind, CheckpointSaved, CheckpointView, Kind, ModelView, Pending
from tinkerflow.backend.spec.commands import AdapterState, Done, DropAdapter, ExportAdapter, ImportAdapter
from tinkerflow.backend.spec.history import PastRequest
from tinkerflow.tasks.execution.operation import Execute, Execution, ExecutionContext
from tinkerflow.tasks.execution.sequencer import Slot, replay_in_order
from tinkerflow.tasks.execution.state_transfers import bring, meta_of

log = logging.getLogger(__name__)

KEPT_SECONDS = 86400.0  # a fork that has expired is made again when it is used
_PAGE = 16  # requests that are executed together; their payloads are in memory


@dataclass(frozen=True)
class _Start:
    """A state of the run that a fork can begin with: its path in the store, and the last request in it."""

    path: str
    seq_id: int


async def make_fork(context: ExecutionContext, row: CheckpointView, execute: Mapping[Kind, Execute]) -> None:
    """Save the checkpoint that `row` describes. Return when the journal and the store have it.

    context: bound to a worker group. execute: the operations that change a model. GroupFailedError: the group ended.
    NotFoundError: the history of the run does not reach the step. StoreError: a part of it is damaged.
    """
    await context.forks.run(row.path, _Fork(context, row, execute).make)


class _Fork:
    """One fork."""

    def __init__(self, context: ExecutionContext, row: CheckpointView, execute: Mapping[Kind, Execute]) -> None:
        self._context = replace(context, owner=row.owner)
        self._row = row
        self._adapter = f"{row.run_id}@{row.step}"
        self._execute = execute

    async def make(self) -> None:
        context, run_id = self._context, self._row.run_id
        began = context.clock.monotonic()
        model = await context.read(context.journal.models.get, run_id, None)
        last = await self._last_request()
        try:
            start = await self._load(last)
            replayed = await self._replay(model, start, last)
            state = await context.send(ExportAdapter(self._adapter, optimizer=True), AdapterState)
        finally:
            await self._drop()
        if state.step != self._row.step:
            raise ServerError(f"{self._row.path}: the replay of its history ends at step {state.step}")
        await self._save(state, model)
        log.info(
            "%s is made: %d requests executed again after request %d, in %.2f s",
            self._row.path,
            replayed,
            start,
            context.clock.monotonic() - began,
        )

    async def _last_request(self) -> int:
        """The optim_step that made the step. A run that has loaded an earlier state may have several; the last counts.

        Step 0 is the creation.
        """
        steps = await self._context.read(self._context.journal.histories.steps, self._row.run_id)
        return max((seq_id for seq_id, step in steps.items() if step == self._row.step), default=0)

    async def _load(self, last: int) -> int:
        """Load the newest state of the run up to request `last`. Returns the last request in it; -1 for none."""
        context = self._context
        for start in await self._starts(last):
            try:
                state, _ = await bring(context, self._adapter, start.path)
            except (StoreError, NotFoundError) as error:
                log.warning("%s does not begin with %s: %s", self._row.path, start.path, error)
                continue
            await context.send(ImportAdapter(self._adapter, state), Done)
            return start.seq_id
        return -1

    async def _starts(self, last: int) -> list[_Start]:
        """States of the run up to request `last`, newest first."""
        context, row, run_id = self._context, self._row, self._row.run_id
        snapshots = await context.read(context.journal.recovery.snapshots, run_id)
        starts = [_Start(view.path, view.seq_id) for view in snapshots if view.seq_id <= last]
        saves = await context.read(context.journal.histories.clean_saves, run_id, last)
        page = await context.read(context.journal.checkpoints.page, row.owner, run_id=run_id)
        for view in page.rows:
            if view.kind is CheckpointKind.WEIGHTS and view.path != row.path:
                saved = await asyncio.to_thread(context.store.find, view.path)
                if saved is not None and saved.meta.request_id in saves:
                    starts.append(_Start(view.path, saves[saved.meta.request_id]))
        return sorted(starts, key=lambda start: -start.seq_id)

    async def _replay(self, model: ModelView, start: int, last: int) -> int:
        """Execute the requests after `start` up to `last` again. Returns their number."""
        context = self._context
        if start >= last:  # it is the state of a save that followed
            return 0
        history = past_requests(context.journal, context.store, model.id, after=start)
        expected, count = start, 0
        while page := await asyncio.to_thread(lambda: list(islice(history, _PAGE))):
            if expected == -1 and page[0].seq_id != 0:
                raise NotFoundError(f"{self._row.path}: the history of its run does not begin with its creation")
            chosen = [past for past in page if past.seq_id <= last and past.kind in self._execute]
            await replay_in_order(self._adapter, [partial(self._execute_again, model, past) for past in chosen])
            count, expected = count + len(chosen), page[-1].seq_id
            if expected >= last:
                return count
        if expected < last:
            raise NotFoundError(f"{self._row.path}: the history of its run ends at request {expected} of {last}")
        return count

    async def _execute_again(self, model: ModelView, past: PastRequest, slot: Slot) -> None:
        kind = Kind(past.kind)
        request = Pending(
            past.request_id, kind, model.owner, model.session_id, model.id, None, past.seq_id, past.payload
        )
        execution = Execution(self._context, request, slot, as_of=past.answered_at, fork=self._adapter)
        try:
            await self._execute[kind](execution)
        except GroupFailedError:
            raise
        except TinkerflowError as error:
            if past.error is None:
                raise ServerError(f"{self._row.path}: {kind} (seq_id {past.seq_id}) failed: {error}") from error
        finally:
            await slot.end()

    async def _drop(self) -> None:
        try:
            await self._context.send(DropAdapter(self._adapter), Done)
        except GroupFailedError as error:
            log.info("the adapter of %s ended with its worker group: %s", self._row.path, error)

    async def _save(self, state: AdapterState, model: ModelView) -> None:
        context, row = self._context, self._row
        meta = replace(
            meta_of(context, row.owner),
            expires_at=context.clock.now() + timedelta(seconds=KEPT_SECONDS),
            run_metadata=model.user_metadata,
        )
        saved = await asyncio.to_thread(
            context.store.save, row.run_id, str(row.kind), row.name, state, meta, overwrite=True
        )
        await context.read(context.journal.checkpoints.record_fork, CheckpointSaved.of(saved))

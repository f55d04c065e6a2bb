"""Forks: the state of a run after one of its optimizer steps, recomputed from its history and saved as a checkpoint.

`tinker://RUN/weights/@812` can be loaded and sampled like any checkpoint. The first use loads the newest earlier state
of the run into a separate adapter. It executes the requests between that state and the step again, and saves the result
under the path. The earlier state is a recovery snapshot or a checkpoint that the run has saved. If there is neither,
the fork begins with the creation of the model. A live run is not disturbed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from tinkerflow.backend.core.errors import NotFoundError, ServerError, StoreError
from tinkerflow.backend.journal import CheckpointKind, CheckpointSaved, CheckpointView, Kind, Limits, ModelView
from tinkerflow.backend.spec.commands import AdapterState, ExportAdapter
from tinkerflow.backend.spec.history import last_request
from tinkerflow.tasks.execution.history_replay import HistoryReplay
from tinkerflow.tasks.execution.operation import Execute, ExecutionContext
from tinkerflow.tasks.execution.state_transfers import meta_of

log = logging.getLogger(__name__)

KEPT_SECONDS = 86400.0  # seconds until a fork expires; its next use makes it again


@dataclass(frozen=True)
class _Start:
    """A state of the run that a fork can begin with: its path in the store, and the last request in it."""

    path: str
    seq_id: int


async def make_fork(context: ExecutionContext, row: CheckpointView, execute: Mapping[Kind, Execute]) -> None:
    """Save the checkpoint that `row` describes. Return once it is in the journal and the store.

    context: bound to a worker group. execute: the operations that change a model. Concurrent callers share the work. If
    the run makes the step again meanwhile, the work begins again.
    GroupFailedError: the group ended. NotFoundError: the history ends before the step. StoreError: the history is
    damaged. UserError: the project's storage quota is used up.
    """
    while await context.forks.run(row.path, lambda: _make(context, row, execute)) != await _last(context, row):
        log.info("%s is created again: its run has made the step again", row.path)


async def _last(context: ExecutionContext, row: CheckpointView) -> int:
    """The seq_id of the last request in the state that `row` describes."""
    steps = await context.read(context.journal.histories.steps, row.run_id)
    return last_request(steps, row.step) or 0


async def _make(context: ExecutionContext, row: CheckpointView, execute: Mapping[Kind, Execute]) -> int:
    """Save the checkpoint. Returns the seq_id of the last request in it."""
    began = context.clock.monotonic()
    setting = Limits(stored_bytes=context.max_stored_bytes)
    quota = await context.read(context.journal.project_limits.of, row.owner, setting)
    await context.read(context.journal.checkpoints.check_storage, row.owner, quota)
    model = await context.read(context.journal.models.get, row.run_id, None)
    as_of, last, adapter_id = context.clock.now(), await _last(context, row), f"{row.run_id}@{row.step}"
    replay = HistoryReplay(context, model, adapter_id, execute)
    try:
        start = await _load(context, row, replay, last)
        if start < last:  # otherwise a save after the step has this state
            await replay.run(start, last)
        state = await context.send(ExportAdapter(adapter_id, optimizer=True), AdapterState)
    finally:
        await replay.drop()
    # The state before a step is exported after the forward_backwards of the step.
    moments = {name: values for name, values in state.moments.items() if not name.endswith(".grad")}
    state = state.copy_with(moments=moments)
    if state.step != row.step:
        raise ServerError(f"{row.path}: the replay of its history ends at step {state.step}")
    if (differs := replay.differs) is not None:
        text = "%s: the result of %s (seq_id %d) is not the recorded one: this worker group computes different bits"
        log.warning(text, row.path, differs.kind, differs.seq_id)
    await _save(context, row, state, model, as_of)
    seconds = context.clock.monotonic() - began
    text = "created %s: %d requests executed again after request %d, in %.2f s"
    log.info(text, row.path, replay.requests, start, seconds)
    return last


async def _load(context: ExecutionContext, row: CheckpointView, replay: HistoryReplay, last: int) -> int:
    """Load the newest state of the run up to request `last`. Returns the last request in it, or -1 if there is none."""
    for start in await _starts(context, row, last):
        try:
            await replay.load(start.path)
        except (StoreError, NotFoundError) as error:
            log.warning("cannot begin %s with %s: %s", row.path, start.path, error)
        else:
            return start.seq_id
    return -1


async def _starts(context: ExecutionContext, row: CheckpointView, last: int) -> list[_Start]:
    """States of the run up to request `last`, newest first."""
    journal, run_id = context.journal, row.run_id
    snapshots = await context.read(journal.recovery.snapshots, run_id)
    starts = [_Start(view.path, view.seq_id) for view in snapshots if view.seq_id <= last]
    saves = await context.read(journal.histories.clean_saves, run_id, last)
    page = await context.read(journal.checkpoints.page, row.owner, run_id=run_id)
    for view in page.rows:
        if view.kind is CheckpointKind.WEIGHTS and view.path != row.path:
            saved = await context.in_store(context.store.find, view.path)
            if saved is not None and saved.meta.request_id in saves:
                starts.append(_Start(view.path, saves[saved.meta.request_id]))
    return sorted(starts, key=lambda start: -start.seq_id)


async def _save(
    context: ExecutionContext, row: CheckpointView, state: AdapterState, model: ModelView, as_of: datetime
) -> None:
    """Save the state. as_of: before it was chosen. A step that is made again after this time makes the row outdated."""
    meta = replace(
        meta_of(context, row.owner),
        expires_at=context.clock.now() + timedelta(seconds=KEPT_SECONDS),
        run_metadata=model.user_metadata,
    )
    save = context.store.save
    saved = await context.in_store(save, row.run_id, str(row.kind), row.name, state, meta, overwrite=True)
    made = replace(CheckpointSaved.of(saved), created_at=as_of)
    try:
        await context.read(context.journal.checkpoints.record_fork, made)
    except NotFoundError:  # the run was deleted meanwhile
        await context.in_store(context.store.delete, saved.path, saved.attempt)
        raise

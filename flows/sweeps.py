"""The sweeps, which every few seconds end expired objects and apply the journal's decisions to the store.

The journal changes first. A checkpoint that is marked as deleted there cannot be read, even if its files still exist.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from tinkerflow.backend.catalog.peft_import import import_path
from tinkerflow.backend.core.errors import FencedError, GroupFailedError, StoreError
from tinkerflow.backend.journal import AWAY, HistoryRules, Journal, Kind, Retention
from tinkerflow.backend.settings import Settings
from tinkerflow.backend.spec.history import PastRequest
from tinkerflow.backend.store import Store
from tinkerflow.backend.wire import split_data
from tinkerflow.flows.groups import ServedModel
from tinkerflow.tasks.execution.state_transfers import drop

log = logging.getLogger(__name__)

SWEEP_SECONDS = 5.0
OVER = "its session has ended"
_EXPIRED_AT_ONCE, _EXPIRE_CALLS = 500, 20  # in one sweep; 10,000 requests, more than arrive between two sweeps
_MOST_SEGMENTS = 4  # segments of each history in one sweep


class Sweeps:
    """Ends expired objects, and applies the journal's decisions to the store.

    The sweep of the journal never waits for the store, which may take an hour to fail.
    """

    def __init__(self, settings: Settings, journal: Journal, served: Sequence[ServedModel]) -> None:
        """settings, journal: the engine's. served: every base model; all have the same store."""
        self._settings = settings
        self._journal = journal
        self._served = served
        self._store = served[0].context.store

    async def sweep_journal(self) -> list[str]:
        """Sweep the journal and the worker groups once. Returns the ids of models whose session is over."""
        abandoned = await asyncio.to_thread(self._sweep_journal)
        for model in self._served:
            await model.sampling.cancel_ended()
            await self._drop_snapshots(model)
        return abandoned

    async def sweep_store(self) -> None:
        """Apply the journal's decisions to the store once."""
        await self._served[0].context.in_store(self._sweep_store)

    def _sweep_store(self) -> None:
        settings, journal, store = self._settings, self._journal, self._store
        write_histories(journal, store)
        delete_checkpoints(journal, store, Retention(settings.keep_last, settings.keep_every))
        write_changes(journal, store)
        delete_snapshots(journal, store)
        delete_uploads(journal, store)
        delete_histories(journal, store, HistoryRules(settings.history_days, settings.max_history_bytes))

    def _sweep_journal(self) -> list[str]:
        settings, journal = self._settings, self._journal
        for session_id in journal.sessions.expire(settings.session_timeout):
            log.info("session %s expired: no heartbeat for %.0f s", session_id, settings.session_timeout)
        abandoned = journal.models.abandoned()
        for model_id in abandoned:
            journal.models.request_unload(model_id, OVER)
        journal.models.forget_ended()
        for gap in journal.queue.gaps(settings.gap_timeout):
            journal.queue.skip_gap(gap)
        expire_results(journal, settings.result_ttl)
        journal.streams.expire()
        return abandoned

    async def _drop_snapshots(self, model: ServedModel) -> None:
        """Drop snapshots of closed samplers, and surplus ones until they are sampled again."""
        snapshots = model.context.snapshots
        if snapshots.droppable:
            unused = await asyncio.to_thread(self._journal.samplers.unused_snapshots, snapshots.droppable)
            # samplers of some of them may have been opened in the meantime
            await drop_from_group(model, [snapshot for snapshot in unused if snapshot in snapshots.droppable])
            most, host_bytes = self._settings.resident_snapshots, self._settings.host_snapshot_bytes
            await drop_from_group(model, snapshots.surplus(most, host_bytes))


async def drop_from_group(model: ServedModel, snapshot_ids: Sequence[str]) -> None:
    """Drop sampling snapshots from the base model's worker group, if the group still serves."""
    with suppress(GroupFailedError):  # the snapshots ended with the group; sweeps never wait for the next group
        await drop(model.context.bound_to(model.pool.generation), snapshot_ids)


def expire_results(journal: Journal, ttl: float) -> None:
    """Drop the bytes of requests that were last used over `ttl` seconds ago."""
    for _ in range(_EXPIRE_CALLS):
        if journal.results.expire(ttl, _EXPIRED_AT_ONCE) < _EXPIRED_AT_ONCE:
            return


def delete_checkpoints(journal: Journal, store: Store, keep: Retention) -> None:
    """Mark expired and retired checkpoints as deleted, and delete the files of all deleted checkpoints."""
    for path in journal.upkeep.delete_expired():
        log.info("checkpoint %s expired", path)
    for path in journal.upkeep.delete_retired(keep):
        log.info("checkpoint %s is deleted by the retention rule: %s", path, keep)
    for path, attempt in journal.upkeep.unpurged():
        with _tried_again(f"checkpoint {path} is deleted, but its files cannot be removed now"):
            store.delete(path, attempt)
            journal.upkeep.purged(path, attempt)


def write_changes(journal: Journal, store: Store) -> None:
    """Write changes in checkpoints' expiry and publication to their commits, so that the store alone is complete."""
    for change in journal.upkeep.unnoted():
        with _tried_again(f"checkpoint {change.path}: its commit cannot be changed now"):
            store.amend(change.path, change.attempt, public=change.public, expires_at=change.expires_at)
            journal.upkeep.noted(change)


def delete_snapshots(journal: Journal, store: Store) -> None:
    """Delete recovery snapshots that are no longer needed. Deletes files before rows, so that no file is left."""
    for path in journal.recovery.superfluous():
        with _tried_again(f"recovery snapshot {path} cannot be deleted now"):
            store.delete(path)
            journal.recovery.forget_snapshot(path)


def delete_uploads(journal: Journal, store: Store) -> None:
    """Remove the files of finished uploads. An upload that was committed without its rows is not a checkpoint.

    `checkpoint rebuild-index` may have inserted the rows.
    """
    for upload in journal.uploads.over():
        with _tried_again(f"upload {upload.id} cannot be removed now"):
            store.uploads.remove_upload(upload.id)
            path = str(import_path(upload.id))
            if upload.path is None and journal.imports.attempt_of(path) is None:
                store.delete(path)
            journal.uploads.forget(upload.id)


def write_histories(journal: Journal, store: Store) -> None:
    """Write at most _MOST_SEGMENTS segments of each due history. The journal then drops these requests."""
    for model_id in journal.histories.due():
        with _tried_again(f"the history of run {model_id} cannot be written now"):
            for _ in range(_MOST_SEGMENTS):
                _write_segment(journal, store, model_id)
                if model_id not in journal.histories.due():
                    break


def _write_segment(journal: Journal, store: Store, model_id: str) -> None:
    if not (requests := journal.histories.unarchived(model_id)):
        return
    if (unsure := store.histories.unsure.get(model_id)) is not None:
        if unsure not in [one.name for one in journal.histories.segments(model_id)]:
            store.histories.remove_segment(model_id, unsure)
        del store.histories.unsure[model_id]
    segment = store.histories.write_segment(model_id, requests, _pieces)
    try:
        recorded = journal.histories.record_segment(model_id, segment)
    except FencedError:
        store.histories.remove_segment(model_id, segment.name)
        raise
    except AWAY:
        store.histories.unsure[model_id] = segment.name
        raise
    if not recorded:
        store.histories.remove_segment(model_id, segment.name)


def _pieces(request: PastRequest) -> list[bytes]:
    is_forward = request.kind in (Kind.FORWARD, Kind.FORWARD_BACKWARD)
    return split_data(request.payload) if is_forward else [request.payload]


def delete_histories(journal: Journal, store: Store, rules: HistoryRules) -> None:
    """Delete histories that are too old or too large. Deletes objects before rows, so that no object is left."""
    for model_id in journal.histories.to_delete(rules):
        with _tried_again(f"the history of run {model_id} cannot be deleted now"):
            journal.histories.end(model_id)
            store.histories.remove_history(model_id)
            journal.histories.forget(model_id)
            log.info("the history of run %s is deleted: %s", model_id, rules)


@contextmanager
def _tried_again(failed: str) -> Iterator[None]:
    """Wrap a change of the store and then of the journal. failed: the log message if the store fails."""
    try:
        yield
    except StoreError:
        log.warning("%s; the next sweep tries again", failed, exc_info=True)

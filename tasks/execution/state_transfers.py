"""Transfers of states into and out of a worker group: stored states, and recovery snapshots of models.

If every process reaches the store, each reads and writes its own part of a state, and the engine sends only names. If
some process does not (a local store with workers on another host), the engine reads and writes full states, which
travel with commands. Only this module distinguishes the two cases. If a process fails to read a state, the engine tries
to read it.

Recovery snapshots are committed like checkpoints, under a kind that clients never see. `__init__.py` explains their
purpose, and flows/runner.py decides when one is taken.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from tinkerflow.backend.core.errors import FencedError, GroupFailedError, NotFoundError, StoreError, TinkerflowError
from tinkerflow.backend.core.ids import new_id
from tinkerflow.backend.journal import AWAY, SnapshotTaken
from tinkerflow.backend.spec.checkpoint import RECOVERY
from tinkerflow.backend.spec.commands import (
    AdapterKept,
    AdapterState,
    Done,
    DropSnapshot,
    ExportAdapter,
    FetchState,
    LoadSnapshot,
    SnapshotHeld,
    StoredState,
    WriteState,
)
from tinkerflow.backend.store import CheckpointMeta, Saved
from tinkerflow.tasks.execution.operation import Execution, ExecutionContext
from tinkerflow.tasks.execution.sequencer import Slot

log = logging.getLogger(__name__)


async def bring(
    context: ExecutionContext, owner: str, path: str, *, optimizer: bool = True
) -> tuple[AdapterState | StoredState, Saved]:
    """Prepare the state under `path` for a command of this worker group. Returns the state and its commit.

    context: bound to the worker group. owner: the adapter of the ImportAdapter, or the snapshot of the LoadSnapshot,
    that gets the state. optimizer: include the optimizer's moments. NotFoundError: the state is not in the store.
    StoreError: a file is damaged. GroupFailedError: the group ended.
    """
    if not context.pool.reaches_store:
        return await context.in_store(context.store.load, path, optimizer=optimizer)
    state, saved = await context.in_store(context.store.stored, path, optimizer=optimizer)
    try:
        await context.pool.transfer(FetchState(owner, state), generation=context.generation)
    except (StoreError, NotFoundError) as error:  # perhaps missing only in that process: the engine's attempt decides
        log.warning("a worker process cannot read %s, so the engine does: %s", path, error)
        return await context.in_store(context.store.load, path, optimizer=optimizer)
    return state, saved


async def load_snapshot(context: ExecutionContext, snapshot_id: str, path: str) -> SnapshotHeld:
    """Load a sampling snapshot from `path`. Returns the memory that it takes. Raises the errors of `bring`."""
    state, _ = await bring(context, snapshot_id, path, optimizer=False)
    return await context.send(LoadSnapshot(snapshot_id, state), SnapshotHeld)


async def drop_surplus_full_models(context: ExecutionContext, *, coming: bool) -> None:
    """Drop snapshots of full-parameter models that exceed the workers' host memory for them (`Snapshots.surplus`).

    coming: another such snapshot is about to be loaded.
    """
    snapshots = context.snapshots
    await drop(context, snapshots.surplus(len(snapshots), context.full_models.host_bytes, coming=coming))


async def drop(context: ExecutionContext, snapshot_ids: Sequence[str]) -> None:
    """Drop snapshots. All commands are sent before the first await, so a later load follows them.

    context: bound to the group that holds the snapshots.
    """
    for snapshot_id in snapshot_ids:
        context.snapshots.dropped(snapshot_id)
    await asyncio.gather(*(context.send(DropSnapshot(snapshot_id), Done) for snapshot_id in snapshot_ids))


# ------------------------------------------------------------------ recovery snapshots
class Copy:
    """A copy of a model that becomes a recovery snapshot. It is begun in its slot and committed later."""

    def __init__(self, context: ExecutionContext, model_id: str, name: str) -> None:
        """Begin to copy. name: the snapshot's name, never used before."""
        self._context, self._model_id, self._name = context, model_id, name
        self._folder = context.store.new_folder(model_id, RECOVERY, name) if context.pool.reaches_store else ""
        export = ExportAdapter(model_id, optimizer=True, keep=self._folder)
        self.copied: asyncio.Task[AdapterKept] | asyncio.Task[AdapterState] = (
            context.send(export, AdapterKept) if self._folder else context.send(export, AdapterState)
        )

    async def commit(self, meta: CheckpointMeta) -> Saved:
        """Write and commit the copy. StoreError: the store failed. GroupFailedError: the group ended."""
        state, context, store = await self.copied, self._context, self._context.store
        if isinstance(state, AdapterState):
            return await context.in_store(store.save, self._model_id, RECOVERY, self._name, state, meta)
        try:
            write = WriteState(self._model_id, self._folder)
            files = await context.pool.transfer(write, generation=context.generation)
        except Exception:
            await context.in_store(store.discard, self._folder)
            raise
        return await context.in_store(store.commit_parts, self._folder, state, meta, files)


async def take_snapshot(context: ExecutionContext, model_id: str, seq_id: int, slot: Slot) -> SnapshotTaken | None:
    """Take a snapshot of the model at this slot. A failure is logged; the next replay is then longer."""
    began = context.clock.monotonic()
    try:
        try:
            async with slot:
                copy = Copy(context, model_id, new_id(f"seq-{seq_id}"))
            await copy.copied
            await slot.predecessors()
        finally:
            await slot.end()
        model = await context.read(context.journal.models.get, model_id, None)
        saved = await copy.commit(meta_of(context, model.owner))
        taken = SnapshotTaken(saved.path, model_id, seq_id, saved.step, saved.size_bytes, None)
        await slot.earlier_saves()
        if not await record(context, taken):
            return None
        log.info(
            "snapshot of model %s at request %d: %.1f MiB, in %.2f s",
            model_id,
            seq_id,
            taken.size_bytes / 2**20,
            context.clock.monotonic() - began,
        )
        return taken
    except (GroupFailedError, FencedError) as error:
        log.info("no snapshot of model %s: %s", model_id, error)
    except (TinkerflowError, *AWAY):
        log.warning("no snapshot of model %s at request %d", model_id, seq_id, exc_info=True)
    return None


async def commit(execution: Execution, state: AdapterState, snapshot_id: str | None = None) -> SnapshotTaken:
    """Write `state` in a thread, as the state of the model after this operation. Returns the record for the journal.

    Each commit gets a new name, so that a fenced engine cannot interfere. snapshot_id: see SnapshotTaken.
    StoreError: the store failed.
    """
    context, model_id, seq_id = execution.context, execution.model_id, execution.request.seq_id or 0
    name, meta = new_id(f"seq-{seq_id}"), meta_of(context, execution.request.owner, snapshot_id or "")
    saved = await context.in_store(context.store.save, model_id, RECOVERY, name, state, meta)
    return SnapshotTaken(saved.path, model_id, seq_id, saved.step, saved.size_bytes, snapshot_id)


def meta_of(context: ExecutionContext, owner: str, request_id: str = "") -> CheckpointMeta:
    """The metadata for committing a state of the current worker group."""
    return CheckpointMeta(
        base_model=context.card.name,
        owner=owner,
        request_id=request_id,
        generation=context.pool.generation,
        programs=context.pool.info.programs,
    )


async def record(context: ExecutionContext, taken: SnapshotTaken) -> bool:
    """Record a commit in the journal. Deletes the commit and returns False if it must not be used."""
    if await context.read(context.journal.recovery.snapshot_taken, taken):
        return True
    await context.in_store(context.store.delete, taken.path)
    return False

"""How a stored state gets into a worker group, and how a recovery snapshot gets into the store.

Where every process reaches the store, each reads and writes its own part of a state, and the engine sends names. Where
one does not (a local store, and workers on another host), the engine reads and writes whole states, which travel with
commands. Which of the two it is, is asked here alone. What a process fails to read, the engine tries to read itself.
"""

from __future__ import annotations

import asyncio
import logging

from tinkerflow.backend.checkpoint_paths import RECOVERY
from tinkerflow.backend.commands import (
    AdapterKept,
    AdapterState,
    ExportAdapter,
    FetchState,
    LoadSnapshot,
    SnapshotHeld,
    StoredState,
    WriteState,
)
from tinkerflow.backend.errors import NotFoundError, StoreError
from tinkerflow.backend.store import CheckpointMeta, Saved
from tinkerflow.tasks.execution.context import ExecutionContext

log = logging.getLogger(__name__)


async def bring(
    context: ExecutionContext, owner: str, path: str, *, optimizer: bool = True
) -> AdapterState | StoredState:
    """The state under `path` for an ImportAdapter of the adapter, or a LoadSnapshot of the snapshot, `owner`.

    context: bound to the worker group that gets it. optimizer: with the optimizer's moments.
    NotFoundError when it is not in the store, StoreError names the damaged file, GroupFailedError: the group ended.
    """
    if not context.pool.reaches_store:
        return (await asyncio.to_thread(context.store.load, path, optimizer=optimizer))[0]
    state = await asyncio.to_thread(context.store.stored, path, optimizer=optimizer)
    try:
        await context.pool.transfer(FetchState(owner, state), generation=context.generation)
    except (StoreError, NotFoundError) as error:  # maybe only there: what the engine finds, counts
        log.warning("a worker process cannot read %s, so the engine does: %s", path, error)
        return (await asyncio.to_thread(context.store.load, path, optimizer=optimizer))[0]
    return state


async def load_snapshot(context: ExecutionContext, snapshot_id: str, path: str) -> int | None:
    """Make a sampling snapshot of the weights under `path`: its bytes on the host. Errors are as in `bring`."""
    if context.generation is None:
        context = context.bound_to(await context.pool.serving())
    state = await bring(context, snapshot_id, path, optimizer=False)
    return (await context.send(LoadSnapshot(snapshot_id, state), SnapshotHeld)).host_bytes


class Copy:
    """A copy of a model that becomes a recovery snapshot: begun in its slot, committed later."""

    def __init__(self, context: ExecutionContext, model_id: str, name: str) -> None:
        """Begin to copy. name: of the snapshot, new each time."""
        self._context, self._model_id, self._name = context, model_id, name
        self._folder = context.store.new_folder(model_id, RECOVERY, name) if context.pool.reaches_store else ""
        export = ExportAdapter(model_id, optimizer=True, keep=self._folder)
        self.copied: asyncio.Task[AdapterKept] | asyncio.Task[AdapterState] = (
            context.send(export, AdapterKept) if self._folder else context.send(export, AdapterState)
        )

    async def commit(self, meta: CheckpointMeta) -> Saved:
        """Write what was copied, and commit it; StoreError: the store fails; GroupFailedError: the group ends."""
        state, context, store = await self.copied, self._context, self._context.store
        if isinstance(state, AdapterState):
            return await asyncio.to_thread(store.save, self._model_id, RECOVERY, self._name, state, meta)
        try:
            write = WriteState(self._model_id, self._folder)
            files = await context.pool.transfer(write, generation=context.generation)
        except Exception:
            await asyncio.to_thread(store.discard, self._folder)
            raise
        return await asyncio.to_thread(store.commit_parts, self._folder, state, meta, files)

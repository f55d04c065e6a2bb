"""The sampling snapshots in the worker group's memory, and the selection of those to drop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from tinkerflow.backend.core.single_flight import SingleFlight
from tinkerflow.backend.spec.commands import SnapshotHeld
from tinkerflow.tasks.execution.sequencer import Saves


class Snapshots:
    """The engine's list of the snapshots in the group. A stored snapshot is loaded when it is sampled."""

    def __init__(self, saves: Saves) -> None:
        """Begin with an empty list. saves: the saves in progress. Their snapshots are not stored yet, and are kept."""
        self._saves = saves
        self._present: dict[str, SnapshotHeld] = {}
        self._recorded: dict[str, None] = {}  # least recently used first
        self._users: Counter[str] = Counter()
        self._loading = SingleFlight[SnapshotHeld]()

    def __len__(self) -> int:
        """The number of snapshots that the group holds."""
        return len(self._present)

    def held(self, snapshot_id: str | None) -> SnapshotHeld | None:
        """The memory that a snapshot takes, or None if the group does not hold it."""
        return self._present.get(snapshot_id or "")

    def published(self, snapshot_id: str, held: SnapshotHeld) -> None:
        """Note that the group holds the snapshot. The sampler's row that names it may not be written yet."""
        self._present[snapshot_id] = held

    @contextmanager
    def using(self, snapshot_id: str) -> Iterator[None]:
        """Keep the snapshot during the block, in which a request loads and samples it."""
        self._users[snapshot_id] += 1
        try:
            yield
        finally:
            self._users -= Counter((snapshot_id,))  # drops snapshots whose count is 0

    async def load_once(self, snapshot_id: str, load: Callable[[], Awaitable[SnapshotHeld]]) -> None:
        """Call `load`, which returns the memory that the snapshot takes, unless the group holds the snapshot.

        Concurrent callers share one call and its failure.
        """
        if snapshot_id not in self._present:
            self._present[snapshot_id] = await self._loading.run(snapshot_id, load)

    def recorded(self, snapshot_id: str) -> None:
        """Note that a sampler's row in the journal names this snapshot. Call this again whenever it is used."""
        if snapshot_id in self._present:
            self._recorded.pop(snapshot_id, None)
            self._recorded[snapshot_id] = None

    def moving(self, snapshot_id: str, to_id: str) -> None:
        """Note that the snapshot gets the id `to_id`. It is kept until the row of its sampler names it."""
        self.dropped(snapshot_id)
        self._recorded.pop(to_id, None)

    @property
    def droppable(self) -> frozenset[str]:
        """The snapshots that rows of the journal name. The journal shows whether a sampler still uses them."""
        return frozenset(self._recorded)

    def surplus(self, most: int, host_bytes: int, *, coming: bool = False) -> list[str]:
        """The stored snapshots in excess that are not in use, least recently used first.

        most: the number of most recently used snapshots that are exempt, not counting snapshots on the host. Of the
        latter, only the most recently used one is exempt. coming: another snapshot on the host is about to be loaded,
        so no snapshot there is exempt. host_bytes: host memory in bytes that the other snapshots may take.
        """
        last_used = [*self._recorded, *(name for name in self._present if name not in self._recorded)]
        on_host = [name for name in last_used if self._present[name].on_host]
        on_device = [name for name in last_used if name not in on_host]
        exempt = {*on_device[max(0, len(on_device) - most) :], *([] if coming else on_host[-1:])}
        others = {name: self._present[name].host_bytes for name in last_used if name not in exempt}
        excess, surplus = sum(size or 0 for size in others.values()) - host_bytes, []
        for name, size in others.items():
            if (size is None or excess > 0) and not self._saves.is_unstored(name) and not self._users[name]:
                excess -= size or 0
                surplus.append(name)
        return surplus

    def dropped(self, snapshot_id: str) -> None:
        """Note that the group no longer holds the snapshot."""
        self._present.pop(snapshot_id, None)
        self._recorded.pop(snapshot_id, None)

    def lost(self) -> None:
        """Note that the group ended, with all its snapshots."""
        self._present.clear()
        self._recorded.clear()

"""Which sampling snapshots are in the worker group now, and which of them it can do without."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from tinkerflow.backend.spec.commands import SnapshotHeld
from tinkerflow.tasks.execution.sequencer import Saves


class Snapshots:
    """The engine's own list of what it put into the group. What is in the store is loaded when it is sampled."""

    def __init__(self, saves: Saves) -> None:
        """None yet. saves: what is not in the store yet, and so cannot be loaded again."""
        self._saves = saves
        self._present: dict[str, SnapshotHeld] = {}
        self._recorded: dict[str, None] = {}  # least recently used first
        self._users: Counter[str] = Counter()
        self._loading: dict[str, asyncio.Future[SnapshotHeld]] = {}

    def __len__(self) -> int:
        """How many the group holds."""
        return len(self._present)

    def held(self, snapshot_id: str | None) -> SnapshotHeld | None:
        """What it takes; None when the group does not hold it."""
        return self._present.get(snapshot_id or "")

    def published(self, snapshot_id: str, held: SnapshotHeld) -> None:
        """The group holds it now, and the journal's row of its sampler says so or will in the same transaction."""
        self._present[snapshot_id] = held

    @contextmanager
    def using(self, snapshot_id: str) -> Iterator[None]:
        """Somebody samples it, or will as soon as it is loaded: it stays."""
        self._users[snapshot_id] += 1
        try:
            yield
        finally:
            self._users -= Counter((snapshot_id,))  # without what comes to 0

    async def load_once(self, snapshot_id: str, load: Callable[[], Awaitable[SnapshotHeld]]) -> None:
        """Call `load`, which says what it takes, unless the snapshot is there.

        Callers at the same time share one call, and its failure.
        """
        if snapshot_id in self._present:
            return
        if (pending := self._loading.get(snapshot_id)) is None:
            pending = asyncio.ensure_future(load())
            self._loading[snapshot_id] = pending
            pending.add_done_callback(lambda _: self._loading.pop(snapshot_id, None))
        self._present[snapshot_id] = await asyncio.shield(pending)

    def recorded(self, snapshot_id: str) -> None:
        """A sampler's row in the journal names this snapshot by now. Say so again whenever it is used."""
        if snapshot_id in self._present:
            self._recorded.pop(snapshot_id, None)
            self._recorded[snapshot_id] = None

    def moving(self, snapshot_id: str, to_id: str) -> None:
        """The one gets the other's id. It is not dropped before the row of the sampler that wants it says so."""
        self.dropped(snapshot_id)
        self._recorded.pop(to_id, None)

    @property
    def droppable(self) -> frozenset[str]:
        """Those that the journal knows of: of these it can say whether a sampler still uses them."""
        return frozenset(self._recorded)

    def surplus(self, most: int, host_bytes: int, *, coming: bool = False) -> list[str]:
        """Those in excess that are stored and that nobody uses at the moment, least recently used first.

        Beside the `most` last used ones, the group may hold `host_bytes` of others where these wait on the host. Of
        those that are always there, only the last used one is beside that, or the one that is about to come (`coming`).
        What is not stored, or is in use, stays all the same.
        """
        last_used = [*self._recorded, *(one for one in self._present if one not in self._recorded)]
        on_host = [one for one in last_used if self._present[one].on_host]
        evicted = [one for one in last_used if one not in on_host]
        beside = {*evicted[max(0, len(evicted) - most) :], *([] if coming else on_host[-1:])}
        others = {one: self._present[one].host_bytes for one in last_used if one not in beside}
        excess, found = sum(size or 0 for size in others.values()) - host_bytes, []
        for one, size in others.items():
            if (size is None or excess > 0) and not self._saves.is_unstored(one) and not self._users[one]:
                excess -= size or 0
                found.append(one)
        return found

    def dropped(self, snapshot_id: str) -> None:
        """The group does not hold it any more."""
        self._present.pop(snapshot_id, None)
        self._recorded.pop(snapshot_id, None)

    def lost(self) -> None:
        """The group ended, and all snapshots with it."""
        self._present.clear()
        self._recorded.clear()

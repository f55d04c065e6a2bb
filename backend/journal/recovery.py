"""The part of the journal that only recovery uses: `journal.recovery`. Every method is one short transaction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from tinkerflow.backend.journal import condition, history, leases
from tinkerflow.backend.journal.condition import Condition
from tinkerflow.backend.journal.database import Aggregate
from tinkerflow.backend.journal.leases import Held
from tinkerflow.backend.journal.records import SnapshotTaken
from tinkerflow.backend.journal.views import Executed, Pending, SnapshotView


class Leases(Aggregate):
    """The engine's lease, and the API's heartbeats."""

    @property
    def epoch(self) -> int | None:
        """The epoch under which this process holds the engine's lease; None when it never took it."""
        return self._database.epoch

    def acquire(self, holder: str, *, force: bool = False) -> Held | None:
        """Take the engine's lease; who holds it if that fails. From then on answers are refused when it is lost."""
        with self._database.write() as connection:
            taken = leases.acquire(connection, holder, self._clock.now(), force=force)
        if isinstance(taken, Held):
            return taken
        self._database.epoch = taken
        return None

    def renew(self) -> None:
        """Keep the lease; FencedError when another engine has taken it."""
        with self._database.write() as connection:
            leases.renew(connection, self._held(), self._clock.now())

    def release(self) -> None:
        """Give the lease back."""
        with self._database.write() as connection:
            leases.release(connection, self._held())

    def beat(self) -> None:
        """Say that the API answers its clients."""
        with self._database.write() as connection:
            leases.beat(connection, self._clock.now())

    def answering_since(self) -> datetime | None:
        """Since when clients can reach the API without a pause; None when no API ever said so."""
        with self._database.read() as connection:
            return leases.answering_since(connection, self._clock.now())

    def _held(self) -> int:
        if self._database.epoch is None:
            raise ValueError("the engine's lease was never acquired: call acquire first")
        return self._database.epoch


class Recovery(Aggregate):
    """Snapshots, what is replayed after them, and suspects."""

    def snapshot_taken(self, taken: SnapshotTaken) -> bool:
        """Record a snapshot whose commit is in the store; False when it must not be used, and should be deleted."""
        with self._database.write() as connection:
            if self._database.epoch is not None:
                leases.check(connection, self._database.epoch)
            return history.snapshot_taken(connection, taken, self._clock.now())

    def snapshots(self, model_id: str | None = None) -> list[SnapshotView]:
        """Snapshots of a model, or of all, newest first."""
        with self._database.read() as connection:
            return history.snapshots(connection, model_id)

    def restorable(self, model_id: str) -> list[SnapshotView]:
        """The model's snapshots after which everything is still there to be replayed, newest first."""
        return self.snapshots(model_id)[: history.KEPT]

    def sampler_snapshot(self, snapshot_id: str) -> SnapshotView | None:
        """Where the weights of a sampling snapshot are stored, if they are."""
        with self._database.read() as connection:
            return history.sampler_snapshot(connection, snapshot_id)

    def unstored_models(self) -> list[str]:
        """Ids of models that take work and have saves as in `unstored`. One statement."""
        with self._database.read() as connection:
            return history.unstored_models(connection)

    def is_unstored(self, snapshot_id: str) -> bool:
        """Whether a save as in `unstored`, of a model that takes work, has published this snapshot."""
        with self._database.read() as connection:
            return history.is_unstored(connection, snapshot_id)

    def unstored(self, model_id: str) -> list[Pending]:
        """The model's unnamed saves that are answered, used by samplers and not stored yet, in order."""
        with self._database.read() as connection:
            return history.unstored(connection, model_id)

    def executed(self, model_id: str, after: int, limit: int) -> list[Executed]:
        """What to replay after seq_id `after`, in order, at most `limit` requests."""
        with self._database.read() as connection:
            return history.executed(connection, model_id, after, limit)

    def count_executed(self, model_id: str, after: int) -> int:
        """How many requests there are to replay after seq_id `after`."""
        with self._database.read() as connection:
            return history.count_executed(connection, model_id, after)

    def superfluous(self, limit: int = 100) -> list[str]:
        """Paths of snapshots that nothing needs any more."""
        with self._database.read() as connection:
            return history.superfluous(connection, limit)

    def strays(self, found: Mapping[str, str]) -> dict[str, str]:
        """Of recovery snapshots in the store (path: model id) those that are of no live model, not listed: whose."""
        with self._database.read() as connection:
            return history.strays(connection, found)

    def forget_snapshot(self, path: str) -> None:
        """Note that a snapshot is deleted."""
        with self._database.write() as connection:
            history.forget_snapshot(connection, path)

    def suspect(self, request_ids: Sequence[str], *, crashed: bool) -> dict[str, tuple[int, int]]:
        """Note that a worker group ended while it executed these; of each, how many did, and how many by crashing."""
        with self._database.write() as connection:
            return history.suspect(connection, request_ids, crashed)

    def health(self) -> Condition:
        """What works, what is waited for, and what is suspected, for people."""
        with self._database.read() as connection:
            return condition.condition(connection)

"""The part of the journal that looks after checkpoints: `journal.upkeep`. Every method is one short transaction."""

from __future__ import annotations

from tinkerflow.backend.journal import adopting, keeping, retention
from tinkerflow.backend.journal.database import Aggregate
from tinkerflow.backend.journal.records import CheckpointFound
from tinkerflow.backend.journal.retention import Retention
from tinkerflow.backend.journal.views import CheckpointView


class Upkeep(Aggregate):
    """Which checkpoints are over and which are still to be removed or written about, for whoever sweeps the store."""

    def delete_expired(self, limit: int = 100) -> list[str]:
        """Mark at most `limit` checkpoints past their time as deleted; their paths."""
        with self._database.write() as connection:
            return keeping.delete_expired(connection, self._clock.now(), limit)

    def delete_retired(self, rule: Retention, limit: int = 100) -> list[str]:
        """Mark at most `limit` checkpoints that `rule` does not keep as deleted; their paths."""
        with self._database.write() as connection:
            return retention.delete_retired(connection, rule, self._clock.now(), limit)

    def unpurged(self, limit: int = 100) -> list[tuple[str, str]]:
        """(path, attempt) of deleted checkpoints whose files may still be in the store."""
        with self._database.read() as connection:
            return keeping.unpurged(connection, limit)

    def purged(self, path: str, attempt: str) -> None:
        """Note that the files of a deleted checkpoint are gone."""
        with self._database.write() as connection:
            keeping.purged(connection, path, attempt, self._clock.now())

    def unnoted(self, limit: int = 100) -> list[CheckpointView]:
        """Checkpoints whose publication or time of expiry the store's commit does not tell yet."""
        with self._database.read() as connection:
            return keeping.unnoted(connection, limit)

    def noted(self, seen: CheckpointView) -> None:
        """Note that the store's commit tells what `seen` tells."""
        with self._database.write() as connection:
            keeping.noted(connection, seen)

    def restore(self, found: CheckpointFound) -> bool:
        """Make the rows of what the store holds and the journal does not know; whether it did."""
        with self._database.write() as connection:
            return adopting.restore(connection, found, self._clock.now())

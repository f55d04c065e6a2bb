"""The part of the journal that only recovery uses: `journal.recovery`. Every method is one short transaction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from tinkerflow.backend.clock import Clock
from tinkerflow.backend.commands import CompileStatus
from tinkerflow.backend.journal import base_models, condition, history, holding, leases
from tinkerflow.backend.journal.bell import Bell
from tinkerflow.backend.journal.condition import Condition
from tinkerflow.backend.journal.database import Database
from tinkerflow.backend.journal.effects import end_models
from tinkerflow.backend.journal.kinds import ModelState
from tinkerflow.backend.journal.leases import Held
from tinkerflow.backend.journal.records import SnapshotTaken
from tinkerflow.backend.journal.views import Executed, Pending, SnapshotView


class Recovery:
    """Snapshots, what is replayed after them, suspects, progress, and the leases of the service's processes."""

    def __init__(self, database: Database, clock: Clock, bell: Bell) -> None:
        """Of the journal in `database`."""
        self._database = database
        self._clock = clock
        self._bell = bell
        self.epoch: int | None = None

    # -------------------------------------------------------------- history.py
    def snapshot_taken(self, taken: SnapshotTaken) -> bool:
        """Record a snapshot whose commit is in the store; False when it must not be used, and should be deleted."""
        with self._database.write() as connection:
            if self.epoch is not None:
                leases.check(connection, self.epoch)
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

    def note_progress(self, model_id: str, text: str | None) -> None:
        """Say what a model's requests wait for, None when they do not."""
        with self._database.write() as connection:
            history.note_progress(connection, model_id, text)

    def note_group(self, base_model: str, text: str | None) -> None:
        """Say what all requests for a base model wait for, None when they do not."""
        with self._database.write() as connection:
            history.note_group(connection, base_model, text)

    def note_warmth(self, base_model: str, warmth: CompileStatus) -> None:
        """Keep which programs the worker group of a base model has compiled."""
        with self._database.write() as connection:
            base_models.note_warmth(connection, base_model, warmth)

    def waits_for(self, request_id: str) -> str | None:
        """Why a pending request is not executed at present, if there is a reason beside its place in line."""
        with self._database.read() as connection:
            return history.waits_for(connection, request_id)

    def suspect(self, request_ids: Sequence[str], *, crashed: bool) -> dict[str, tuple[int, int]]:
        """Note that a worker group ended while it executed these; of each, how many did, and how many by crashing."""
        with self._database.write() as connection:
            return history.suspect(connection, request_ids, crashed)

    def condition(self) -> Condition:
        """What works, what is waited for, and what is suspected, for people."""
        with self._database.read() as connection:
            return condition.condition(connection)

    def end_model(self, model_id: str, state: ModelState, detail: str) -> None:
        """End a model now, if it takes work still: what waits for it fails."""
        with self._database.write() as connection:
            topics = end_models(connection, [model_id], state, detail, self._clock.now())
        self._bell.ring(*topics)

    # -------------------------------------------------------------- holding.py
    def hold(self, model_id: str, why: str | None) -> None:
        """Let nothing of the model be executed, for the reason that its clients are told; None: let it go on."""
        with self._database.write() as connection:
            holding.hold(connection, model_id, why)

    def revive(self, model_id: str) -> None:
        """Make a model that failed or was lost live again, to be restored; UserError when that cannot be."""
        with self._database.write() as connection:
            holding.revive(connection, model_id)

    def let_go(self) -> None:
        """Forget what made the models that failed in sessions that are over."""
        with self._database.write() as connection:
            holding.let_go(connection)

    # -------------------------------------------------------------- leases.py
    def acquire(self, holder: str, *, force: bool = False) -> Held | None:
        """Take the engine's lease; who holds it if that fails. From then on answers are refused when it is lost."""
        with self._database.write() as connection:
            taken = leases.acquire(connection, holder, self._clock.now(), force=force)
        if isinstance(taken, Held):
            return taken
        self.epoch = taken
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
        if self.epoch is None:
            raise ValueError("the engine's lease was never acquired: call acquire first")
        return self.epoch

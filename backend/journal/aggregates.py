"""The aggregates that `Journal` hands out. Every method is one short transaction."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import date, datetime, timedelta

from tinkerflow.backend.commands import CompileStatus, StabilityInfo
from tinkerflow.backend.errors import UserError
from tinkerflow.backend.journal import (
    adopting,
    audit,
    cancelling,
    completions,
    custom_losses,
    finishing,
    history,
    holding,
    keeping,
    leases,
    queue,
    results,
    samplers,
    search,
    secrets,
    sessions,
    shares,
    stability,
    submitting,
    timeline,
    usage,
)
from tinkerflow.backend.journal import base_models as base_model_rows
from tinkerflow.backend.journal import checkpoints as checkpoint_rows
from tinkerflow.backend.journal import keys as key_rows
from tinkerflow.backend.journal.database import Aggregate
from tinkerflow.backend.journal.effects import end_models
from tinkerflow.backend.journal.kinds import ModelState, SessionState
from tinkerflow.backend.journal.leases import check
from tinkerflow.backend.journal.limits import NO_LIMITS, Limits, storage_failure
from tinkerflow.backend.journal.records import (
    CopyMade,
    NewCustomLoss,
    NewModel,
    NewRequest,
    NewSampler,
    NewSession,
    Outcome,
)
from tinkerflow.backend.journal.search import SessionQuery
from tinkerflow.backend.journal.statements import get_owned
from tinkerflow.backend.journal.tables import Model, Sampler, Session
from tinkerflow.backend.journal.views import (
    AuditView,
    BaseModelView,
    CheckpointView,
    Completions,
    Gap,
    KeyView,
    ModelView,
    Page,
    Pending,
    Result,
    RunView,
    SamplerView,
    SessionSummary,
    SessionView,
    ShareView,
    StoredNow,
    StoredUsage,
    Timed,
    Usage,
    model_view,
    sampler_view,
    session_view,
)


class Requests(Aggregate):
    """Requests: submitted, ready to execute, answered, read."""

    def submit(self, request: NewRequest, limits: Limits = NO_LIMITS) -> str:
        """Store a request and return its id; a replay (same seq_id and content) returns the stored one's id.

        NotFoundError: unknown or foreign model or sampler. ConflictError: the seq_id holds other content. A model or
        session that is over is no error here: the request is stored already failed, and says why; so is one over the
        project's `limits`. TooManyError: a sample over them, which is not stored.
        """
        with self._database.write() as connection:
            request_id, topics = submitting.submit(connection, request, self._clock.now(), limits)
        self._publish(*topics)
        return request_id

    def ready(self, model_id: str, limit: int = 64) -> list[Pending]:
        """A model's next requests in order of execution: the contiguous run from its next_seq on, then an unload."""
        with self._database.read() as connection:
            return queue.ready(connection, model_id, limit)

    def finish(self, outcomes: Sequence[Outcome]) -> list[str]:
        """Answer requests with all their effects in one transaction; the ids that this call answered.

        The first answer of a request wins: a later one changes nothing, and none of its effects happen. FencedError
        from an engine whose lease another one has taken, and then nothing happens at all.
        """
        with self._database.write() as connection:
            if self._database.epoch is not None:
                check(connection, self._database.epoch)
            answered, topics = finishing.finish(connection, outcomes, self._clock.now())
        self._publish(*topics)
        return answered

    def result(self, request_id: str, owner: str | None, *, at_most: int | None = None) -> Result | None:
        """The answer, None while it is pending. Re-readable until it expires; the first reading is noted.

        Of a result of more than `at_most` bytes only the size is told, and that is no reading.
        """
        with self._database.read() as connection:
            found, first = results.read_result(connection, request_id, owner, at_most)
        if first:
            with self._database.write() as connection:
                results.mark_read(connection, request_id, self._clock.now())
        return found

    def finished(self, request_ids: Collection[str]) -> set[str]:
        """Which of these requests are answered, in one query."""
        with self._database.read() as connection:
            return results.finished(connection, request_ids)

    def cancel(self, request_id: str, owner: str | None) -> bool:
        """Answer a sample that waits with a failure, and have it leave the decode batch; whether it still waited.

        UserError for any other kind: what trains is executed in order, and later requests count on it.
        """
        with self._database.write() as connection:
            topics = cancelling.cancel(connection, request_id, owner, self._clock.now())
        self._publish(*topics)
        return bool(topics)


class Models(Aggregate):
    """Models (training runs)."""

    def create(self, model: NewModel, request: NewRequest, limits: Limits = NO_LIMITS) -> str:
        """Store a model in state `creating` and the request (seq_id 0) that creates it; replays as in submit.

        When the request carries an error, or the session is over, both are stored as failed.
        """
        with self._database.write() as connection:
            request_id = submitting.submit_new_model(connection, model, request, self._clock.now(), limits)
        self._publish(f"model:{model.id}")
        return request_id

    def request_unload(self, model_id: str, reason: str) -> str | None:
        """Ask for a model to be unloaded after what can still run; the request's id, None when it ended already."""
        with self._database.write() as connection:
            request_id = submitting.request_unload(connection, model_id, reason, self._clock.now())
        self._publish(f"model:{model_id}")
        return request_id

    def of_session(self, session_id: str) -> list[str]:
        """Ids of the session's models, in any state."""
        with self._database.read() as connection:
            return sessions.models_of(connection, session_id)

    def abandoned(self) -> list[str]:
        """Ids of models that take work although their session is over, and that no request unloads yet."""
        with self._database.read() as connection:
            return sessions.abandoned_models(connection)

    def get(self, model_id: str, owner: str | None) -> ModelView:
        """A model."""
        with self._database.read() as connection:
            return model_view(get_owned(connection, Model, model_id, owner))

    def run(self, run_id: str, owner: str | None) -> RunView:
        """A training run (its id is its model's) with its newest checkpoints."""
        with self._database.read() as connection:
            return checkpoint_rows.training_run(connection, run_id, owner, self._clock.now())

    def runs(self, owner: str | None, *, limit: int, offset: int, project_id: str | None = None) -> Page[RunView]:
        """Training runs, newest first; of one project's sessions when project_id is given."""
        with self._database.read() as connection:
            return checkpoint_rows.training_runs(connection, owner, project_id, limit, offset, self._clock.now())

    def note_progress(self, model_id: str, text: str | None) -> None:
        """Say what a model's requests wait for, None when they do not."""
        with self._database.write() as connection:
            history.note_progress(connection, model_id, text)

    def end(self, model_id: str, state: ModelState, detail: str) -> None:
        """End a model now, if it takes work still: what waits for it fails."""
        with self._database.write() as connection:
            topics = end_models(connection, [model_id], state, detail, self._clock.now())
        self._publish(*topics)

    def pause(self, model_id: str, why: str | None) -> None:
        """Let nothing of the model be executed, for the reason that its clients are told; None: let it go on."""
        with self._database.write() as connection:
            holding.hold(connection, model_id, why)

    def revive(self, model_id: str) -> None:
        """Make a model that failed or was lost live again, to be restored; UserError when that cannot be."""
        with self._database.write() as connection:
            holding.revive(connection, model_id)

    def forget_ended(self) -> None:
        """Forget what made the models that failed in sessions that are over."""
        with self._database.write() as connection:
            holding.let_go(connection)


class Queue(Aggregate):
    """What waits, over all models and samplers."""

    def pending_models(self, base_model: str | None = None) -> list[str]:
        """Ids of models with something to execute now, longest waiting first."""
        with self._database.read() as connection:
            return queue.pending_models(connection, base_model)

    def pending_samples(
        self,
        limit: int,
        *,
        base_model: str | None = None,
        exclude: Collection[str] = (),
        owner: str | None = None,
    ) -> list[Pending]:
        """Samples that wait, oldest first, each with its sampler; `exclude` names requests taken up already."""
        with self._database.read() as connection:
            return queue.pending_samples(connection, limit, base_model, exclude, owner)

    def waiting_samples(self, base_model: str | None = None) -> dict[str, int]:
        """How many samples of each owner have no answer yet."""
        with self._database.read() as connection:
            return queue.waiting_samples(connection, base_model)

    def gaps(self, timeout: float) -> list[Gap]:
        """Models that wait for `timeout` seconds or longer for a sequence id that never came."""
        with self._database.read() as connection:
            return queue.gaps(connection, self._ago(timeout))

    def skip_gap(self, gap: Gap) -> bool:
        """Count the gap's missing ids as used, and log it; False when something of the gap came meanwhile."""
        with self._database.write() as connection:
            skipped = queue.skip_gap(connection, gap)
        if skipped:
            self._publish(f"model:{gap.model_id}")
        return skipped

    def waits_for(self, request_id: str) -> str | None:
        """Why a pending request is not executed at present, if there is a reason beside its place in line."""
        with self._database.read() as connection:
            return history.waits_for(connection, request_id)


class Results(Aggregate):
    """Results after they were read, and the order in which a sampler's requests were answered."""

    def expire(self, ttl: float, limit: int = 500) -> int:
        """Drop payload and result of at most `limit` requests read, or else answered, over `ttl` seconds ago; how many.

        Their ids answer with an error that says so.
        """
        now = self._clock.now()
        with self._database.write() as connection:
            return results.expire_results(connection, self._ago(ttl), now, limit)

    def completions(self, sampler_id: str, owner: str | None, *, clone: int, after: int) -> Completions:
        """What was answered of one clone's requests after the cursor `after`, oldest first, and the next cursor."""
        with self._database.read() as connection:
            return completions.completions(connection, sampler_id, owner, clone, after)

    def acknowledge(self, sampler_id: str, owner: str | None, request_ids: Collection[str], *, clone: int) -> int:
        """Drop the bytes of results that were read and that their client says it has; how many."""
        now = self._clock.now()
        with self._database.write() as connection:
            return completions.acknowledge(connection, sampler_id, owner, clone, request_ids, now)

    def last_completions(self, sampler_ids: Collection[str]) -> dict[str, int]:
        """The number of each sampler's last answer, in one query: what a cursor is compared with."""
        with self._database.read() as connection:
            return completions.last_numbers(connection, sampler_ids)


class Samplers(Aggregate):
    """Sampling sessions."""

    def join(self, sampler_id: str, owner: str | None) -> int:
        """A number from 1 for a copy of the sampler's client; no two copies ever get the same."""
        with self._database.write() as connection:
            return completions.join(connection, sampler_id, owner)

    def of_session(self, session_id: str) -> list[SamplerView]:
        """The session's samplers, in any state."""
        with self._database.read() as connection:
            return sessions.samplers_of(connection, session_id)

    def open(self, sampler: NewSampler) -> str:
        """Make a sampler; its id. Repeating is fine; ConflictError: other content. UserError: the session is over."""
        with self._database.write() as connection:
            return samplers.open_sampler(connection, sampler, self._clock.now())

    def get(self, sampler_id: str, owner: str | None) -> SamplerView:
        """A sampler."""
        with self._database.read() as connection:
            return sampler_view(get_owned(connection, Sampler, sampler_id, owner))

    def unused_snapshots(self, snapshot_ids: Collection[str]) -> set[str]:
        """Those of the snapshots that no live sampler uses: they can be dropped."""
        with self._database.read() as connection:
            return samplers.unused_snapshots(connection, snapshot_ids)


class Sessions(Aggregate):
    """Clients' sessions."""

    def create(self, session: NewSession) -> str:
        """Begin a session; its id."""
        with self._database.write() as connection:
            return sessions.create_session(connection, session, self._clock.now())

    def get(self, session_id: str, owner: str | None) -> SessionView:
        """A session."""
        with self._database.read() as connection:
            return session_view(get_owned(connection, Session, session_id, owner))

    def heartbeat(self, session_id: str, owner: str | None) -> SessionState:
        """Note that the client lives; the session's state, which a beat does not change."""
        with self._database.write() as connection:
            return sessions.heartbeat(connection, session_id, owner, self._clock.now())

    def finish(self, session_id: str, owner: str | None, detail: str | None = None, *, reason: str = "success") -> None:
        """End a session for its client: samplers close, models wait for request_unload. Repeating changes nothing."""
        with self._database.write() as connection:
            topics = sessions.finish_session(connection, session_id, owner, reason, detail, self._clock.now())
        self._publish(*topics)

    def assign_project(self, session_id: str, owner: str | None, project_id: str, *, key_id: str = "") -> None:
        """Put a session under another label inside its owner's project; key_id: who asks, for the audit log."""
        with self._database.write() as connection:
            sessions.assign_project(connection, session_id, owner, project_id, key_id, self._clock.now())

    def ids(self, owner: str | None, *, limit: int, offset: int) -> list[str]:
        """Ids of sessions, newest first (search.py)."""
        with self._database.read() as connection:
            return search.session_ids(connection, owner, limit, offset)

    def search(self, query: SessionQuery, owner: str | None) -> tuple[list[SessionSummary], bool]:
        """Sessions that match, newest first, and whether there are more; NotFoundError for an unknown project."""
        with self._database.read() as connection:
            return search.search_sessions(connection, query, owner, self._clock.now())

    def expire(self, timeout: float) -> list[str]:
        """End sessions that sent neither heartbeat nor training request for `timeout` seconds; their ids.

        None while clients could not reach the API for all of that time: then nobody could have sent anything.
        """
        with self._database.read() as connection:
            since = leases.answering_since(connection, self._clock.now())
        if since is not None and since > self._ago(timeout):
            return []
        with self._database.write() as connection:
            expired, topics = sessions.expire_sessions(connection, self._ago(timeout), self._clock.now())
        self._publish(*topics)
        return expired

    def timeline(self, session_id: str) -> list[Timed]:
        """When the session's requests came, began and were answered, in order of submission (timeline.py)."""
        with self._database.read() as connection:
            return timeline.timeline(connection, session_id)


class Losses(Aggregate):
    """Custom losses, and what stable_reinforce records."""

    def submit(self, loss: NewCustomLoss) -> str:
        """Store a traced loss and the request that it answers at once; the request's id, of a replay the first one's.

        NotFoundError: unknown or foreign session. ConflictError: its number holds other content.
        """
        with self._database.write() as connection:
            return custom_losses.submit(connection, loss, self._clock.now())

    def definition(self, loss_id: str, session_id: str) -> str:
        """The definition (JSON) of a session's loss; NotFoundError also for those of other sessions."""
        with self._database.read() as connection:
            return custom_losses.definition(connection, loss_id, session_id)

    def stability(self, session_id: str, sequence_ids: Collection[str]) -> dict[str, StabilityInfo]:
        """What was recorded of a session's sampled sequences; NotFoundError names one of which nothing is."""
        with self._database.write() as connection:
            return stability.find(connection, session_id, sequence_ids, self._clock.now())


class Checkpoints(Aggregate):
    """Saved checkpoints."""

    def get(self, path: str, owner: str | None, *, access: str | None = None) -> CheckpointView:
        """The checkpoint at `path`: one's own, a public one, or one that the token with the hash `access` opens.

        Deleted and expired ones do not exist.
        """
        with self._database.read() as connection:
            return checkpoint_rows.checkpoint(connection, path, owner, access, self._clock.now())

    def read(self, path: str, owner: str | None, purpose: str) -> CheckpointView:
        """As `checkpoint`, and the reading goes into the audit log of the checkpoint's owner."""
        now = self._clock.now()
        with self._database.write() as connection:
            found = checkpoint_rows.checkpoint(connection, path, owner, None, now)
            event = audit.Event.CHECKPOINT_READ
            audit.note(
                connection,
                now,
                owner=found.owner,
                event=event,
                model_id=found.run_id,
                tinker_path=path,
                purpose=purpose,
            )
            return found

    def page(
        self, owner: str | None, *, run_id: str | None = None, limit: int = 100, offset: int = 0
    ) -> Page[CheckpointView]:
        """Checkpoints, newest first; of one run when run_id is given (NotFoundError: unknown or foreign run)."""
        now = self._clock.now()
        with self._database.read() as connection:
            return checkpoint_rows.checkpoints(connection, owner, run_id, limit=limit, offset=offset, now=now)

    def delete(self, path: str, owner: str | None) -> CheckpointView:
        """Mark a checkpoint as deleted; what it was. Its files are for whoever asks for `upkeep.unpurged`."""
        with self._database.write() as connection:
            return keeping.delete_checkpoint(connection, path, owner, self._clock.now())

    def publish(self, path: str, owner: str | None, public: bool = True) -> CheckpointView:
        """Let all keys read a checkpoint, or (public false) its owner's alone again. Repeating changes nothing."""
        with self._database.write() as connection:
            return keeping.publish(connection, path, owner, public, self._clock.now())

    def set_ttl(self, path: str, owner: str | None, seconds: float | None) -> CheckpointView:
        """Let a checkpoint expire so many seconds from now, None: never."""
        now = self._clock.now()
        expires_at = None if seconds is None else now + timedelta(seconds=seconds)
        with self._database.write() as connection:
            return keeping.set_expiry(connection, path, owner, expires_at, now)

    def is_gone(self, path: str) -> bool:
        """Whether there was a checkpoint at `path` which was deleted or expired: its name may be used again."""
        with self._database.read() as connection:
            return keeping.is_free(connection, path, self._clock.now())

    def check_storage(self, owner: str, limits: Limits) -> None:
        """UserError when the project may not store another checkpoint now."""
        with self._database.read() as connection:
            failure = storage_failure(connection, owner, limits)
        if failure is not None:
            raise UserError(failure[0])

    def record_copy(self, copy: CopyMade) -> str:
        """Make the rows of a copied checkpoint, in a run and session made for it; its path. Repeating is fine."""
        with self._database.write() as connection:
            return adopting.record_copy(connection, copy, self._clock.now())


class Shares(Aggregate):
    """Tokens that open one checkpoint."""

    def create(self, path: str, owner: str | None, seconds: float | None = None) -> tuple[ShareView, str]:
        """Make a token that opens a checkpoint for so many seconds, None: until revoked; it is never shown again."""
        now = self._clock.now()
        expires_at = None if seconds is None else now + timedelta(seconds=seconds)
        with self._database.write() as connection:
            found = checkpoint_rows.checkpoint(connection, path, owner, None, now)
            return shares.share(connection, found, expires_at, now)

    def all(self, path: str | None = None) -> list[ShareView]:
        """The tokens of a checkpoint, or all; useless ones too, oldest first."""
        with self._database.read() as connection:
            return shares.shares(connection, path)

    def revoke(self, share_id: str) -> ShareView:
        """Make a token useless from now on."""
        with self._database.write() as connection:
            return shares.unshare(connection, share_id, self._clock.now())


class Keys(Aggregate):
    """API keys, and the service's secrets."""

    def create(self, name: str, project: str, *, admin: bool = False) -> tuple[KeyView, str]:
        """Make an API key; what is stored of it, and its secret (`tml-...`), which is never shown again."""
        with self._database.write() as connection:
            return key_rows.create_key(connection, name, project, admin, self._clock.now())

    def all(self) -> list[KeyView]:
        """All keys, revoked ones too, oldest first."""
        with self._database.read() as connection:
            return key_rows.keys(connection)

    def revoke(self, key_id: str) -> KeyView:
        """Make a key useless from now on."""
        with self._database.write() as connection:
            return key_rows.revoke_key(connection, key_id, self._clock.now())

    def verify(self, secret: str) -> KeyView | None:
        """The key with this secret, None when there is none or it was revoked. Its use is noted once a minute."""
        with self._database.read() as connection:
            key = key_rows.find_key(connection, secret)
        return self._used(key)

    def usable(self, key_id: str) -> KeyView | None:
        """The key with this id (a token names it), None when it was revoked. Its use is noted once a minute."""
        with self._database.read() as connection:
            key = key_rows.usable_key(connection, key_id)
        return self._used(key)

    def has_any(self) -> bool:
        """Whether a key was ever made, revoked ones included."""
        with self._database.read() as connection:
            return key_rows.has_keys(connection)

    def service_secret(self, name: str) -> bytes:
        """32 random bytes under `name`, the same for all processes: made on first use (secrets.py)."""
        with self._database.write() as connection:
            return secrets.service_secret(connection, name, self._clock.now())

    def _used(self, key: KeyView | None) -> KeyView | None:
        if key is not None and key_rows.use_is_due(key, now := self._clock.now()):
            with self._database.write() as connection:
                key_rows.note_use(connection, key.id, now)
        return key


class BaseModels(Aggregate):
    """The base models that the engine serves."""

    def register(self, models: Sequence[tuple[str, str]]) -> None:
        """Replace the list of base models by `models`: (name, card as JSON text) pairs."""
        with self._database.write() as connection:
            base_model_rows.register_base_models(connection, models, self._clock.now())

    def all(self) -> list[BaseModelView]:
        """The base models that are served, by name."""
        with self._database.read() as connection:
            return base_model_rows.base_models(connection)

    def note_progress(self, base_model: str, text: str | None) -> None:
        """Say what all requests for a base model wait for, None when they do not."""
        with self._database.write() as connection:
            history.note_group(connection, base_model, text)

    def note_compile_status(self, base_model: str, warmth: CompileStatus) -> None:
        """Keep which programs the worker group of a base model has compiled."""
        with self._database.write() as connection:
            base_model_rows.note_compile_status(connection, base_model, warmth)


class AuditLog(Aggregate):
    """The audit log."""

    def entries(self, owner: str | None, *, resource: str | None = None, day: date | None = None) -> list[AuditView]:
        """What was done on a UTC day (default: today), oldest first; `resource`: the first word of the events."""
        with self._database.read() as connection:
            return audit.entries(connection, owner, resource, day or self._clock.now().date())


class UsageReports(Aggregate):
    """What was used."""

    def hourly(self, owner: str | None, start: datetime, end: datetime) -> list[Usage]:
        """Tokens and saved checkpoints in the hours that begin in [start, end), by hour and then the most first."""
        with self._database.read() as connection:
            return usage.usage(connection, owner, start, end)

    def stored(self, owner: str | None, start: datetime, end: datetime) -> list[StoredUsage]:
        """What checkpoints took up in each hour of [start, end), both whole hours, until now."""
        with self._database.read() as connection:
            return usage.stored(connection, owner, start, end, self._clock.now())

    def stored_now(self, owner: str | None, project: str | None = None) -> list[StoredNow]:
        """How many checkpoints there are and their bytes, by project and key; of one project when it is given."""
        with self._database.read() as connection:
            return usage.stored_now(connection, owner, project, self._clock.now())

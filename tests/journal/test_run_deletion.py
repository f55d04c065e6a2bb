"""A deleted run is gone for all users, together with its data. Other runs, usage and the audit log stay."""

from __future__ import annotations

import dataclasses

import pytest
import sqlalchemy as sa
from tests.journal.test_history import segment

from tinkerflow.backend.core.errors import NotFoundError, UserError
from tinkerflow.backend.core.ids import model_id
from tinkerflow.backend.journal import (
    HistoryRules,
    LossMeasured,
    ModelState,
    RunQuery,
    StepMeasured,
    UsageKind,
    Used,
    run_deletion,
)
from tinkerflow.backend.journal.database import Database, Table

NO_RULES = HistoryRules(days=0, max_bytes=0)


@pytest.fixture
def rows(url):
    """rows(table): the rows of a table as mappings."""
    database = Database(url)

    def read(table):
        with database.read() as connection:
            return [dict(row._mapping) for row in connection.execute(sa.select(Table.metadata.tables[table]))]

    yield read
    database.close()


@pytest.fixture
def full(scene, save):
    """full(session, *samplers): a run with a step, metrics, events, a history, a checkpoint, and samples."""

    def run(session, *samplers):
        model = scene.model(session, user_metadata={"name": "pig", "secret": "ä"}, history=True)
        path = save(model, "a")
        scene.submit(model, 2)
        scene.submit(model, 3)
        first, second = scene.journal.requests.ready(model)
        used = Used(session, "tiny", UsageKind.TRAINING, 7)
        loss, step = LossMeasured(model, 4, 2.0, 6.0), StepMeasured(model, 3, 1, 1.0, 1e-4)
        scene.journal.results.finish([first.done(b"r", "proto", loss, used), second.done(b"r", "proto", step)])
        scene.journal.run_metrics.record(model, "local", {1: {"reward": 0.5, "länge": 3.0}, 2: {"reward": 0.75}})
        scene.journal.histories.record_segment(model, segment(0, 1))
        for seq, sampler in enumerate(samplers):
            scene.sample(sampler, seq)
        pending = scene.journal.requests.pending_samples(100)
        scene.journal.results.finish([one.done(b"answer", "proto") for one in pending])
        scene.journal.models.pause(model, "a pause")
        scene.journal.models.note_outcome(model, "local", "completed", "as planned")
        return model, path

    return run


def end(scene, session):
    scene.journal.sessions.finish(session, "local")
    for model in scene.journal.models.abandoned():
        scene.journal.models.end(model, ModelState.UNLOADED, "its session ended")


def test_figures_of_a_long_run_are_deleted_in_parts(scene, full, rows, statements, monkeypatch):
    """In one transaction, a run of 200,000 steps with three metrics held the write lock for 6 s."""
    monkeypatch.setattr(run_deletion, "_ROWS_AT_ONCE", 2)
    other, session = full(scene.session())[0], scene.session()
    run, _ = full(session)
    scene.journal.run_metrics.record(run, "local", {step: {"reward": 1.0} for step in range(3, 6)})
    with pytest.raises(UserError, match="only runs that have ended"):
        scene.journal.run_deletions.delete([run], "local")
    assert len(rows("run_metric_value")) == 3 + 6 and len(rows("training_step")) == 2
    end(scene, session)
    with statements() as made:
        scene.journal.run_deletions.delete([run], "local")
    assert sum(one.startswith("DELETE FROM run_metric_value") for one in made) == 3 + 1 + 1
    assert {row["model_id"] for name in ("run_metric_value", "training_step") for row in rows(name)} == {other}
    assert [row["metrics"] for row in rows("project_total")] == [3]


def test_deleted_run_leaves_only_usage_and_audit_log(scene, full, rows):
    journal = scene.journal
    other, _ = full(scene.session())
    session = scene.session()
    run = model_id(session, 0)
    named = scene.sampler(session, 0, model_path=f"tinker://{run}/weights/a")
    unnamed, of_base = scene.sampler(session, 1, snapshot_id=f"{run}:inflight"), scene.sampler(session, 2)
    kept = {name: rows(name) for name in ("training_step", "run_metric", "run_metric_value", "run_event")}
    kept["project_total"] = rows("project_total")
    _, path = full(session, named, unnamed, of_base)
    end(scene, session)
    usage = rows("usage_bucket")
    (lost,) = journal.run_deletions.contents([run], "local")
    assert dataclasses.astuple(lost) == (run, (path,), 100, 0)
    journal.run_deletions.delete([run], "local", "key-1")

    for read in (journal.models.get, journal.curves.of_run, journal.run_metrics.of_run, journal.models.run):
        with pytest.raises(NotFoundError, match=f"model '{run}' does not exist"):
            read(run, "local" if read is journal.models.get else None)
    with pytest.raises(NotFoundError):
        journal.checkpoints.get(path, "local")
    with pytest.raises(NotFoundError):
        journal.checkpoints.get(f"tinker://{run}/weights/@1", "local")
    assert [row.model.id for row in journal.run_table.page(None, RunQuery(), limit=9, offset=0).rows] == [other]
    assert [view.model.id for view in journal.models.runs(None, limit=9, offset=0).rows] == [other]
    assert [extent.id for extent in journal.run_values.extents([], live_only=False)] == [other]
    assert journal.models.of_session(session) == []
    for name, left in kept.items():
        assert rows(name) == left
    of_run = [row for row in rows("request") if row["session_id"] == session and row["sampler_id"] != of_base]
    assert len(of_run) == 6 and all(row["payload"] == b"" and row["result"] is None for row in of_run)
    assert [sample.size for sample in journal.samples.recent("local") if sample.sampler_id == of_base] == [8]
    assert not any(row["replays"] or row["archives"] for row in of_run)
    (tombstone,) = (row for row in rows("model") if row["id"] == run)
    assert tombstone["user_metadata"] == {} and tombstone["deleted_at"] is not None
    assert rows("usage_bucket") == usage and len(usage) > 0

    assert journal.upkeep.unpurged() == [(path, "a-1")], "the engine removes the files"
    assert journal.histories.to_delete(NO_RULES) == [run], "and the history"
    log = [entry for entry in journal.audit.entries("local") if entry.actor == "key-1"]
    assert [entry.event for entry in log] == ["checkpoint_deleted", "training_run_deleted"]
    assert log[1].model_id == run and log[1].details["checkpoints"] == 1


def test_id_of_a_deleted_run_is_not_reused(scene, full):
    session = scene.session()
    run, _ = full(session)
    end(scene, session)
    scene.journal.run_deletions.delete([run], "local")
    with pytest.raises(NotFoundError):
        scene.submit(run, 4)
    with pytest.raises(NotFoundError):
        scene.journal.run_deletions.delete([run], "local")


def test_the_history_of_a_run_that_ended_before_its_first_segment_is_removed(scene):
    """Its folder may contain examined rows."""
    session = scene.session()
    run, plain = scene.model(session, history=True), scene.model(session, 1)
    end(scene, session)
    scene.journal.run_deletions.delete([run, plain], "local")
    assert scene.journal.histories.to_delete(NO_RULES) == [run]
    scene.journal.histories.forget(run)
    assert scene.journal.histories.to_delete(NO_RULES) == []


def test_only_ended_runs_of_the_owner_are_deleted(scene, as_owner):
    session = scene.session()
    run = scene.model(session)
    deletions = scene.journal.run_deletions
    for attempt in (deletions.contents, deletions.delete):
        with pytest.raises(UserError, match=f"run {run} is live: only runs that have ended can be deleted"):
            attempt([run], "local")
    scene.journal.models.end(run, ModelState.UNLOADED, "a person wanted it")
    for attempt in (deletions.contents, deletions.delete):
        with pytest.raises(UserError, match=f"run {run}: its session {session} is still active"):
            attempt([run], "local")
        with pytest.raises(NotFoundError):
            attempt([run], "stranger")
    assert scene.journal.models.get(run, "local").state == ModelState.UNLOADED


def test_run_forked_from_a_deleted_one_shows_no_ancestor(scene, full):
    session = scene.session()
    run, path = full(session)
    later = scene.model(origin=path)
    end(scene, session)
    scene.journal.run_deletions.delete([run], "local")
    assert [one.id for one in scene.journal.ancestries.before(later, "local")] == [later]
    assert scene.journal.ancestries.before(later, "local")[0].origin == path

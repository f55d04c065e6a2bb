"""The audit log: written together with each change, read by day, resource and project, with the actor of each entry."""

from __future__ import annotations

from datetime import UTC, date, datetime

import pytest
import sqlalchemy as sa

from tinkerflow.backend.journal import CheckpointQuery, SessionQuery, actor_of_key, audit, command_line_actor
from tinkerflow.backend.journal.audit import AuditedEvent, write_event
from tinkerflow.backend.journal.database import Database
from tinkerflow.backend.journal.keys import hash_key

FIRST = date(2026, 1, 1)


@pytest.fixture
def write(url, clock):
    database = Database(url)

    def written(**values):
        with database.write() as connection:
            write_event(connection, clock.now(), **{"actor": "key-1"} | values)

    yield written
    database.close()


def test_audit_entries_filter_by_day_project_and_resource(journal, write, clock):
    write(owner="a", event=AuditedEvent.PROJECT_KEY_CREATED, details={"key_id": "key-1"})
    path = "tinker://m/weights/x"
    write(owner="a", event=AuditedEvent.CHECKPOINT_PUBLISHED, model_id="m", tinker_path=path)
    write(owner="b", event=AuditedEvent.CHECKPOINT_READ, purpose="archive")
    clock.advance(24 * 3600)
    write(owner="a", event=AuditedEvent.PROJECT_KEY_REVOKED)
    of_a = [entry.event for entry in journal.audit.entries("a", day=FIRST)]
    assert of_a == ["project_key_created", "checkpoint_published"]
    (published,) = journal.audit.entries("a", day=FIRST, resource="checkpoint")
    assert (published.model_id, published.tinker_path) == ("m", path)
    assert published.details == {"model_id": "m", "tinker_path": path, "actor": "key-1"}
    assert [entry.owner for entry in journal.audit.entries(None, day=FIRST)] == ["a", "a", "b"]
    assert [entry.event for entry in journal.audit.entries("a")] == ["project_key_revoked"]
    assert journal.audit.entries("a", resource="team") == journal.audit.entries("stranger") == []


def test_rolled_back_event_is_not_in_the_audit_log(journal, url, clock):
    database = Database(url)
    with pytest.raises(ZeroDivisionError), database.write() as connection:
        write_event(connection, clock.now(), owner="a", event=AuditedEvent.CHECKPOINT_DELETED, actor="key-1")
        assert connection.execute(sa.text("SELECT count(*) FROM audit_event")).scalar() == 1
        raise ZeroDivisionError
    database.close()
    assert journal.audit.entries(None) == []


def test_every_kind_of_event_names_its_actor(scene, save, clock, write):
    """Cause each kind of event once. The test fails for a new kind that nothing here causes."""
    journal = scene.journal
    key, _ = journal.keys.create("laptop", "local", actor="key-boss")
    journal.keys.revoke(key.id, actor="key-boss")
    journal.project_limits.set("local", {"max_sessions": 9}, "key-boss")
    journal.audit.record_refused_key(hash_key("tml-wrong"), "192.0.2.1")
    for event in (AuditedEvent.PROJECT_SIGNED_IN, AuditedEvent.PROJECT_SIGNED_OUT, AuditedEvent.PROJECT_SAMPLE_READ):
        journal.audit.record(event, owner="local", actor="key-boss", details={})
    session = scene.session(key_id="key-1")
    journal.sessions.assign_project(session, "local", "label", key_id="key-1")
    path = save(scene.model(session), "a")
    save(scene.model(session, 1), "b", ttl=3600)
    journal.checkpoints.publish(path, "local", key_id="key-1")
    journal.checkpoints.publish(path, "local", public=False, key_id="key-1")
    journal.checkpoints.set_ttl(path, "local", None, key_id="key-1")
    share, _ = journal.shares.create(path, "local", actor="command line: ann")
    journal.shares.revoke(share.id, actor="command line: ann")
    journal.checkpoints.get_for_download(path, "local", "archive", "key-1")
    journal.checkpoints.delete(path, "local", "key-1")
    clock.advance(3600)
    journal.upkeep.delete_expired()
    elsewhere = {
        AuditedEvent.TRAINING_RUN_DELETED: "test_run_deletion",
        AuditedEvent.CHECKPOINT_COPIED: "test_imports",
        AuditedEvent.CHECKPOINT_IMPORTED: "test_imports",
        AuditedEvent.FEEDBACK_GIVEN: "test_feedback",
        AuditedEvent.ASSET_UPLOADED: "test_assets",
        AuditedEvent.ASSET_DELETED: "test_assets",
    }
    actors = {}
    for entry in journal.audit.entries(None, day=FIRST):
        actors[AuditedEvent(entry.event)] = entry.actor
        assert entry.details["actor"] == entry.actor
    assert set(actors) | set(elsewhere) == set(AuditedEvent)
    assert {event.value: actor for event, actor in actors.items() if actor != "key-1"} == {
        "project_key_created": "key-boss",
        "project_key_revoked": "key-boss",
        "project_key_refused": "unknown key",
        "project_limits_set": "key-boss",
        "project_signed_in": "key-boss",
        "project_signed_out": "key-boss",
        "project_sample_read": "key-boss",
        "checkpoint_shared": "command line: ann",
        "checkpoint_unshared": "command line: ann",
        "checkpoint_expired": audit.SERVICE,
    }


def test_audit_actors_have_names():
    assert actor_of_key("key-1") == "key-1"
    assert actor_of_key("") == "local"
    assert command_line_actor().startswith("command line: ")


def test_audit_entry_of_a_refused_key_names_the_revoked_key(journal):
    key, secret = journal.keys.create("laptop", "team")
    journal.keys.revoke(key.id)
    journal.audit.record_refused_key(hash_key(secret), "192.0.2.1")
    refused = journal.audit.entries("team")[-1]
    assert (refused.event, refused.actor, refused.details["address"]) == ("project_key_refused", key.id, "192.0.2.1")
    journal.audit.record_refused_key(hash_key("tml-unknown"), "192.0.2.1")
    assert len(journal.audit.entries("team")) == 3
    assert journal.audit.entries(None)[-1].owner == ""


def test_refused_keys_cannot_fill_the_log(journal, monkeypatch, clock):
    monkeypatch.setattr(audit, "_REFUSALS_PER_HOUR", 3)
    for _ in range(5):
        journal.audit.record_refused_key(hash_key("tml-unknown"), "192.0.2.1")
    assert len(journal.audit.entries(None)) == 3
    clock.advance(3601)
    journal.audit.record_refused_key(hash_key("tml-unknown"), "192.0.2.1")
    assert len(journal.audit.entries(None)) == 4


@pytest.mark.parametrize("moment", [datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)])
def test_extreme_dates_are_valid_in_queries(scene, save, moment):
    """Covers every query of the journal that takes a date."""
    save(scene.model(), "a")
    journal, hour = scene.journal, moment.replace(minute=0, second=0, microsecond=0)
    assert journal.audit.entries(None, day=moment.date()) == []
    assert journal.usage.hourly(None, hour, hour) == []
    assert journal.usage.totals(None, hour, hour) == []
    assert journal.usage.stored(None, hour, hour) == []
    assert journal.feedback.page("local", since=moment) == []
    after = (moment, "x")
    sessions, _ = journal.sessions.search(SessionQuery(after=after), None)
    checkpoints, _ = journal.checkpoint_search.search(CheckpointQuery(after=after), None)
    assert len(sessions) == len(checkpoints) == (moment.year > 1)


def test_signed_out_token_stays_invalid_until_it_expires(journal, clock):
    journal.keys.end_token("eyJ.a", clock.now().replace(year=2027))
    journal.keys.end_token("eyJ.a", clock.now().replace(year=2027))
    assert journal.keys.is_ended("eyJ.a")
    assert not journal.keys.is_ended("eyJ.b")
    clock.advance(400 * 24 * 3600)
    journal.keys.end_token("eyJ.b", clock.now().replace(year=2029))
    assert not journal.keys.is_ended("eyJ.a")

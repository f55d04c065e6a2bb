"""The audit log: in the same transaction as what it tells of, by day, resource and project."""

from __future__ import annotations

from datetime import date

import pytest
import sqlalchemy as sa

from tinkerflow.backend.journal.audit import Event, note
from tinkerflow.backend.journal.database import Database


@pytest.fixture
def write(url, clock):
    database = Database(url)

    def written(**values):
        with database.write() as connection:
            note(connection, clock.now(), **values)

    yield written
    database.close()


def test_entries_are_of_one_day_one_project_and_one_resource(journal, write, clock):
    write(owner="a", event=Event.PROJECT_KEY_CREATED, details={"key_id": "key-1"})
    path = "tinker://m/weights/x"
    write(owner="a", event=Event.CHECKPOINT_PUBLISHED, model_id="m", tinker_path=path)
    write(owner="b", event=Event.CHECKPOINT_READ, purpose="archive")
    clock.advance(24 * 3600)
    write(owner="a", event=Event.PROJECT_KEY_REVOKED)
    first = date(2026, 1, 1)
    assert [entry.event for entry in journal.audit.entries("a", day=first)] == [
        "project_key_created",
        "checkpoint_published",
    ]
    (published,) = journal.audit.entries("a", day=first, resource="checkpoint")
    assert (published.model_id, published.tinker_path) == ("m", path)
    assert published.details == {"model_id": "m", "tinker_path": path}
    assert [entry.owner for entry in journal.audit.entries(None, day=first)] == ["a", "a", "b"]
    assert [entry.event for entry in journal.audit.entries("a")] == ["project_key_revoked"]
    assert journal.audit.entries("a", resource="team") == journal.audit.entries("stranger") == []


def test_what_did_not_happen_is_not_in_the_log(journal, url, clock):
    database = Database(url)
    with pytest.raises(ZeroDivisionError), database.write() as connection:
        note(connection, clock.now(), owner="a", event=Event.CHECKPOINT_DELETED)
        assert connection.execute(sa.text("SELECT count(*) FROM audit_event")).scalar() == 1
        raise ZeroDivisionError
    database.close()
    assert journal.audit.entries(None) == []

"""Lists are bounded in bytes: a page of long rows is shorter, and later pages contain the rest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.journal import CheckpointQuery, NewSession, SessionQuery, UsageKind, Used, database, usage

COUNT = 12


@pytest.fixture
def long_rows(scene, save, monkeypatch, clock):
    """Sessions, runs, checkpoints and audit entries with long texts. Three rows fit into a page."""
    monkeypatch.setattr(database, "PAGE_BYTES", 4000)
    for n in range(COUNT):
        words = {"user_metadata": {"words": "x" * 1000}}
        session = scene.journal.sessions.create(NewSession("local", "0", **words))
        save(scene.model(session, user_metadata=words["user_metadata"]), f"c{n}")
        clock.advance(1)
    with scene.journal._database.write() as connection:
        for table in ("checkpoint", "audit_event"):
            column = "user_metadata" if table == "checkpoint" else "details"
            connection.exec_driver_sql(f'UPDATE {table} SET {column} = \'{{"words": "{"x" * 1000}"}}\'')
    return scene


def by_cursor(search, query, key):
    """Read a search page by page. Returns all rows, and the length of the longest page."""
    rows, longest, more = [], 0, True
    while more:
        page, more = search(query, None)
        longest = max(longest, len(page))
        rows += page
        query = replace(query, after=key(page[-1]))
    return rows, longest


def by_offset(read):
    """Read a list by offset. Returns all rows, and the length of the longest page."""
    rows, longest = [], 0
    while len(rows) < COUNT:
        page = read(len(rows))
        assert page.total == COUNT and (page.cut or len(rows) + len(page.rows) == COUNT)
        longest = max(longest, len(page.rows))
        rows += page.rows
    return rows, longest


def test_every_list_of_rows_with_texts_comes_in_pages_of_bytes(long_rows):
    journal = long_rows.journal
    searches = {
        "sessions": by_cursor(
            journal.sessions.search, SessionQuery(), lambda one: (one.session.created_at, one.session.id)
        ),
        "sessions by text": by_cursor(
            journal.sessions.search,
            SessionQuery(user_metadata={"words": "x" * 1000}),
            lambda one: (one.session.created_at, one.session.id),
        ),
        "checkpoints": by_cursor(
            journal.checkpoint_search.search, CheckpointQuery(), lambda one: (one.created_at, one.path)
        ),
        "runs": by_offset(lambda offset: journal.models.runs(None, limit=100, offset=offset)),
        "saved": by_offset(lambda offset: journal.checkpoints.page(None, limit=100, offset=offset)),
    }
    for name, (rows, longest) in searches.items():
        assert (len(rows), len({repr(row) for row in rows})) == (COUNT, COUNT), name
        assert 1 <= longest <= 3, name
    assert [entry.at for entry in journal.audit.entries(None)] == sorted(
        entry.at for entry in journal.audit.entries(None)
    )
    assert 1 <= len(journal.audit.entries(None)) <= 3


def test_a_row_that_is_longer_than_a_page_comes_alone(long_rows, monkeypatch):
    monkeypatch.setattr(database, "PAGE_BYTES", 10)
    page, more = long_rows.journal.sessions.search(SessionQuery(), None)
    assert (len(page), more) == (1, True)


def test_search_of_texts_reads_all_rows_in_one_statement(scene, statements):
    """A statement for each part of the rows would sort all rows again, which took a minute for 90,000."""
    for n in range(510):
        scene.session(user_metadata={"n": str(n)})
    with statements() as made:
        found, more = scene.journal.sessions.search(SessionQuery(user_metadata={"n": "3"}), "local")
    assert ([one.session.user_metadata for one in found], more) == ([{"n": "3"}], False)
    assert sum("FROM session" in one and "user_metadata" in one for one in made) == 1


def test_usage_lists_are_complete(scene, monkeypatch, clock):
    model = scene.model(scene.session(user_metadata={"words": "x" * 1000}))
    pending = scene.taken(model, 1)
    used = Used(pending.session_id, "tiny", UsageKind.TRAINING, 10)
    scene.journal.results.finish([pending.done(b"", "proto", used)])
    start = clock.now().replace(minute=0, second=0, microsecond=0)
    hours = (None, start, start + usage.HOUR)
    assert [one.quantity for one in scene.journal.usage.hourly(*hours)] == [10]
    monkeypatch.setattr(usage, "MOST_BYTES", 1000)
    with pytest.raises(UserError, match="has more than 1000 bytes: ask for fewer hours"):
        scene.journal.usage.hourly(*hours)


def test_report_of_stored_bytes_is_refused_if_it_is_too_long(scene, save, monkeypatch, clock):
    """Each label of a project has an event in each hour, so a few thousand labels are millions of events."""
    start = clock.now().replace(minute=0, second=0, microsecond=0)
    for n in range(3):
        save(scene.model(scene.session(project_id=f"label {n}")), "a")
    clock.advance(24 * 3600)
    assert len(scene.journal.usage.stored("local", start, start + 24 * usage.HOUR)) == 3 * 24
    monkeypatch.setattr(usage, "MOST_BYTES", 40 * usage.ROW_BYTES)
    with pytest.raises(UserError, match="has more than 10240 bytes: ask for fewer hours"):
        scene.journal.usage.stored("local", start, start + 24 * usage.HOUR)
    assert len(scene.journal.usage.stored("local", start, start + 2 * usage.HOUR)) == 3 * 2

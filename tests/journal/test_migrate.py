"""Migrations and models agree, from an empty database on, with several processes starting at once."""

from __future__ import annotations

import subprocess
import sys

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from tinkerflow.backend.errors import ServerError
from tinkerflow.backend.journal import Journal, migrate
from tinkerflow.backend.journal.database import driver_url
from tinkerflow.backend.journal.tables import Table


def test_migrations_lead_to_the_models(empty_url):
    migrate(empty_url)
    migrate(empty_url)
    engine = sa.create_engine(driver_url(empty_url))
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Table.metadata) == []
    engine.dispose()
    Journal.open(empty_url).close()


def test_an_unmigrated_database_is_refused(empty_url):
    with pytest.raises(ServerError, match="schema is at revision None, this version needs v0001"):
        Journal.open(empty_url)


def test_processes_that_start_together_migrate_once(empty_url):
    code = f"from tinkerflow.backend.journal import migrate; migrate({empty_url!r})"
    processes = [subprocess.Popen([sys.executable, "-W", "error", "-c", code]) for _ in range(3)]
    assert [process.wait(timeout=60) for process in processes] == [0, 0, 0]
    Journal.open(empty_url).close()


def test_indexes_are_the_same_as_the_models(empty_url):
    """compare_metadata does not look at the conditions of partial indexes."""
    migrate(empty_url)
    engine = sa.create_engine(driver_url(empty_url))
    with engine.connect() as connection:
        found = {index["name"]: index for index in sa.inspect(connection).get_indexes("request")}
    engine.dispose()
    partial = {name for name, index in found.items() if any(k.endswith("_where") for k in index["dialect_options"])}
    assert partial == {
        "ix_request_pending_of_model",
        "ix_request_pending_samples",
        "ix_request_finished_with_bytes",
        "ix_request_replays",
        "ix_request_completions",
        "ix_request_pending_of_owner",
    }

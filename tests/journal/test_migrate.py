"""Migrations turn an empty or old database into the tables of the models, even if several processes start together."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from tinkerflow.backend import journal
from tinkerflow.backend.core.errors import ServerError
from tinkerflow.backend.journal import Journal, Kind, SamplerState, migrate
from tinkerflow.backend.journal.database import Table, driver_url
from tinkerflow.backend.spec.commands import CompileStatus

NEWEST = max(file.name[:5] for file in (Path(journal.__file__).parent / "migrations" / "versions").glob("v*.py"))
NOW = datetime(2026, 1, 1, tzinfo=UTC)
STATUS = {"planned": 3, "ready": 2, "failed": 0, "needed": 1, "late": 0}
OF_MODEL = {
    "owner": "local",
    "session_id": "sess-1",
    "model_id": "sess-1:train:0",
    "result_type": "json",
    "created_at": NOW,
}
ROWS_OF_V0001 = {
    "session": [
        {"id": "sess-1", "owner": "local", "key_id": "", "tags": [], "user_metadata": {}, "sdk_version": "0.38.0"}
        | {"state": "active", "created_at": NOW, "last_seen_at": NOW}
    ],
    "model": [
        {"id": "sess-1:train:0", "session_id": "sess-1", "owner": "local", "base_model": "tiny/", "rank": 8}
        | {"train_attn": True, "train_mlp": True, "train_unembed": True, "optimizer": "adamw", "user_metadata": {}}
        | {"state": "live", "held": "for a look", "next_seq": 2, "step": 0, "created_at": NOW, "last_request_at": NOW}
    ],
    "sampler": [
        {"id": "sess-1:sample:0", "session_id": "sess-1", "owner": "local", "base_model": "tiny", "state": "lost"}
        | {"created_at": NOW, "last_completion": 0, "clones": 0}
    ],
    "request": [
        {"id": "req-1", "kind": "optim_step", "seq_id": 1, "content_hash": "a", "payload_type": "json", "state": "done"}
        | {
            "replays": True,
            "waiting_tokens": 0,
            "payload": b"p",
            "result": b"r",
            **OF_MODEL,
            "finished_at": NOW,
        },
        {
            "id": "req-2",
            "kind": "forward",
            "seq_id": 2,
            "content_hash": "b",
            "payload_type": "proto",
            "state": "pending",
            "finished_at": None,
        }
        | {
            "replays": False,
            "waiting_tokens": 7,
            "payload": b"x" * 20_000,
            "result": None,
            "created_at": NOW,
            **OF_MODEL,
        },
    ],
    "base_model": [{"name": "tiny", "card": "{}", "registered_at": NOW, "generation": 3, "warmth": json.dumps(STATUS)}],
}


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
    with pytest.raises(ServerError, match=f"schema is at revision None, this version needs {NEWEST}"):
        Journal.open(empty_url)


def test_a_database_of_the_first_version_is_upgraded_in_place_with_its_rows(empty_url):
    migrate(empty_url, "v0001")
    engine = sa.create_engine(driver_url(empty_url))
    tables = sa.MetaData()
    tables.reflect(engine)
    with engine.begin() as connection:
        for name, rows in ROWS_OF_V0001.items():
            connection.execute(tables.tables[name].insert(), rows)
    with pytest.raises(ServerError, match=f"schema is at revision v0001, this version needs {NEWEST}"):
        Journal.open(empty_url)
    migrate(empty_url)
    journal = Journal.open(empty_url)
    assert journal.sessions.get("sess-1", "local").sdk_version == "0.38.0"
    model = journal.models.get("sess-1:train:0", "local")
    assert (model.paused, model.base_model) == ("for a look", "tiny")
    assert journal.samplers.get("sess-1:sample:0", "local").state is SamplerState.CLOSED
    (pending,) = journal.requests.ready("sess-1:train:0")
    assert (pending.id, pending.kind, pending.payload) == ("req-2", Kind.FORWARD, b"x" * 20_000)
    assert journal.queue.waits_for("req-2") == "for a look"
    assert journal.results.get("req-1", "local").result == b"r"
    with engine.connect() as connection:
        (kept,) = connection.execute(sa.text("SELECT * FROM project_total")).mappings()
        assert (kept["owner"], kept["sessions"], kept["training_runs"], kept["samplers"]) == ("local", 1, 1, 1)
        assert kept["kept_bytes"] > 3 * 256
        waiting = connection.execute(sa.text("SELECT id, waiting_bytes FROM request ORDER BY id")).all()
        assert waiting == [("req-1", 0), ("req-2", 20_000)]
    assert [(row.name, row.compile_status) for row in journal.base_models.all()] == [("tiny", CompileStatus(**STATUS))]
    assert journal.results.finish([pending.done(b"answer", "proto")]) == ["req-2"]
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Table.metadata) == []
    engine.dispose()
    journal.close()


def test_processes_that_start_together_migrate_once(empty_url):
    code = f"from tinkerflow.backend.journal import migrate; migrate({empty_url!r})"
    processes = [subprocess.Popen([sys.executable, "-W", "error", "-c", code]) for _ in range(3)]
    assert [process.wait(timeout=60) for process in processes] == [0, 0, 0]
    Journal.open(empty_url).close()


def test_migrated_indexes_equal_those_of_the_models(empty_url):
    """compare_metadata ignores the conditions of partial indexes."""
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
        "ix_request_archives",
        "ix_request_completions",
        "ix_request_pending_of_owner",
        "ix_request_pending_interactive",
    }

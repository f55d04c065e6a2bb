"""Every test of the journal runs on a real SQLite file and on a real Postgres (pgserver's, one for the session)."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.manual_clock import ManualClock

from tinkerflow.backend.core.ids import model_id, sampler_id
from tinkerflow.backend.journal import (
    CheckpointKind,
    CheckpointSaved,
    Journal,
    Kind,
    ModelLive,
    NewModel,
    NewRequest,
    NewSampler,
    NewSession,
    Notifier,
    Pending,
    migrate,
)
from tinkerflow.backend.journal.database import Table

OWNER = "local"


@pytest.fixture(scope="session")
def postgres_migrated(postgres_database: Callable[[str], str]) -> str:
    """The URL of a migrated database. Tests empty it, because creating a database takes seconds."""
    url = postgres_database("migrated")
    migrate(url)
    return url


@pytest.fixture(scope="session")
def postgres_bare(postgres_database: Callable[[str], str]) -> str:
    return postgres_database("bare")


@pytest.fixture(params=["sqlite", "postgres"])
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a database without tables."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'journal.db'}"
    url: str = request.getfixturevalue("postgres_bare")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
    return url


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a migrated database without rows."""
    if request.param == "sqlite":
        shutil.copy(request.getfixturevalue("journal_template"), tmp_path / "journal.db")
        return f"sqlite:///{tmp_path / 'journal.db'}"
    url: str = request.getfixturevalue("postgres_migrated")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("TRUNCATE " + ", ".join(Table.metadata.tables))  # type: ignore[arg-type]
    return url


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def journal(url: str, clock: ManualClock) -> Iterator[Journal]:
    opened = Journal.open(url, clock=clock)
    yield opened
    opened.close()


def checkpoint(path: str, **changes: Any) -> CheckpointSaved:
    """The effect of a save with this path, with some of its fields changed."""
    run, kind, name = path.removeprefix("tinker://").split("/")
    adapter = {"rank": 8, "train_attn": True, "train_mlp": True, "train_unembed": True}
    values = {"path": path, "run_id": run, "kind": CheckpointKind(kind), "name": name, "owner": OWNER, **adapter}
    return CheckpointSaved(**{**values, "base_model": "tiny", "step": 1, "size_bytes": 100, **changes})


@dataclass(frozen=True)
class Scene:
    """A journal with factories for the rows that most tests need."""

    journal: Journal
    owner: str = OWNER

    def session(self, **said: Any) -> str:
        return self.journal.sessions.create(NewSession(self.owner, "0.38.0", **said))

    def model(
        self, session_id: str | None = None, n: int = 0, *, live: bool = True, base_model: str = "tiny", **said: Any
    ) -> str:
        """Create a model. Unless `live` is False, its creation (seq 0) is answered."""
        session_id = session_id or self.session()
        name = model_id(session_id, n)
        self.journal.models.create(
            NewModel(name, session_id, self.owner, base_model, rank=8, **said), self.creation(name)
        )
        if live:
            (creation,) = self.journal.requests.ready(name)
            self.journal.results.finish([creation.done(b"{}", "json", ModelLive(name))])
        return name

    def creation(self, name: str, content: str = "create") -> NewRequest:
        return NewRequest(Kind.CREATE_MODEL, self.owner, b"{}", content, model_id=name, seq_id=0)

    def operation(self, model: str, seq: int, content: str = "", error: str | None = None) -> NewRequest:
        payload = f"payload {seq}".encode()
        content = content or f"content {seq}"
        kind = Kind.FORWARD_BACKWARD
        return NewRequest(kind, self.owner, payload, content, model_id=model, seq_id=seq, error=error)

    def submit(self, model: str, seq: int, content: str = "", error: str | None = None) -> str:
        return self.journal.requests.submit(self.operation(model, seq, content, error))

    def taken(self, model: str, seq: int) -> Pending:
        """Submit an operation, and return it as the engine takes it."""
        self.submit(model, seq)
        (pending,) = self.journal.requests.ready(model)
        return pending

    def sampler(
        self, session_id: str, n: int = 0, *, model_path: str | None = None, snapshot_id: str | None = None
    ) -> str:
        name = sampler_id(session_id, n)
        return self.journal.samplers.open(NewSampler(name, session_id, self.owner, "tiny", model_path, snapshot_id))

    def sample(self, sampler: str, seq: int, content: str = "", *, interactive: bool = False) -> str:
        content = content or f"sample {seq}"
        address = {"sampler_id": sampler, "seq_id": seq}
        request = NewRequest(Kind.SAMPLE, self.owner, b"{}", content, **address, interactive=interactive)
        return self.journal.requests.submit(request)

    def ready(self, model: str, limit: int = 64) -> list[int | None]:
        return [pending.seq_id for pending in self.journal.requests.ready(model, limit)]

    def execute(self, model: str, limit: int = 64) -> list[Pending]:
        """Answer the ready requests."""
        pending = self.journal.requests.ready(model, limit)
        self.journal.results.finish([one.done(b"result", "proto") for one in pending])
        return pending


@pytest.fixture
def scene(journal: Journal) -> Scene:
    return Scene(journal)


@pytest.fixture
def save(scene: Scene, clock: ManualClock) -> Callable[..., str]:
    """save(model, name, kind, ttl, step) saves a checkpoint and returns its path. The attempt is {name}-{number}."""
    seqs: dict[str, int] = {}

    def saving(
        model: str, name: str, kind: CheckpointKind = CheckpointKind.WEIGHTS, ttl: float | None = None, step: int = 1
    ) -> str:
        seqs[model] = seqs.get(model, 0) + 1
        path = f"tinker://{model}/{kind}/{name}"
        expires = None if ttl is None else clock.now() + timedelta(seconds=ttl)
        row = checkpoint(path, step=step, expires_at=expires, attempt=f"{name}-{seqs[model]}")
        scene.journal.results.finish([scene.taken(model, seqs[model]).done(b"{}", "json", row)])
        clock.advance(1)
        return path

    return saving


@pytest.fixture
def as_owner(journal: Journal) -> Callable[[str], Scene]:
    return lambda owner: Scene(journal, owner)


@pytest.fixture
def notifier(url: str) -> Iterator[Notifier]:
    opened = Notifier(url)
    yield opened
    opened.close()

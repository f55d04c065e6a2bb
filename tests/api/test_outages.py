"""What clients see while the journal's database accepts no connections: a real Postgres that refuses them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
import tinker
from sqlalchemy.engine import make_url
from tests.api.conftest import BASE, Engine, Running, card_json

from tinkerflow.api import errors
from tinkerflow.backend.journal import Journal, Kind, migrate
from tinkerflow.backend.journal.database import Table

UNAVAILABLE = "the service's database is unavailable: try again"


@pytest.fixture(scope="module")
def database(postgres_database: Callable[[str], str]) -> str:
    url = postgres_database("outages")
    migrate(url)
    return url


@pytest.fixture
def journal(database: str) -> Iterator[Journal]:
    """A journal in Postgres that contains only one base model."""
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("TRUNCATE " + ", ".join(Table.metadata.tables))  # type: ignore[arg-type]
    journal = Journal.open(database)
    journal.base_models.register([(BASE, card_json())])
    yield journal
    journal.close()


@pytest.fixture
def outage(database: str, engine: Engine) -> Callable[[], AbstractContextManager[None]]:
    """A context in which the database has ended all connections and refuses new ones. The engine pauses meanwhile."""
    name = make_url(database).database

    @contextmanager
    def away() -> Iterator[None]:
        engine.paused = True
        with psycopg.connect(database.replace(f"/{name}?", "/postgres?"), autocommit=True) as server:
            server.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")  # type: ignore[arg-type]
            server.execute("SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = %s", [name])
            try:
                yield
            finally:
                server.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")  # type: ignore[arg-type]
        engine.paused = False

    return away


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses before errors, which the tests shorten."""
    made: list[float] = []

    async def sleep(seconds: float) -> None:
        made.append(seconds)
        await asyncio.sleep(0.01)

    monkeypatch.setattr(errors, "asyncio", SimpleNamespace(sleep=sleep))
    return made


def until(met: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not met():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_sdk_waits_until_the_database_is_back(
    client: tinker.ServiceClient,
    engine: Engine,
    server: Running,
    outage: Callable[[], AbstractContextManager[None]],
    pauses: list[float],
) -> None:
    """It repeats a poll immediately after a 5xx, so without a pause each poll would fail many times a second."""
    training = client.create_lora_training_client(BASE, rank=8).result()
    engine.paused = True
    params = tinker.AdamParams(learning_rate=0.1)
    before = training.optim_step(params)
    statuses = server.app.state.services.metrics.answered
    until(lambda: "optim_step" in statuses)
    with outage():
        until(lambda: statuses["retrieve_future"].statuses[503] >= 3)
        during = training.optim_step(params)
        until(lambda: statuses["optim_step"].statuses[503] > 0)
    assert [one.result().metrics["optimizer_step"] for one in (before, during)] == [1, 2]
    assert [kind for kind, _ in engine.executed].count(Kind.OPTIM_STEP) == 2
    assert sum(one.statuses[500] for one in statuses.values()) == 0
    assert set(pauses) == {1.0} and len(pauses) >= sum(one.statuses[503] for one in statuses.values())


def test_answers_during_an_outage_have_the_form_of_their_api(
    server: Running, outage: Callable[[], AbstractContextManager[None]], pauses: list[float]
) -> None:
    def get(path: str) -> Any:
        server.clock.advance(2)  # so that the journal is asked again whether the server needs a key
        return server.http.get(server.url + path, headers={"X-API-Key": "tml-test"})

    with outage():
        assert get("/api/v1/healthz").json() == {"status": "ok"}
        assert not pauses
        assert (get("/api/v1/training_runs").status_code, len(pauses)) == (503, 1)
        assert get("/api/v1/training_runs").json() == {"detail": UNAVAILABLE}
        openai = get("/v1/models").json()
        body = {"model": BASE, "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
        anthropic = server.http.post(f"{server.url}/v1/messages", json=body, headers={"X-API-Key": "tml-test"}).json()
        for path in ("/", "/keys", "/sessions"):
            page = get(path)
            assert (page.status_code, page.headers["content-type"]) == (503, "text/html; charset=utf-8")
            assert "database is unavailable" in page.text
        evil = server.http.get(f"{server.url}/api/v1/healthz", headers={"Host": "evil.example"})
    assert openai["error"] == {"message": UNAVAILABLE, "type": "server_error", "param": None, "code": "unavailable"}
    assert anthropic == {"type": "error", "error": {"type": "overloaded_error", "message": UNAVAILABLE}}
    assert evil.status_code == 403
    assert get("/api/v1/training_runs").status_code == 200

"""What clients see while the journal's database accepts no connections: a real Postgres that refuses them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
import tinker
from sqlalchemy.engine import make_url
from tests.api.conftest import BASE, KEY, Engine, Running, card_json
from tests.api.test_serve import CODE, healthy
from tests.api.test_streaming import Decoder, hear, hear_all, listening
from tests.waiting import wait_for

from tinkerflow.api import errors, serve
from tinkerflow.api.endpoints import generation, sse
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.journal import Journal, Kind, migrate
from tinkerflow.backend.journal.database import AWAY, Table
from tinkerflow.backend.journal.results import Results
from tinkerflow.backend.supervise.processes import free_port

UNAVAILABLE = "the service's database is unavailable: try again"
WAITS = "waiting for the journal's database"


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
def outage(database: str) -> Callable[[], AbstractContextManager[None]]:
    """A context in which the database has ended all connections and refuses new ones."""
    name = make_url(database).database

    @contextmanager
    def away() -> Iterator[None]:
        with psycopg.connect(database.replace(f"/{name}?", "/postgres?"), autocommit=True) as server:
            server.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")  # type: ignore[arg-type]
            server.execute("SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = %s", [name])
            try:
                yield
            finally:
                server.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")  # type: ignore[arg-type]

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
    wait_for(lambda: "optim_step" in statuses)
    with outage():
        wait_for(lambda: statuses["retrieve_future"].statuses[503] >= 3)
        during = training.optim_step(params)
        wait_for(lambda: statuses["optim_step"].statuses[503] > 0)
    engine.paused = False
    assert [one.result().metrics["optimizer_step"] for one in (before, during)] == [1, 2]
    assert [kind for kind, _ in engine.executed].count(Kind.OPTIM_STEP) == 2
    assert sum(one.statuses[500] for one in statuses.values()) == 0
    assert set(pauses) == {1.0} and len(pauses) >= sum(one.statuses[503] for one in statuses.values())


def test_answers_during_an_outage_have_the_form_of_their_api(
    server: Running, outage: Callable[[], AbstractContextManager[None]], pauses: list[float]
) -> None:
    def get(path: str) -> Any:
        server.clock.advance(2)  # so that the journal is asked again whether the server needs a key
        return server.http.get(server.url + path, headers={"X-API-Key": KEY})

    with outage():
        assert get("/api/v1/healthz").json() == {"status": "ok"}
        assert not pauses
        assert (get("/api/v1/training_runs").status_code, len(pauses)) == (503, 1)
        assert get("/api/v1/training_runs").json() == {"detail": UNAVAILABLE}
        openai = get("/v1/models").json()
        body = {"model": BASE, "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
        anthropic = server.http.post(f"{server.url}/v1/messages", json=body, headers={"X-API-Key": KEY}).json()
        for path in ("/", "/keys", "/sessions"):
            page = get(path)
            assert (page.status_code, page.headers["content-type"]) == (503, "text/html; charset=utf-8")
            assert "database is unavailable" in page.text
        evil = server.http.get(f"{server.url}/api/v1/healthz", headers={"Host": "evil.example"})
    assert openai["error"] == {"message": UNAVAILABLE, "type": "server_error", "param": None, "code": "unavailable"}
    assert anthropic == {"type": "error", "error": {"type": "overloaded_error", "message": UNAVAILABLE}}
    assert evil.status_code == 403
    assert get("/api/v1/training_runs").status_code == 200


@pytest.mark.usefixtures("journal")
def test_an_api_that_starts_during_an_outage_waits(
    database: str,
    settings_for: Any,
    outage: Callable[[], AbstractContextManager[None]],
    tmp_path: Path,
) -> None:
    settings, log = settings_for(port=free_port(), database_url=database), tmp_path / "log"
    environment = {**os.environ, **settings.environment()}
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("DELETE FROM base_model")
    with outage(), log.open("wb") as out:
        process = subprocess.Popen([sys.executable, "-c", CODE], stderr=out, env=environment)
        wait_for(lambda: WAITS in log.read_text() or process.poll() is not None)
    try:
        wait_for(lambda: "to register a base model" in log.read_text() or process.poll() is not None)
        with outage():
            wait_for(lambda: log.read_text().count(WAITS) == 2 or process.poll() is not None)
        again = Journal.open(database)
        again.base_models.register([(BASE, card_json())])
        again.close()
        wait_for(lambda: healthy(f"http://127.0.0.1:{settings.port}") or process.poll() is not None)
        assert process.poll() is None, log.read_text()
    finally:
        process.kill()
        process.wait()


def test_an_api_does_not_wait_for_a_database_that_does_not_exist(database: str, settings_for: Any) -> None:
    settings = settings_for(database_url=database.replace("/outages?", "/missing?"))
    with pytest.raises(UserError, match=r'^database_url: .*database "missing" does not exist'):
        serve(settings)


@pytest.mark.usefixtures("lettered")
def test_streams_go_on_after_an_outage(
    server: Running,
    outage: Callable[[], AbstractContextManager[None]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The outage fails their heartbeats, and the cancellation of the stream whose client leaves."""
    monkeypatch.setattr(sse, "_COMMENT_SECONDS", 0.05)
    server.app.state.services.samplers.beat_seconds = 0.05
    decoder, readers = Decoder(server.journal), listening(server, 2)
    decoder.take(2)
    hear(readers, decoder, (8,))
    with outage():
        wait_for(lambda: "no heartbeat for session" in caplog.text)
        readers[0].last = ""
        wait_for(lambda: readers[0].last.startswith(": "))
        readers[1].left.set()
        readers[1].join(60)
        wait_for(lambda: "cannot be cancelled, trying again" in caplog.text)
    wait_for(lambda: server.journal.results.finished(list(decoder.requests)))
    (cancelled,) = server.journal.results.finished(list(decoder.requests))
    del decoder.requests[cancelled]
    hear(readers[:1], decoder, (16,), start=8)
    hear_all(readers[:1], decoder)
    assert readers[0].last == "data: [DONE]"


@pytest.mark.usefixtures("lettered")
@pytest.mark.parametrize("lasts", [False, True])
def test_a_stream_waits_for_its_result_and_ends_with_an_error_if_the_outage_lasts(
    server: Running,
    outage: Callable[[], AbstractContextManager[None]],
    monkeypatch: pytest.MonkeyPatch,
    lasts: bool,
) -> None:
    asked, begun, failed, get = threading.Event(), threading.Event(), [], Results.get

    def late(self: Results, *args: Any, **more: Any) -> Any:
        asked.set()
        assert begun.wait(60)
        try:
            return get(self, *args, **more)
        except AWAY as error:
            failed.append(error)
            raise

    decoder, (reader,) = Decoder(server.journal), listening(server, 1)
    decoder.take(1)
    hear([reader], decoder, (8,))
    monkeypatch.setattr(generation, "_PAUSES", (0.01,) if lasts else (0.01,) * 10_000)
    monkeypatch.setattr(Results, "get", late)
    decoder.answer()
    assert asked.wait(60)
    with outage():
        begun.set()
        wait_for(lambda: len(failed) >= 2)
        if lasts:
            reader.join(60)
    if lasts:
        error = {"message": UNAVAILABLE, "type": "server_error", "param": None, "code": "unavailable"}
        assert json.loads(reader.last.removeprefix("data: ")) == {"error": error}
    else:
        hear_all([reader], decoder)

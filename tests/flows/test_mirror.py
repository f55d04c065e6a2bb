"""The mirror does not disturb work if there is no Prefect server."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import pytest

from tinkerflow.backend.core.clock import SystemClock
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.journal import Kind, Outcome, Pending
from tinkerflow.backend.settings import Settings
from tinkerflow.backend.supervise.processes import free_port
from tinkerflow.flows.observers import Batch
from tinkerflow.flows.prefect.connection import PrefectConnection, open_prefect
from tinkerflow.flows.prefect.mirror import Mirror
from tinkerflow.flows.prefect.pacing import Pacing
from tinkerflow.flows.prefect.server import server_environment
from tinkerflow.tasks.execution.operation import Operation


async def started(url: str, *, batches: int) -> Mirror:
    """The mirror of a model's run after `batches` finished batches."""
    mirror = Mirror(PrefectConnection(url), Pacing(1000.0, SystemClock()))
    (run,) = mirror.observe_training_run("sess-1234:train:0", "folder/unigram")
    for step in range(batches):
        request = Pending(f"req-{step}", Kind.OPTIM_STEP, "o", "s", "m", None, step, b"")

        async def perform(request: Pending = request) -> Outcome:
            return request.done(b"{}", "json")

        operation = Operation(request, asyncio.create_task(perform()))
        run.started(Batch(Kind.OPTIM_STEP, (request,), step + 1), [operation])
        await operation.answered
    run.ended("Completed", "it was unloaded")
    return mirror


async def test_prefect_off_observes_no_runner() -> None:
    mirror = Mirror(PrefectConnection(""), Pacing(1000.0, SystemClock()))
    assert not mirror.connection.reachable
    assert (
        mirror.observe_training_run("sess-1234:train:0", "folder/unigram")
        == mirror.observe_sampling("folder/unigram")
        == []
    )
    await mirror.connection.close()


async def test_unreachable_prefect_server_is_logged_once_and_delays_nothing(caplog: pytest.LogCaptureFixture) -> None:
    connection = PrefectConnection(url := f"http://127.0.0.1:{free_port()}/api")
    with connection.settings(), caplog.at_level(logging.WARNING, logger="tinkerflow.flows.prefect.connection"):
        mirror = await started(url, batches=3)
        async with asyncio.timeout(60):
            while mirror.connection.reachable:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert await mirror.reconcile() == 0
        await mirror.connection.close()
    assert len([r for r in caplog.records if "cannot be reached" in r.message]) == 1


async def test_external_prefect_needs_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    with pytest.raises(UserError, match="PREFECT_API_URL"):
        async with open_prefect(Settings(data_dir=tmp_path, prefect="external"), print):
            pass


async def test_failed_prefect_start_does_not_stop_the_engine(tmp_path: Path) -> None:
    (tmp_path / "prefect").mkdir()
    (tmp_path / "prefect" / "prefect.db").mkdir()  # a folder where the database file belongs
    said: list[str] = []
    settings = Settings(data_dir=tmp_path, prefect_port=free_port())
    async with open_prefect(settings, said.append) as connection:
        assert not connection.reachable
        await asyncio.sleep(0)
    assert said == ["starting the Prefect server"]


def test_server_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://elsewhere/api")
    environment = server_environment(tmp_path, 4711, "tinkerflow:secret")
    assert "PREFECT_API_URL" not in environment
    assert environment["PATH"] == os.environ["PATH"]
    assert environment["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false"
    # Prefect 3.8.8 truncates the fraction, and with 0 its recorder spins
    assert int(environment["PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL"]) >= 1

"""Work goes on whatever Prefect does; here without a server."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import pytest

from tinkerflow.backend.errors import UserError
from tinkerflow.backend.processes import free_port
from tinkerflow.backend.settings import Settings
from tinkerflow.flows.prefect.tracking import Tracking, open_tracking
from tinkerflow.flows.prefect.training_run import training_run
from tinkerflow.flows.prefect_server import server_environment


async def test_off_means_that_the_body_runs_by_itself() -> None:
    tracking = Tracking("")

    async def body() -> str:
        return "done"

    assert await tracking.run(training_run, body, (), model_id="m", base_model="b") == "done"
    assert not tracking.reachable


async def test_when_no_flow_run_can_begin_the_body_runs_once_without_one(caplog: pytest.LogCaptureFixture) -> None:
    tracking = Tracking(f"http://127.0.0.1:{free_port()}/api")
    calls = []

    async def body() -> str:
        calls.append(1)
        return "done"

    with tracking.settings(), caplog.at_level(logging.WARNING, logger="tinkerflow.flows.prefect.tracking"):
        for _ in range(2):
            assert await tracking.run(training_run, body, (), model_id="m", base_model="b") == "done"
        assert await tracking.reconcile() == 0
        await tracking.close()
    assert calls == [1, 1]
    assert not tracking.reachable
    assert len([r for r in caplog.records if "cannot be reached" in r.message]) == 1


async def test_the_body_s_own_error_is_raised() -> None:
    async def body() -> None:
        raise ValueError("ours")

    with pytest.raises(ValueError, match="ours"):
        await Tracking("").run(training_run, body, (), model_id="m", base_model="b")


async def test_external_needs_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    with pytest.raises(UserError, match="PREFECT_API_URL"):
        async with open_tracking(Settings(data_dir=tmp_path, prefect="external"), print):
            pass


async def test_a_server_that_cannot_start_does_not_stop_us(tmp_path: Path) -> None:
    (tmp_path / "prefect").mkdir()
    (tmp_path / "prefect" / "prefect.db").mkdir()  # no file can be made there
    said: list[str] = []
    settings = Settings(data_dir=tmp_path, prefect_port=free_port())
    async with open_tracking(settings, said.append) as tracking:
        assert not tracking.reachable
        await asyncio.sleep(0)
    assert said == ["starting the Prefect server"]


def test_server_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://elsewhere/api")
    environment = server_environment(tmp_path, 4711)
    assert "PREFECT_API_URL" not in environment
    assert environment["PATH"] == os.environ["PATH"]
    assert environment["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false"
    # prefect 3.8.8 cuts the fraction off, and 0 makes its recorder spin
    assert int(environment["PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL"]) >= 1

"""A pipeline's clients of a server, and how they are closed."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from datetime import UTC, datetime
from typing import Any

import pytest
import tinker
from tinker import types

from tinkerflow.backend.core.errors import UserError
from tinkerflow.tasks.pipelines.connection import ServerClients, connect


class StuckService:
    """An SDK client whose `close` never ends, and which logs that it could not cancel a sample."""

    def __init__(self, **told: Any) -> None:
        self.told = told

    def close(self, status: str) -> Future[None]:
        logging.getLogger("tinker.lib.internal_client_holder").error("Internal client holder is closed")
        return Future()


async def test_session_that_cannot_be_closed_does_not_block_a_pipeline(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tinker, "ServiceClient", StuckService)
    monkeypatch.setattr(tinker, "RestClient", StuckService)  # the SDK's client sends a request when it is created
    monkeypatch.setenv("TINKER_BASE_URL", "http://127.0.0.1:1")
    with caplog.at_level(logging.WARNING):
        async with connect(close_seconds=0.01):
            pass
    assert "was not closed within 0.01 s" in caplog.text and "holder is closed" not in caplog.text


class Runs:
    """An SDK client for a server with one training run, `run-1`."""

    def __init__(self, newest: types.Checkpoint | None) -> None:
        self._newest = newest

    async def get_training_run(self, run_id: str) -> types.TrainingRun:
        assert run_id == "run-1"
        return types.TrainingRun(
            training_run_id=run_id,
            base_model="tiny",
            model_owner="me",
            is_lora=True,
            last_request_time=datetime.now(UTC),
            last_sampler_checkpoint=self._newest,
        )


async def test_weights_are_named_by_a_path_or_by_their_training_run() -> None:
    path = "tinker://run-1/sampler_weights/step-9"
    saved = types.Checkpoint(
        checkpoint_id="sampler_weights/step-9", checkpoint_type="sampler", time=datetime.now(UTC), tinker_path=path
    )
    clients: Any = [ServerClients(StuckService(), Runs(newest)) for newest in (saved, None)]  # type: ignore[arg-type]
    assert await clients[0].sampler_weights("run-1") == path
    assert await clients[1].sampler_weights(path) == path
    with pytest.raises(UserError, match=r"'run-1': it has no sampler weights"):
        await clients[1].sampler_weights("run-1")

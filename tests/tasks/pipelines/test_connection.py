"""Clients of a server for a pipeline, and their end."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from typing import Any

import pytest
import tinker

from tinkerflow.tasks.pipelines.connection import connect


class StuckService:
    """A client of the SDK whose `close` never ends."""

    def __init__(self, **told: Any) -> None:
        self.told = told

    def close(self, status: str) -> Future[None]:
        return Future()


async def test_a_session_that_cannot_be_closed_does_not_keep_a_pipeline(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tinker, "ServiceClient", StuckService)
    monkeypatch.setattr(tinker, "RestClient", StuckService)  # the SDK's asks the server when it is made
    monkeypatch.setenv("TINKER_BASE_URL", "http://127.0.0.1:1")
    with caplog.at_level(logging.WARNING):
        async with connect(close_seconds=0.01):
            pass
    assert "was not closed within 0.01 s" in caplog.text

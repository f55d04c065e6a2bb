"""The engine's lease is renewed even if its threads are blocked."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta
from typing import Any

import pytest

from tinkerflow.flows import lease


async def test_the_lease_is_renewed_while_a_slow_store_holds_all_threads(
    journal: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.01)
    renewed, let_go = threading.Event(), threading.Event()
    monkeypatch.setattr(journal.leases, "renew", renewed.set)
    async with lease.hold_lease(journal):
        saves = [asyncio.create_task(asyncio.to_thread(let_go.wait)) for _ in range(64)]
        try:
            await asyncio.sleep(0)  # lets the saves take all threads
            renewed.clear()
            await until(renewed.is_set)
        finally:
            let_go.set()
            await asyncio.gather(*saves)


async def test_a_silent_holder_loses_the_lease_although_the_clock_was_set_back(
    journal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "LEASE_SECONDS", 0.0)
    monkeypatch.setattr(lease, "ACQUIRE_SECONDS", 0.01)
    journal.leases.acquire("an engine of another host")
    now = journal.leases._now
    monkeypatch.setattr(journal.leases, "_now", lambda: now() - timedelta(hours=1))
    async with asyncio.timeout(60), lease.hold_lease(journal):
        assert journal.leases.epoch == 2

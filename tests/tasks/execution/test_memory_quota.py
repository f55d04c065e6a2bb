"""Memory quotas: requests of a project wait only for earlier requests of the same project."""

from __future__ import annotations

import asyncio

import pytest

from tinkerflow.tasks.execution.memory_quota import MemoryQuota


async def test_project_waits_only_for_its_own_reservations_in_order() -> None:
    quota, came, leave = MemoryQuota(10), list[str](), asyncio.Event()

    async def hold(owner: str, name: str, size: int) -> None:
        async with quota.reserve(owner, size):
            came.append(name)
            await leave.wait()

    async with asyncio.TaskGroup() as group:
        for owner, name, size in (("a", "a6", 6), ("a", "a5", 5), ("a", "a1", 1), ("b", "b10", 10), ("c", "c99", 99)):
            group.create_task(hold(owner, name, size))
        await asyncio.sleep(0.01)
        assert came == ["a6", "b10", "c99"]  # a1 would fit, but a5 is earlier; c99 exceeds the quota and holds it alone
        assert (quota.reserved("a"), quota.reserved("b")) == (6, 10)
        leave.set()
    assert came == ["a6", "b10", "c99", "a5", "a1"]
    assert quota.reserved("a") == quota.reserved("c") == 0


async def test_cancelled_or_failed_reservation_releases_its_memory() -> None:
    quota, stay = MemoryQuota(10), asyncio.Event()

    async def hold(size: int) -> None:
        async with quota.reserve("a", size):
            await stay.wait()

    first, waits = asyncio.create_task(hold(8)), asyncio.create_task(hold(8))
    await asyncio.sleep(0.01)
    waits.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waits
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    with pytest.raises(ValueError, match="wrong"):
        async with quota.reserve("a", 10):
            raise ValueError("wrong")
    assert quota.reserved("a") == 0

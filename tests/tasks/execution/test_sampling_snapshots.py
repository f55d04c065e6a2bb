from __future__ import annotations

import asyncio

import pytest

from tinkerflow.backend.spec.commands import SnapshotHeld
from tinkerflow.tasks.execution.sampling_snapshots import Snapshots
from tinkerflow.tasks.execution.sequencer import Saves


async def test_concurrent_loads_of_a_snapshot_share_one_load() -> None:
    snapshots, loads = Snapshots(Saves()), 0

    async def load() -> SnapshotHeld:
        nonlocal loads
        loads += 1
        await asyncio.sleep(0.01)
        return SnapshotHeld(7)

    await asyncio.gather(*(snapshots.load_once("a", load) for _ in range(5)))
    await snapshots.load_once("a", load)
    assert loads == 1 and snapshots.held("a")


async def test_failed_load_fails_all_waiters_and_is_retried() -> None:
    snapshots = Snapshots(Saves())
    failing = True

    async def load() -> SnapshotHeld:
        await asyncio.sleep(0)
        if failing:
            raise ValueError("no")
        return SnapshotHeld(7)

    found = await asyncio.gather(*(snapshots.load_once("a", load) for _ in range(3)), return_exceptions=True)
    assert [type(error) for error in found] == [ValueError] * 3
    failing = False
    await snapshots.load_once("a", load)
    assert snapshots.held("a")


async def test_cancelled_waiter_does_not_cancel_a_shared_load() -> None:
    snapshots, go = Snapshots(Saves()), asyncio.Event()

    async def load() -> SnapshotHeld:
        await go.wait()
        return SnapshotHeld(7)

    first, second = (asyncio.create_task(snapshots.load_once("a", load)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    go.set()
    await second
    with pytest.raises(asyncio.CancelledError):
        await first


def test_only_recorded_snapshots_can_be_dropped() -> None:
    snapshots = Snapshots(Saves())
    snapshots.published("a", SnapshotHeld(7))
    snapshots.recorded("gone")
    assert snapshots.droppable == frozenset()
    snapshots.recorded("a")
    assert snapshots.droppable == {"a"}
    snapshots.lost()
    assert snapshots.droppable == frozenset() and not snapshots.held("a")


def test_surplus_snapshots_are_stored_idle_and_least_recently_used() -> None:
    saves = Saves()
    snapshots = Snapshots(saves)
    saves.begin("not stored yet", "model", 1)
    for name in "abcd":
        snapshots.published(name, SnapshotHeld(7))
        snapshots.recorded(name)
    snapshots.published("not stored yet", SnapshotHeld(7))
    snapshots.recorded("not stored yet")
    assert snapshots.surplus(5, 0) == []
    assert snapshots.surplus(2, 0) == ["a", "b", "c"]
    snapshots.recorded("a")  # used again
    with snapshots.using("b"), snapshots.using("b"):
        assert snapshots.surplus(1, 0) == ["c", "d"]
    snapshots.dropped("b")
    assert snapshots.surplus(1, 0) == ["c", "d"]
    snapshots.published("c", SnapshotHeld(7))  # replaces the old one, as an inflight save does
    snapshots.moving("x", "c")
    assert "c" not in snapshots.surplus(1, 0)


def test_host_keeps_surplus_snapshots_up_to_its_bytes() -> None:
    saves = Saves()
    snapshots = Snapshots(saves)
    saves.begin("newer, not stored", "model", 1)
    for name, nbytes in {"a": 10, "b": 20, "c": 30, "d": 40}.items():
        snapshots.published(name, SnapshotHeld(nbytes))
        snapshots.recorded(name)
    assert snapshots.surplus(1, 60) == []
    assert snapshots.surplus(1, 59) == ["a"]
    assert snapshots.surplus(1, 50) == ["a"]
    assert snapshots.surplus(1, 49) == ["a", "b"]
    assert snapshots.surplus(1, 0) == ["a", "b", "c"]
    assert snapshots.surplus(4, 0) == []
    with snapshots.using("a"):  # it is on the host, and remains there
        assert snapshots.surplus(1, 59) == ["b"]
        assert snapshots.surplus(2, 0) == ["b"], "never the last used ones in its stead"
    snapshots.published("newer, not stored", SnapshotHeld(50))
    snapshots.recorded("newer, not stored")
    assert snapshots.surplus(2, 59) == ["a"]


def test_cpu_platform_keeps_no_surplus_snapshots() -> None:
    snapshots = Snapshots(Saves())
    for name in "abcd":
        snapshots.published(name, SnapshotHeld(None))
        snapshots.recorded(name)
    with snapshots.using("b"):
        assert snapshots.surplus(1, 10**9) == ["a", "c"]


def test_host_only_snapshots_count_there_except_the_last_used_one() -> None:
    snapshots = Snapshots(Saves())
    for name, size in {"a": 10, "b": 20, "whole a": 50, "whole b": 60, "c": 30, "whole c": 70}.items():
        snapshots.published(name, SnapshotHeld(size, on_host=name.startswith("whole")))
        snapshots.recorded(name)
    assert snapshots.surplus(3, 110) == []
    assert snapshots.surplus(3, 109) == ["whole a"]
    assert snapshots.surplus(1, 0) == ["a", "b", "whole a", "whole b"]


def test_moving_snapshot_is_kept_until_the_journal_records_its_new_owner() -> None:
    snapshots = Snapshots(Saves())
    snapshots.published("shared", SnapshotHeld(7))
    snapshots.recorded("shared")
    snapshots.published("newer", SnapshotHeld(7))
    snapshots.moving("newer", "shared")
    assert snapshots.droppable == frozenset() and not snapshots.held("newer")
    snapshots.published("shared", SnapshotHeld(7))
    snapshots.recorded("shared")
    assert snapshots.droppable == {"shared"}

"""The schedule of recovery snapshots."""

from __future__ import annotations

from tinkerflow.flows.snapshots import SnapshotPolicy, SnapshotSchedule


def test_a_snapshot_is_due_after_so_many_steps_or_seconds_if_the_model_changed() -> None:
    schedule = SnapshotSchedule(SnapshotPolicy(steps=2, seconds=60.0), now=0.0)
    assert not schedule.is_due(1000.0), "nothing happened"
    schedule.dispatched(0, step=False)
    assert schedule.is_due(60.0) and not schedule.is_due(59.0)
    schedule.dispatched(1, step=True)
    schedule.dispatched(2, step=True)
    assert schedule.is_due(1.0)
    assert schedule.begin(1.0) == 2
    schedule.dispatched(3, step=True)
    assert not schedule.is_due(1000.0), "one is being taken"
    schedule.taking = False
    assert schedule.is_due(61.0) and not schedule.is_due(60.0)


def test_interrupted_steps_are_in_no_snapshot_and_replayed_steps_count() -> None:
    schedule = SnapshotSchedule(SnapshotPolicy(steps=3, seconds=1000.0), now=0.0)
    schedule.dispatched(5, step=True)
    schedule.interrupted()
    assert schedule.seq_id is None and not schedule.is_due(2000.0)
    schedule.restored(2, 4)
    schedule.dispatched(3, step=True)  # a save whose place the replay has passed
    assert schedule.is_due(0.0) and schedule.begin(0.0) == 4

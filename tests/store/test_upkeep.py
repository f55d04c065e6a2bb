"""Leftovers of failed saves, and changes of a commit after its save, on every kind of store."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tinkerflow.backend.core.clock import SystemClock
from tinkerflow.backend.spec.commands import AdapterState
from tinkerflow.backend.store import RECOVERY, CheckpointMeta, Store

RUN = "sess-1:train:0"
FOLDER = f"runs/{RUN}/weights"
Make = Callable[..., AdapterState]
Same = Callable[[AdapterState, AdapterState], None]


def soon() -> datetime:
    """A time after all writes so far, because stores use their own clocks."""
    return SystemClock().now() + timedelta(seconds=5)


def test_attempts_without_a_commit_are_orphans_once_they_are_old(
    store: Store, meta: CheckpointMeta, make_state: Make, same: Same
) -> None:
    kept = store.save(RUN, "weights", "x", make_state(1), meta)
    snapshot = store.save(RUN, RECOVERY, "seq-1", make_state(2), meta)
    dead = [f"{FOLDER}/x/attempt-1", f"{FOLDER}/never/attempt-2", f"runs/{RUN}/recovery/seq-2/attempt-3"]
    for prefix in dead:
        store.blobs.create(f"{prefix}/adapter_config.json", b"half")
    store.blobs.create(f"{FOLDER}/x/notes.txt", b"not ours")
    store.blobs.create("elsewhere/attempt-4/x", b"not ours")
    assert store.upkeep.orphans(SystemClock().now() - timedelta(hours=1)) == []
    found = store.upkeep.orphans(soon())
    assert sorted(f"{one.path} {one.attempt}" for one in found) == [
        f"tinker://{RUN}/recovery/seq-2 attempt-3",
        f"tinker://{RUN}/weights/never attempt-2",
        f"tinker://{RUN}/weights/x attempt-1",
    ]
    assert all(abs(one.written_at - SystemClock().now()) < timedelta(minutes=10) for one in found)
    assert all(store.upkeep.remove_orphan(one) for one in found)
    assert [store.blobs.children(prefix) for prefix in dead] == [[], [], []]
    assert store.upkeep.orphans(soon()) == []
    same(store.load(kept.path)[0], make_state(1))
    same(store.load(snapshot.path)[0], make_state(2))
    assert store.blobs.read(f"{FOLDER}/x/notes.txt") == store.blobs.read("elsewhere/attempt-4/x") == b"not ours"


def test_attempts_beside_an_unreadable_commit_are_not_orphans(
    store: Store, meta: CheckpointMeta, make_state: Make
) -> None:
    store.save(RUN, "weights", "x", make_state(1), meta)
    store.blobs.remove(f"{FOLDER}/x/commit.json")
    store.blobs.create(f"{FOLDER}/x/commit.json", b"{")
    assert store.upkeep.orphans(soon()) == []


def test_orphan_committed_since_the_scan_is_kept(
    store: Store, meta: CheckpointMeta, make_state: Make, same: Same
) -> None:
    saved = store.save(RUN, "weights", "x", make_state(1), meta)
    commit = store.blobs.read(f"{FOLDER}/x/commit.json")
    store.blobs.remove(f"{FOLDER}/x/commit.json")
    (orphan,) = store.upkeep.orphans(soon())
    store.blobs.create(f"{FOLDER}/x/commit.json", commit)
    assert not store.upkeep.remove_orphan(orphan)
    same(store.load(saved.path)[0], make_state(1))


def test_drafts_of_dead_writers_are_cleared(tmp_path: Path, meta: CheckpointMeta, make_state: Make) -> None:
    store = Store.open(f"file://{tmp_path}")
    store.save(RUN, "weights", "x", make_state(1), meta)
    folder = tmp_path / FOLDER / "x"
    for name in (".commit.json.old", ".commit.json.new"):
        (folder / name).write_bytes(b"half")
    long_ago = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
    os.utime(folder / ".commit.json.old", (long_ago, long_ago))
    os.utime(folder / "commit.json", (long_ago, long_ago))
    assert store.upkeep.clear_drafts(SystemClock().now() - timedelta(hours=1)) == 1
    assert sorted(path.name for path in folder.iterdir() if path.is_file()) == [".commit.json.new", "commit.json"]


def test_a_commit_is_amended_and_nothing_else_changes(
    store: Store, meta: CheckpointMeta, make_state: Make, same: Same
) -> None:
    saved = store.save(RUN, "weights", "x", make_state(1), meta)
    until = datetime(2030, 1, 1, tzinfo=UTC)
    for _ in range(2):
        assert store.amend(saved.path, saved.attempt, public=True, expires_at=until)
    amended = dataclasses.replace(saved, meta=dataclasses.replace(saved.meta, public=True, expires_at=until))
    assert store.find(saved.path) == amended
    same(store.load(saved.path)[0], make_state(1))
    assert store.amend(saved.path, saved.attempt, public=False, expires_at=None)
    assert store.find(saved.path) == saved


def test_a_later_save_or_a_deletion_is_not_amended(store: Store, meta: CheckpointMeta, make_state: Make) -> None:
    old = store.save(RUN, "weights", "x", make_state(1), meta)
    new = store.save(RUN, "weights", "x", make_state(2), meta, overwrite=True)
    assert not store.amend(old.path, old.attempt, public=True, expires_at=None)
    assert store.find(new.path) == new
    store.delete(new.path)
    assert not store.amend(new.path, new.attempt, public=True, expires_at=None)
    assert not store.exists(new.path)


def test_a_damaged_commit_is_not_amended(store: Store, meta: CheckpointMeta, make_state: Make) -> None:
    saved = store.save(RUN, "weights", "x", make_state(1), meta)
    commit = store.blobs.read(f"{FOLDER}/x/commit.json")
    store.blobs.replace(f"{FOLDER}/x/commit.json", commit, commit[:-9])
    assert not store.amend(saved.path, saved.attempt, public=True, expires_at=None), "no sweep has to try again"
    assert store.blobs.read(f"{FOLDER}/x/commit.json") == commit[:-9]


def test_copy_of_a_public_checkpoint_is_private(store: Store, meta: CheckpointMeta, make_state: Make) -> None:
    meta = dataclasses.replace(meta, run_metadata={"renderer": "qwen3"})
    saved = store.save(RUN, "weights", "x", make_state(1), meta)
    store.amend(saved.path, saved.attempt, public=True, expires_at=None)
    copied = store.copy(saved.path, "copy-1:train:0", owner="me", expires_at=None, request_id="r")
    assert (copied.meta.public, copied.meta.run_metadata, copied.meta.owner) == (False, {}, "me")


def test_a_deleted_or_interrupted_save_leaves_no_folder(tmp_path: Path, meta: CheckpointMeta, make_state: Make) -> None:
    store = Store.open(f"file://{tmp_path}")
    kept = store.save(RUN, "weights", "kept", make_state(1), meta)
    saved = store.save(RUN, RECOVERY, "seq-1", make_state(2), meta)
    assert store.delete(saved.path)
    (tmp_path / FOLDER / "killed" / "attempt-1").mkdir(parents=True)  # killed before the first file was there
    (orphan,) = store.upkeep.orphans(soon())
    assert store.upkeep.remove_orphan(orphan)
    (tmp_path / FOLDER / "left").mkdir()  # by an earlier release
    store.upkeep.clear_drafts(soon())
    assert [path.name for path in tmp_path.glob("runs/*/*/*")] == ["kept"]
    assert store.exists(kept.path)

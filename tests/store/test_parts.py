"""States that processes write in parts: committed together or not at all, and read selectively."""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from tinkerflow.backend.core.errors import NotFoundError, StoreError
from tinkerflow.backend.spec.commands import AdapterKept, LoraSpec, StoredState
from tinkerflow.backend.store import RECOVERY, CheckpointMeta, Saved, Store, parts
from tinkerflow.backend.store.blobs import Blobs

KEPT = AdapterKept(LoraSpec(4), 7, "adamw")
META = CheckpointMeta(base_model="tiny", owner="me")


@pytest.fixture
def local(tmp_path: Path) -> Store:
    return Store.open(f"file://{tmp_path}")


def pieces(rank: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(rank)
    return {f"weights/{name}@{rank}": rng.normal(size=(3, 5)).astype(np.float32) for name in "ab"}


def save(store: Store, ranks: int = 2) -> Saved:
    folder = store.new_folder("run", RECOVERY, "seq-1")
    files = {}
    for rank in range(ranks):
        files |= parts.write_part(store.blobs, folder, rank, pieces(rank))
    assert store.find("tinker://run/recovery/seq-1") is None
    return store.commit_parts(folder, KEPT, META, files)


def read(blobs: Blobs, state: StoredState, *names: str) -> Mapping[str, np.ndarray]:
    return parts.read_tensors(blobs, state, lambda shapes: [name for name in shapes if not names or name in names])


def test_every_process_reads_its_parts(local: Store) -> None:
    saved = save(local)
    state, _ = local.stored(saved.path)
    assert (state.spec, state.step, state.optimizer) == (KEPT.spec, 7, "adamw")
    found = read(local.blobs, state)
    assert found.keys() == pieces(0).keys() | pieces(1).keys()
    assert all((found[name] == array).all() for rank in range(2) for name, array in pieces(rank).items())
    assert list(read(local.blobs, state, "weights/b@1")) == ["weights/b@1"]
    assert local.upkeep.problems(saved.path) == []
    whole, _ = local.load(saved.path)  # for processes that do not reach the store
    assert whole.weights.keys() == found.keys()


def test_a_process_with_nothing_to_write_writes_no_file(local: Store) -> None:
    assert parts.write_part(local.blobs, "runs/run/recovery/n/attempt-1", 3, {}) == {}


def test_uncommitted_parts_are_no_checkpoint(local: Store) -> None:
    folder = local.new_folder("run", RECOVERY, "seq-1")
    parts.write_part(local.blobs, folder, 0, pieces(0))
    assert local.upkeep.paths() == ["tinker://run/recovery/seq-1"]
    assert not local.exists("tinker://run/recovery/seq-1")
    local.discard(folder)
    assert local.blobs.children(folder) == []


def test_missing_or_changed_file_is_not_committed(local: Store) -> None:
    folder = local.new_folder("run", RECOVERY, "seq-1")
    files = parts.write_part(local.blobs, folder, 0, pieces(0))
    cut = {file: dataclasses.replace(digest, size=digest.size + 1) for file, digest in files.items()}
    with pytest.raises(StoreError, match=r"part-00000\.safetensors has \d+ bytes after writing"):
        local.commit_parts(folder, KEPT, META, cut)
    assert not local.exists("tinker://run/recovery/seq-1")
    assert local.blobs.children(folder) == [], "nothing is left behind"


@pytest.mark.parametrize("at", [3, 40, -1])
def test_damage_is_named(local: Store, tmp_path: Path, at: int) -> None:
    state, _ = local.stored(save(local).path)
    file = tmp_path / state.folder / "part-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
    with pytest.raises(StoreError, match=r"block 0 of part-00001\.safetensors does not have the SHA-256"):
        read(local.blobs, state)
    file.unlink()
    with pytest.raises(NotFoundError, match=r"part-00001\.safetensors .* no longer exists"):
        read(local.blobs, state)


def test_store_is_identified_by_its_mark(local: Store, tmp_path: Path) -> None:
    mark = local.mark()
    assert mark == local.mark() == Store.open(f"file://{tmp_path}").mark()
    assert parts.is_store(local.blobs, mark)
    other = Store.open(f"file://{tmp_path / 'other'}")
    assert not parts.is_store(other.blobs, mark)
    other.mark()
    assert not parts.is_store(other.blobs, mark)
    assert local.blobs.children("reach") == []


@pytest.mark.parametrize(("code", "reached"), [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EROFS, False)])
def test_a_store_on_a_full_disk_is_reached(
    local: Store, monkeypatch: pytest.MonkeyPatch, code: int, reached: bool
) -> None:
    mark = local.mark()

    def create(key: str, data: bytes) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(local.blobs, "create", create)
    with nullcontext() if reached else pytest.raises(OSError, match="Read-only"):
        assert parts.is_store(local.blobs, mark)

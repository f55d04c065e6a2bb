"""Damaged, truncated and foreign objects are refused with their names and found by `problems`, on every store."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save as save_safetensors

from tinkerflow.backend.core.errors import StoreError
from tinkerflow.backend.spec import checkpoint
from tinkerflow.backend.spec.commands import AdapterState
from tinkerflow.backend.store import RECOVERY, CheckpointMeta, Digest, Store, commit
from tinkerflow.backend.store.blobs import Blobs
from tinkerflow.backend.store.commit import seal

RUN = "sess-1:train:0"
FOLDER = f"runs/{RUN}/weights/x"
FILES = ["adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors"]
Make = Callable[..., AdapterState]
Change = Callable[[dict[str, Any]], dict[str, Any]]


def put(store: Store, key: str, data: bytes) -> Blobs:
    blobs = store.blobs
    blobs.remove(key)
    blobs.create(key, data)
    return blobs


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped", "foreign", "missing"])
def test_damaged_file_is_refused_with_its_name(
    store: Store, meta: CheckpointMeta, make_state: Make, file: str, damage: str
) -> None:
    saved = store.save(RUN, "weights", "x", make_state(1), meta)
    other = store.save(RUN, "weights", "y", make_state(2), dataclasses.replace(meta, base_model="also"))
    assert store.upkeep.problems(saved.path) == []
    key = f"{FOLDER}/{saved.attempt}/{file}"
    data = store.blobs.read(key)
    if damage == "missing":
        store.blobs.remove(key)
    else:
        foreign = store.blobs.read(f"runs/{RUN}/weights/y/{other.attempt}/{file}")
        assert len(foreign) == len(data)
        flipped = data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]
        put(store, key, {"truncated": data[:-1], "empty": b"", "flipped": flipped, "foreign": foreign}[damage])
    with pytest.raises(StoreError, match="weights/x") as caught:
        store.load(saved.path)
    assert (file if damage != "missing" else saved.attempt) in str(caught.value)
    with pytest.raises(StoreError, match="weights/x"):
        store.copy(saved.path, "copy-1:train:0", owner="me", expires_at=None, request_id="r")
    (problem,) = store.upkeep.problems(saved.path)
    assert saved.path in problem and file in problem
    assert store.upkeep.problems(other.path) == []


@pytest.mark.parametrize("damage", ["flipped", "truncated", "longer"])
def test_damaged_byte_ranges_are_not_returned(
    store: Store, meta: CheckpointMeta, make_state: Make, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (checkpoint, commit):
        monkeypatch.setattr(module, "BLOCK", 16)
    saved, file = store.export(RUN, "x", make_state(1), meta), "adapter_model.safetensors"
    key = f"runs/{RUN}/external_weights/x/{saved.attempt}/{file}"
    data = store.blobs.read(key)
    last = len(data) - 1
    for start in range(0, 50, 7):
        assert store.read_range(saved, file, start, 20) == data[start : start + 20]
    assert store.read_range(saved, file, last - 3, 100) == data[-4:]
    at = 40 if damage == "flipped" else last
    flipped = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    put(store, key, {"flipped": flipped, "truncated": data[:-1], "longer": data + b"more"}[damage])
    assert store.read_range(saved, file, 0, 32) == data[:32]
    with pytest.raises(StoreError, match=rf"block {at // 16} of adapter_model\.safetensors does not have the SHA-256"):
        store.read_range(saved, file, at, 1)
    if damage == "flipped":
        assert store.read_range(saved, file, 48, 16) == data[48:64]


def test_commit_with_too_few_block_hashes_is_damaged(store: Store, meta: CheckpointMeta, make_state: Make) -> None:
    saved = store.save(RUN, "weights", "x", make_state(1), meta)
    digest = {"size": 5 * 2**20, "sha256": "0" * 64, "blocks": ["0" * 64]}
    _recommit(store, lambda c: c | {"files": c["files"] | {"optimizer.safetensors": digest}})
    with pytest.raises(StoreError, match="5242880 bytes have 1 blocks of 4194304"):
        store.load(saved.path)


def test_damaged_recovery_snapshot_is_also_refused(store: Store, meta: CheckpointMeta, make_state: Make) -> None:
    saved = store.save(RUN, RECOVERY, "seq-3", make_state(1), meta)
    assert store.upkeep.paths() == [saved.path]
    key = f"runs/{RUN}/recovery/seq-3/{saved.attempt}/optimizer.safetensors"
    put(store, key, store.blobs.read(key)[:-4])
    with pytest.raises(StoreError, match=r"recovery/seq-3: optimizer\.safetensors has"):
        store.load(saved.path)
    assert len(store.upkeep.problems(saved.path)) == 1


def test_verification_lists_every_problem(store: Store, meta: CheckpointMeta, make_state: Make) -> None:
    saved = store.save(RUN, "weights", "x", make_state(1), meta)
    for file in FILES[:2]:
        put(store, f"{FOLDER}/{saved.attempt}/{file}", b"")
    put(store, f"{FOLDER}/{saved.attempt}/pytorch_model.bin", b"a pickle")
    assert [
        next(f for f in (*FILES, "pytorch_model.bin") if f in one) for one in store.upkeep.problems(saved.path)
    ] == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "pytorch_model.bin",
    ]


def test_uncommitted_checkpoint_has_no_problems(store: Store) -> None:
    put(store, f"{FOLDER}/attempt-1/adapter_config.json", b"half")
    assert store.upkeep.problems(f"tinker://{RUN}/weights/x") == []
    assert store.upkeep.problems(f"tinker://{RUN}/weights/never") == []


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "foreign"])
def test_a_damaged_commit_is_refused(store: Store, meta: CheckpointMeta, make_state: Make, damage: str) -> None:
    """Every character of a commit counts, because it contains the owner and the shape of the checkpoint."""
    saved = store.save(RUN, "weights", "x", make_state(1), meta)
    store.save("sess-2:train:0", "weights", "x", make_state(1), meta)
    key = f"{FOLDER}/commit.json"
    data = store.blobs.read(key)
    foreign = store.blobs.read("runs/sess-2:train:0/weights/x/commit.json")
    assert b'"owner": "local"' in data
    flipped = data.replace(b'"owner": "local"', b'"owner": "lokal"')
    put(store, key, {"truncated": data[:-20], "flipped": flipped, "empty": b"", "foreign": foreign}[damage])
    for refused in (store.load, store.find, store.exists):
        with pytest.raises(StoreError, match=r"sess-1:train:0/weights/x: .*commit\.json"):
            refused(saved.path)
    assert [one.run_id for one in store.checkpoints()] == ["sess-2:train:0"]
    assert len(store.upkeep.problems(saved.path)) == 1
    with pytest.raises(StoreError, match=r"commit\.json"):
        store.save(RUN, "weights", "x", make_state(2), meta, overwrite=True)
    assert store.delete(saved.path)
    assert store.save(RUN, "weights", "x", make_state(2), meta).step == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c | {"path": "tinker://other/weights/x"}, "belongs to 'tinker://other/weights/x'"),
        (lambda c: c | {"format": "tinkerflow-checkpoint-99"}, "has format 'tinkerflow-checkpoint-99'"),
        (lambda c: c | {"attempt": "../../other"}, "names attempt '../../other'"),
        (lambda c: c | {"files": c["files"] | {"../../../x": {"size": 1, "sha256": "", "blocks": [""]}}}, "../../../x"),
        (lambda c: c | {"files": {}}, "names attempt"),
        (lambda c: {k: v for k, v in c.items() if k != "step"}, "damaged"),
    ],
)
def test_foreign_commit_is_refused(
    store: Store,
    meta: CheckpointMeta,
    make_state: Make,
    change: Change,
    message: str,
) -> None:
    saved = store.save(RUN, "weights", "x", make_state(1), meta)
    _recommit(store, change)
    with pytest.raises(StoreError) as caught:
        store.load(saved.path)
    assert message in str(caught.value)
    assert saved.path in str(caught.value)


@pytest.mark.parametrize("data", [b"[]", b"{}", b"null", b"1", b"\xff", b'{"format": "tinkerflow-checkpoint-1"}'])
def test_json_that_is_not_a_commit_is_refused(store: Store, data: bytes) -> None:
    put(store, f"{FOLDER}/commit.json", data)
    with pytest.raises(StoreError, match=r"weights/x: commit\.json is damaged"):
        store.load(f"tinker://{RUN}/weights/x")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x80\x04N.", "is not a safetensors file"),
        (save_safetensors({"x": np.zeros(2, np.int32)}), "tensor 'x' is int32"),
    ],
    ids=["pickle", "integers"],
)
def test_file_of_another_kind_is_refused_even_if_its_commit_lists_it(
    store: Store, meta: CheckpointMeta, make_state: Make, data: bytes, message: str
) -> None:
    saved = store.save(RUN, "weights", "x", make_state(1), meta)
    put(store, f"{FOLDER}/{saved.attempt}/optimizer.safetensors", data)
    digest = dataclasses.asdict(Digest.of(data))
    _recommit(store, lambda c: c | {"files": c["files"] | {"optimizer.safetensors": digest}})
    with pytest.raises(StoreError, match=rf"weights/x: optimizer\.safetensors is .*{message.removeprefix('is ')}"):
        store.load(saved.path)


@pytest.mark.parametrize("fact", ["topology", "of_a_later_release"])
def test_a_commit_of_another_release_is_read(store: Store, meta: CheckpointMeta, make_state: Make, fact: str) -> None:
    saved = store.save(RUN, "weights", "x", make_state(1), meta)
    _recommit(store, lambda c: c | {"meta": c["meta"] | {fact: {"fsdp": 1, "tensor": 1}}})
    assert store.find(saved.path) == saved


def _recommit(store: Store, change: Change) -> None:
    key = f"{FOLDER}/commit.json"
    commit = json.loads(store.blobs.read(key))
    del commit["sha256"]
    put(store, key, seal(change(commit)))

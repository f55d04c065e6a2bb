"""Saving, loading, listing and deleting, the same on every kind of store."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import numpy as np
import pytest
from tests.manual_clock import ManualClock

from tinkerflow.backend.core.errors import ConflictError, NotFoundError, StoreError, UserError
from tinkerflow.backend.spec.commands import AdapterState, LoraSpec
from tinkerflow.backend.store import CheckpointMeta, Saved, Store
from tinkerflow.backend.store.blobs import Blobs

RUN = "sess-1:train:0"
Make = Callable[..., AdapterState]
Same = Callable[[AdapterState, AdapterState], None]


@pytest.mark.parametrize("optimizer", [True, False])
def test_a_state_comes_back_bit_for_bit(
    store: Store, meta: CheckpointMeta, make_state: Make, same: Same, optimizer: bool
) -> None:
    state = make_state(3, optimizer=optimizer)
    saved = store.save(RUN, "weights", "0001", state, meta)
    loaded, found = store.load(f"tinker://{RUN}/weights/0001")
    same(loaded, state)
    assert found == saved
    assert saved.path == f"tinker://{RUN}/weights/0001"
    assert ("optimizer.safetensors" in saved.files) == optimizer
    assert saved.size_bytes == sum(file.size for file in saved.files.values()) > 0


def test_weights_alone_are_loaded_even_when_the_moments_are_damaged(
    store: Store, meta: CheckpointMeta, make_state: Make, same: Same
) -> None:
    saved = store.save(RUN, "weights", "x", make_state(1), meta)
    assert _blobs(store).remove(f"runs/{RUN}/weights/x/{saved.attempt}/optimizer.safetensors")
    same(store.load(saved.path, optimizer=False)[0], make_state(1, optimizer=False))


def test_everything_of_the_meta_comes_back_from_another_store_object(
    url: str, clock: ManualClock, make_state: Make
) -> None:
    expires_at = datetime(2027, 1, 2, 3, 4, 5, 678, tzinfo=UTC)
    meta = CheckpointMeta("org/model", "key-1", {"a": "ä\n"}, expires_at, "req-1", 7, {"fsdp": 2, "tensor": 1})
    saved = Store.open(url, clock=clock).save(RUN, "weights", "x", make_state(), meta)
    assert saved.meta == meta
    assert saved.created_at == clock.now()
    assert Store.open(url).find(saved.path) == saved


def test_a_loaded_state_can_be_written_to(store: Store, meta: CheckpointMeta, make_state: Make) -> None:
    store.save(RUN, "weights", "x", make_state(), meta)
    loaded, _ = store.load(f"tinker://{RUN}/weights/x")
    for array in loaded.weights.values():
        array += 1


def test_existing_name_is_a_conflict_and_keeps_its_bytes(
    store: Store, meta: CheckpointMeta, make_state: Make, same: Same
) -> None:
    saved = store.save(RUN, "weights", "x", make_state(1), meta)
    with pytest.raises(ConflictError, match=r"/weights/x exists already; .*, or save with overwrite"):
        store.save(RUN, "weights", "x", make_state(2), meta)
    same(store.load(saved.path)[0], make_state(1))


def test_checkpoints_are_separate_by_kind_and_run(store: Store, meta: CheckpointMeta, make_state: Make) -> None:
    for run, kind in ((RUN, "weights"), (RUN, "sampler_weights"), ("sess-1:train:1", "weights")):
        store.save(run, kind, "x", make_state(), meta)
    assert len(store.checkpoints()) == 3
    assert {saved.kind for saved in store.checkpoints(RUN)} == {"weights", "sampler_weights"}


def test_the_same_request_saves_once(store: Store, meta: CheckpointMeta, make_state: Make) -> None:
    meta = dataclasses.replace(meta, request_id="req-1")
    first = store.save(RUN, "weights", "x", make_state(1), meta)
    assert store.save(RUN, "weights", "x", make_state(1), meta) == first
    assert store.save(RUN, "weights", "x", make_state(1), meta, overwrite=True) == first
    with pytest.raises(ConflictError):
        store.save(RUN, "weights", "x", make_state(1), dataclasses.replace(meta, request_id="req-2"))


def test_overwrite_replaces_state_and_metadata(
    store: Store, meta: CheckpointMeta, make_state: Make, same: Same
) -> None:
    old = store.save(RUN, "weights", "x", make_state(1), meta)
    new = store.save(RUN, "weights", "x", make_state(2), dataclasses.replace(meta, user_metadata={}), overwrite=True)
    loaded, found = store.load(old.path)
    same(loaded, make_state(2))
    assert found == new != old
    assert found.meta.user_metadata == {}
    assert store.checkpoints() == [new]


def test_overwrite_of_a_free_name_saves(store: Store, meta: CheckpointMeta, make_state: Make) -> None:
    saved = store.save(RUN, "weights", "x", make_state(1), meta, overwrite=True)
    assert store.exists(saved.path)


def test_overwrite_leaves_no_files_of_the_old_attempt(store: Store, meta: CheckpointMeta, make_state: Make) -> None:
    old = store.save(RUN, "weights", "x", make_state(1), meta)
    store.save(RUN, "weights", "x", make_state(2), meta, overwrite=True)
    assert _blobs(store).children(f"runs/{RUN}/weights/x/{old.attempt}") == []


def test_a_save_of_an_engine_that_lost_its_lease_replaces_no_later_save(
    url: str, store: Store, meta: CheckpointMeta, make_state: Make, same: Same, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (dataclasses.replace(meta, request_id=name) for name in ("first", "second"))
    store.save(RUN, "weights", "x", make_state(0), meta)
    stale, begun, taken_over = Store.open(url), threading.Event(), threading.Event()
    create = stale.blobs.create

    def slow(key: str, data: bytes) -> None:
        begun.set()
        assert taken_over.wait(60)
        create(key, data)

    monkeypatch.setattr(stale.blobs, "create", slow)
    with ThreadPoolExecutor(1) as thread:
        late = thread.submit(stale.save, RUN, "weights", "x", make_state(1), first, overwrite=True)
        assert begun.wait(60)
        store.save(RUN, "weights", "x", make_state(1), first, overwrite=True)
        last = store.save(RUN, "weights", "x", make_state(2), second, overwrite=True)
        taken_over.set()
        with pytest.raises(ConflictError, match="exists already"):
            late.result()
    loaded, found = store.load(last.path)
    assert found == last
    same(loaded, make_state(2))
    assert _blobs(store).children(f"runs/{RUN}/weights/x") == [last.attempt, "commit.json"]


def test_one_of_16_concurrent_saves_wins(store: Store, meta: CheckpointMeta, make_state: Make, same: Same) -> None:
    barrier = threading.Barrier(16)

    def save(i: int) -> Saved | ConflictError:
        barrier.wait()
        try:
            return store.save(RUN, "weights", "x", make_state(i), meta)
        except ConflictError as error:
            return error

    with ThreadPoolExecutor(16) as threads:
        results = list(threads.map(save, range(16)))
    winners = [(i, r) for i, r in enumerate(results) if isinstance(r, Saved)]
    assert len(winners) == 1
    loaded, found = store.load(f"tinker://{RUN}/weights/x")
    assert found == winners[0][1]
    same(loaded, make_state(winners[0][0]))
    assert _blobs(store).children(f"runs/{RUN}/weights/x") == [found.attempt, "commit.json"]


def test_readers_during_overwrites_see_one_complete_state(
    store: Store, meta: CheckpointMeta, make_state: Make, same: Same
) -> None:
    path = store.save(RUN, "weights", "x", make_state(0), meta).path
    done = threading.Event()

    def read() -> int:
        reads = 0
        while not done.is_set() or reads == 0:
            state, saved = store.load(path)
            same(state, make_state(saved.step))
            reads += 1
        return reads

    with ThreadPoolExecutor(2) as threads:
        readers = [threads.submit(read) for _ in range(2)]
        try:
            for i in range(1, 20):
                store.save(RUN, "weights", "x", make_state(i), meta, overwrite=True)
        finally:
            done.set()
        assert all(reader.result() > 0 for reader in readers)


def test_delete(store: Store, meta: CheckpointMeta, make_state: Make) -> None:
    saved = store.save(RUN, "weights", "x", make_state(1), meta)
    assert store.delete(saved.path)
    assert not store.delete(saved.path)
    assert not store.exists(saved.path)
    assert store.checkpoints() == []
    assert _blobs(store).children(f"runs/{RUN}/weights/x/{saved.attempt}") == []
    with pytest.raises(NotFoundError, match="weights/x: it is not in the store"):
        store.load(saved.path)
    assert store.save(RUN, "weights", "x", make_state(2), meta).step == 2


def test_checkpoints_are_listed_oldest_first(
    store: Store, clock: ManualClock, meta: CheckpointMeta, make_state: Make
) -> None:
    assert store.checkpoints() == store.checkpoints(RUN) == []
    saved = []
    for name in ("b", "a", "c"):
        saved.append(store.save(RUN, "weights", name, make_state(), meta))
        clock.advance(1)
    assert store.checkpoints() == saved


def test_damaged_commit_does_not_hide_other_checkpoints(
    store: Store, meta: CheckpointMeta, make_state: Make, caplog: pytest.LogCaptureFixture
) -> None:
    good = store.save(RUN, "weights", "good", make_state(), meta)
    bad = store.save(RUN, "weights", "bad", make_state(), meta)
    put(_blobs(store), f"runs/{RUN}/weights/bad/commit.json", b"{")
    put(_blobs(store), "runs/not a run/weights/x/commit.json", b"{}")
    assert store.checkpoints() == [good]
    assert bad.path in caplog.text


# ------------------------------------------------------------------ refused saves
@pytest.mark.parametrize(
    "run", ["", ".", "..", "a/b", "../a", "a/../..", "a\\b/", "a\0b", ":a", ".a", "ä", "a b", "a" * 201, "a\n"]
)
def test_hostile_run_ids_are_refused(store: Store, meta: CheckpointMeta, make_state: Make, run: str) -> None:
    with pytest.raises(UserError, match="run id"):
        store.save(run, "weights", "x", make_state(), meta)
    with pytest.raises(UserError, match="run id"):
        store.checkpoints(run)


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "../../x", "a:b", "a\0", "x" * 129, "x\n"])
def test_hostile_names_are_refused(store: Store, meta: CheckpointMeta, make_state: Make, name: str) -> None:
    with pytest.raises(UserError, match="checkpoint name"):
        store.save(RUN, "weights", name, make_state(), meta)


def test_unknown_kinds_are_refused(store: Store, meta: CheckpointMeta, make_state: Make) -> None:
    with pytest.raises(UserError, match="checkpoint kind 'external_weights': must be one of weights, sampler_weights"):
        store.save(RUN, "external_weights", "x", make_state(), meta)


def test_refused_save_leaves_no_files(store: Store, meta: CheckpointMeta, make_state: Make) -> None:
    state = make_state()
    wrong_dtype = {name: array.astype(np.float64) for name, array in state.weights.items()}
    with pytest.raises(StoreError, match=r"q_proj\.lora_A\.weight' is float64"):
        store.save(RUN, "weights", "x", state.copy_with(weights=wrong_dtype), meta)
    with pytest.raises(StoreError, match="PEFT's names"):
        store.save(
            RUN,
            "weights",
            "x",
            state.copy_with(weights={"q.lora_A.weight": np.zeros((1, 1), np.float32)}),
            meta,
        )
    assert _blobs(store).children("runs") == []


def _blobs(store: Store) -> Blobs:
    return store.blobs


def put(blobs: Blobs, key: str, data: bytes) -> None:
    blobs.remove(key)
    blobs.create(key, data)


def test_full_weights_are_in_a_separate_file(store: Store, meta: CheckpointMeta, make_state: Make, same: Same) -> None:
    state = make_state(3).copy_with(spec=LoraSpec(0))
    assert set(store.save(RUN, "weights", "w", state, meta).files) == {"model.safetensors", "optimizer.safetensors"}
    same(store.load(f"tinker://{RUN}/weights/w")[0], state)
    assert set(store.save(RUN, "recovery", "r", state, meta).files) == {"model.safetensors", "optimizer.safetensors"}
    assert list(store.export(RUN, "out", state, meta).files) == ["model.safetensors"]

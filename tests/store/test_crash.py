"""A crash, a full disk or a lost answer leaves the old checkpoint or the new one, never a part."""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tinkerflow.backend.core.clock import SystemClock
from tinkerflow.backend.core.errors import ConflictError, NotFoundError, StoreError
from tinkerflow.backend.spec.commands import AdapterState
from tinkerflow.backend.store import CheckpointMeta, Store
from tinkerflow.backend.store.blobs import Blobs, open_blobs

RUN = "sess-1:train:0"
PATH = f"tinker://{RUN}/weights/x"
Make = Callable[..., AdapterState]
Same = Callable[[AdapterState, AdapterState], None]
WRITES = 4  # three files and the commit


class Crash(BaseException):
    """The process is gone: nothing after this reaches the store."""


@dataclasses.dataclass
class FailingBlobs:
    """Blobs whose write number `failing` and all later writes fail with `error`.

    after: write number `failing` is still executed. recovers: reads and removals succeed after the failure.
    """

    blobs: Blobs
    failing: int
    error: BaseException
    after: bool = False
    recovers: bool = False
    writes: int = 0
    lock: Any = dataclasses.field(default_factory=threading.Lock)

    def create(self, key: str, data: bytes) -> None:
        if key.endswith("commit.json") and self.blobs.children(key.rsplit("/", 1)[0])[-1:] == ["commit.json"]:
            raise FileExistsError(key)  # refused: nothing is written
        self._write(lambda: self.blobs.create(key, data))

    def replace(self, key: str, old: bytes, new: bytes) -> bool:
        return self._write(lambda: self.blobs.replace(key, old, new))

    def _write(self, write: Callable[[], Any]) -> Any:
        with self.lock:  # the files of a save are written in parallel, and any of them may fail
            self.writes += 1
            number = self.writes
        if number < self.failing:
            return write()
        if self.after and number == self.failing:
            write()
        raise self.error

    def _alive(self) -> Blobs:
        if self.writes >= self.failing and not self.recovers:
            raise self.error
        return self.blobs

    def read(self, key: str) -> bytes:
        return self._alive().read(key)

    def size(self, key: str) -> int:
        return self._alive().size(key)

    def remove(self, key: str, old: bytes | None = None) -> bool:
        return self._alive().remove(key, old)

    def written_at(self, prefix: str) -> datetime | None:
        return self._alive().written_at(prefix)

    def remove_folder(self, prefix: str) -> None:
        self._alive().remove_folder(prefix)

    def children(self, prefix: str) -> list[str]:
        return self._alive().children(prefix)


def failing_store(
    url: str, failing: int, error: BaseException, *, after: bool = False, recovers: bool = False
) -> Store:
    return Store(url, FailingBlobs(open_blobs(url), failing, error, after, recovers), SystemClock())


@pytest.mark.parametrize("write", range(1, WRITES + 1))
@pytest.mark.parametrize("after", [False, True])
def test_a_crash_leaves_nothing_or_everything(
    url: str, store: Store, meta: CheckpointMeta, make_state: Make, same: Same, write: int, after: bool
) -> None:
    with pytest.raises(Crash):
        failing_store(url, write, Crash(), after=after).save(RUN, "weights", "x", make_state(1), meta)
    if after and write == WRITES:
        same(store.load(PATH)[0], make_state(1))
        return
    assert not store.exists(PATH)
    assert store.checkpoints() == []
    with pytest.raises(NotFoundError):
        store.load(PATH)
    store.save(RUN, "weights", "x", make_state(2), meta)
    same(store.load(PATH)[0], make_state(2))


@pytest.mark.parametrize("write", range(1, WRITES + 1))
@pytest.mark.parametrize("after", [False, True])
def test_a_crash_while_overwriting_leaves_the_old_or_the_new(
    url: str, store: Store, meta: CheckpointMeta, make_state: Make, same: Same, write: int, after: bool
) -> None:
    store.save(RUN, "weights", "x", make_state(1), meta)
    with pytest.raises(Crash):
        failing_store(url, write, Crash(), after=after).save(RUN, "weights", "x", make_state(2), meta, overwrite=True)
    same(store.load(PATH)[0], make_state(2 if after and write == WRITES else 1))


@pytest.mark.parametrize("write", range(1, WRITES + 1))
def test_a_full_disk_is_a_store_error_and_leaves_no_files(
    url: str, store: Store, meta: CheckpointMeta, make_state: Make, write: int
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(StoreError, match=r"cannot save tinker://sess-1:train:0/weights/x .*No space left"):
        failing_store(url, write, full, recovers=True).save(RUN, "weights", "x", make_state(), meta)
    blobs = open_blobs(url)
    folder = f"runs/{RUN}/weights/x"
    assert [file for attempt in blobs.children(folder) for file in blobs.children(f"{folder}/{attempt}")] == []


def test_lost_answer_to_a_commit_keeps_the_committed_checkpoint(
    url: str, store: Store, meta: CheckpointMeta, make_state: Make, same: Same
) -> None:
    lost = failing_store(url, WRITES, OSError("connection reset"), after=True, recovers=True)
    meta = dataclasses.replace(meta, request_id="req-1")
    with pytest.raises(StoreError, match="connection reset"):
        lost.save(RUN, "weights", "x", make_state(1), meta)
    same(store.load(PATH)[0], make_state(1))
    assert store.save(RUN, "weights", "x", make_state(1), meta) == store.find(PATH)
    with pytest.raises(ConflictError):
        store.save(RUN, "weights", "x", make_state(1), dataclasses.replace(meta, request_id="req-2"))


def test_long_store_outage_is_reported_with_its_first_failure(
    url: str, meta: CheckpointMeta, make_state: Make, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(StoreError, match=r"cannot save .*unreachable"):
        failing_store(url, 2, OSError("unreachable")).save(RUN, "weights", "x", make_state(), meta)
    assert "is left behind" in caplog.text


def test_kill_9_at_any_time_leaves_only_whole_checkpoints(tmp_path: Path) -> None:
    """A process that saves in a loop is killed. Every reported checkpoint exists, and every existing one loads."""
    url, child = f"file://{tmp_path}/store", _start_saver(f"file://{tmp_path}/store")
    try:
        assert child.stdout is not None
        said = [child.stdout.readline().strip()]
        time.sleep(0.3)
        os.kill(child.pid, signal.SIGKILL)
        said += [line.strip() for line in child.stdout if line.endswith("\n")]
    finally:
        child.kill()
        child.communicate()
    store = Store.open(url)
    found = {saved.path for saved in store.checkpoints()}
    assert set(said) <= found
    assert len(found) <= len(said) + 1
    for path in found:
        state, _ = store.load(path)
        assert float(state.weights["base_model.model.lm_head.lora_A.weight"][0, 0]) == state.step


def _start_saver(url: str) -> subprocess.Popen[str]:
    code = """
import sys, itertools, numpy as np
from tinkerflow.backend.spec.commands import AdapterState, LoraSpec
from tinkerflow.backend.store import CheckpointMeta, Store
store = Store.open(sys.argv[1])
for i in itertools.count():
    weights = {f"base_model.model.lm_head.lora_{m}.weight": np.full((64, 64), i, np.float32) for m in "AB"}
    state = AdapterState(LoraSpec(64, train_attn=False, train_mlp=False), i, weights)
    print(store.save("run", "weights", f"s{i}", state, CheckpointMeta("tiny", "local")).path, flush=True)
"""
    root = Path(__file__).parent.parent.parent
    return subprocess.Popen([sys.executable, "-c", code, url], stdout=subprocess.PIPE, text=True, cwd=root)

"""The guarantees of `Blobs`, for each implementation."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from tests.mounting import unmounted

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.store.blobs import Blobs, find, open_blobs
from tinkerflow.backend.store.local import LocalBlobs
from tinkerflow.backend.store.objects import ObjectBlobs
from tinkerflow.backend.store.parts import store_mark


@pytest.fixture
def blobs(url: str) -> Blobs:
    return open_blobs(url)


def test_create_read_size(blobs: Blobs) -> None:
    blobs.create("a/b:c/d", b"data")
    assert blobs.read("a/b:c/d") == b"data"
    assert blobs.size("a/b:c/d") == 4


def test_create_never_replaces(blobs: Blobs) -> None:
    blobs.create("a/x", b"one")
    with pytest.raises(FileExistsError):
        blobs.create("a/x", b"two")
    assert blobs.read("a/x") == b"one"


def test_replace_and_remove_require_the_current_content(blobs: Blobs) -> None:
    assert not blobs.replace("a/x", b"", b"new")
    blobs.create("a/x", b"one")
    assert blobs.replace("a/x", b"one", b"two!")
    assert not blobs.replace("a/x", b"one", b"three")
    assert not blobs.remove("a/x", b"one")
    assert blobs.read("a/x") == b"two!"
    assert blobs.remove("a/x", b"two!")
    assert not blobs.remove("a/x", b"two!")


def test_one_of_8_concurrent_replaces_succeeds(url: str) -> None:
    open_blobs(url).create("a/x", b"old")
    barrier = threading.Barrier(8)

    def replace(i: int) -> bool:
        blobs = open_blobs(url)
        barrier.wait()
        return blobs.replace("a/x", b"old", f"{i}".encode())

    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(replace, range(8)))
    assert made.count(True) == 1
    assert open_blobs(url).read("a/x") == f"{made.index(True)}".encode()


def test_when_something_was_written(blobs: Blobs) -> None:
    assert blobs.written_at("a") is None
    before = datetime.now(UTC) - timedelta(seconds=1)
    blobs.create("a/x", b"one")
    written = blobs.written_at("a")
    assert written is not None
    assert before <= written <= datetime.now(UTC) + timedelta(seconds=1)


def test_missing_blobs_raise_not_found_or_are_ignored(blobs: Blobs) -> None:
    for read in (blobs.read, blobs.size):
        with pytest.raises(FileNotFoundError):
            read("a/x")
    assert not blobs.remove("a/x")
    assert blobs.children("a") == []
    blobs.remove_folder("a")


def test_remove(blobs: Blobs) -> None:
    blobs.create("a/x", b"one")
    assert blobs.remove("a/x")
    assert not blobs.remove("a/x")
    blobs.create("a/x", b"two")


def test_remove_folder(blobs: Blobs) -> None:
    for name in ("x", "y"):
        blobs.create(f"a/b/{name}", b"")
    blobs.create("a/c", b"")
    blobs.remove_folder("a/b")
    assert blobs.children("a") == ["c"]


def test_children(blobs: Blobs) -> None:
    for key in ("a/2/x", "a/1/y", "a/3"):
        blobs.create(key, b"")
    assert blobs.children("a") == ["1", "2", "3"]
    assert blobs.children("a/3") == []


def test_one_of_16_concurrent_creates_succeeds(blobs: Blobs) -> None:
    for attempt in range(5):
        barrier = threading.Barrier(16)

        def create(i: int, key: str = f"a/{attempt}", barrier: threading.Barrier = barrier) -> bool:
            barrier.wait()
            try:
                blobs.create(key, f"{i}".encode())
            except FileExistsError:
                return False
            return True

        with ThreadPoolExecutor(16) as threads:
            made = list(threads.map(create, range(16)))
        assert made.count(True) == 1
        assert blobs.read(f"a/{attempt}") == f"{made.index(True)}".encode()


def test_local_drafts_are_hidden_and_failed_creates_leave_none(tmp_path: Path) -> None:
    blobs = LocalBlobs(tmp_path)
    blobs.create("a/x", b"one")
    (tmp_path / "a" / ".y.draft").write_bytes(b"half")
    assert blobs.children("a") == ["x"]
    with pytest.raises(FileExistsError):
        blobs.create("a/x", b"two")
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [".y.draft", "x"]


def test_local_folder_that_disappears_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = LocalBlobs(tmp_path)
    monkeypatch.setattr(Path, "is_dir", lambda path: True)  # as if another process removed it after this check
    assert blobs.children("a") == []
    assert blobs.written_at("a") is None
    assert blobs.clear_drafts("a", datetime.now(UTC)) == 0


@pytest.mark.parametrize("told", [True, False])
def test_an_unmounted_folder_is_neither_written_nor_taken_for_empty(tmp_path: Path, told: bool) -> None:
    url, key = f"file://{tmp_path / 'store'}", "runs/r/weights/x/commit.json"
    mark = store_mark(open_blobs(url))
    blobs = open_blobs(url)
    blobs.create(key, b"one")  # also reads the mark
    if told:
        blobs = open_blobs(url)
        blobs.expect(mark)
    calls: list[Callable[[], object]] = [
        lambda: blobs.create("new", b"two"),
        lambda: blobs.replace(key, b"one", b"two"),
        lambda: blobs.read(key),
        lambda: blobs.read_range(key, 0, 1),
        lambda: blobs.size(key),
        lambda: blobs.remove(key),
        lambda: blobs.remove(key, b"one"),
        lambda: blobs.remove_folder("runs/r/weights/x"),
        lambda: blobs.children("runs"),
        lambda: blobs.written_at("runs"),
        lambda: blobs.clear_drafts("runs", datetime.now(UTC)),
        lambda: store_mark(blobs),
    ]
    for another in (None, "store-of-another-service"):
        with unmounted(tmp_path / "store"):
            if another is not None:
                (tmp_path / "store" / "store-id").write_text(another)
            for call in calls:
                with pytest.raises(OSError, match=f"not the store: mount it .* write {mark} into store-id there"):
                    call()
            assert [path.name for path in (tmp_path / "store").iterdir()] == ([] if another is None else ["store-id"])
    assert blobs.read(key) == b"one"
    with unmounted(tmp_path / "store"):
        (tmp_path / "store" / "store-id").write_text(f"{mark}\n")  # emptied on purpose, with `echo`
        assert find(blobs, key) is None
        assert store_mark(blobs) == mark


class LossyFileSystem(MemoryFileSystem):
    """An object store on a bad line: a write succeeds, its response is lost, and the client's retry finds it stored."""

    cachable = False
    store: dict[str, Any] = {}  # noqa: RUF012  # its own, not the one that all MemoryFileSystems share
    pseudo_dirs = [""]  # noqa: RUF012

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: object) -> None:
        super().pipe_file(path, value, mode=mode)
        super().pipe_file(path, value, mode=mode)


def test_retried_create_with_equal_bytes_succeeds() -> None:
    blobs = ObjectBlobs(LossyFileSystem(), "bucket/", guard=nullcontext)
    blobs.create("a/x", b"nonce 1")
    assert blobs.read("a/x") == b"nonce 1"
    with pytest.raises(FileExistsError):
        blobs.create("a/x", b"nonce 2")


@pytest.mark.parametrize("url", ["unknown://bucket", "gs://", "file://relative", "relative", "", "file:/x"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(UserError, match="store "):
        open_blobs(url)


def test_a_plain_absolute_folder_is_a_store(tmp_path: Path) -> None:
    open_blobs(str(tmp_path / "s")).create("a", b"x")
    assert open_blobs(f"file://{tmp_path}/s").read("a") == b"x"


def test_local_create_on_a_full_disk_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    blobs, fsync = LocalBlobs(tmp_path), os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: full(fd) if stat.S_ISREG(os.fstat(fd).st_mode) else fsync(fd))
    with pytest.raises(OSError, match="No space left"):
        blobs.create("reach/probe", b"one")
    assert list(tmp_path.iterdir()) == []


def test_local_creates_beside_removals_never_miss_their_folder(tmp_path: Path) -> None:
    blobs = LocalBlobs(tmp_path)

    def create_and_remove(key: str) -> bool:
        blobs.create(key, b"")
        return blobs.remove(key)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(create_and_remove, [f"a/{i % 2}/{i}" for i in range(16)]))
    assert blobs.children("a") == []

"""Reading a store: which checkpoints there are, and their commits and files. Every byte that is read is verified."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator

from tinkerflow.backend.checkpoint_paths import KINDS, RUNS, CheckpointPath, is_run_id
from tinkerflow.backend.commands import BLOCK, Digest
from tinkerflow.backend.errors import NotFoundError, StoreError
from tinkerflow.backend.ids import is_name
from tinkerflow.backend.store import commit
from tinkerflow.backend.store.blobs import Blobs
from tinkerflow.backend.store.commit import Saved


def paths(blobs: Blobs, run_id: str | None = None, kinds: Collection[str] = KINDS) -> Iterator[CheckpointPath]:
    """The paths of a run, or of all runs, under which a save has begun. A save may have begun without a commit."""
    runs = filter(is_run_id, blobs.children(RUNS)) if run_id is None else [run_id]
    for run in runs:
        for kind in kinds:
            for name in filter(is_name, blobs.children(f"{RUNS}/{run}/{kind}")):
                yield CheckpointPath(run, kind, name)


def commit_bytes(blobs: Blobs, path: CheckpointPath) -> bytes | None:
    """The commit object of `path`, None when there is none."""
    try:
        return blobs.read(path.commit)
    except FileNotFoundError:
        return None


def commit_of(blobs: Blobs, path: CheckpointPath) -> Saved | None:
    """The checkpoint that is committed under `path`, or None.

    StoreError when the commit object is damaged, or belongs to another checkpoint.
    """
    data = commit_bytes(blobs, path)
    return None if data is None else commit.from_json(data, path)


def committed(blobs: Blobs, path: CheckpointPath) -> Saved:
    """The same as `commit_of`, but NotFoundError when there is no commit."""
    saved = commit_of(blobs, path)
    if saved is None:
        raise NotFoundError(f"checkpoint {path}: there is none in the store")
    return saved


def file_of(blobs: Blobs, path: CheckpointPath, saved: Saved, file: str) -> bytes:
    """The bytes of a file; FileNotFoundError when it is missing, StoreError when the bytes are not the saved ones."""
    data, digest = blobs.read(f"{path.attempt(saved.attempt)}/{file}"), saved.files[file]
    if len(data) != digest.size:
        raise StoreError(f"checkpoint {path}: {file} has {len(data)} bytes; {digest.size} were saved")
    if Digest.of(data) != digest:
        raise StoreError(f"checkpoint {path}: {file} does not have the SHA-256 {digest.sha256} that was saved")
    return data


def part_of(blobs: Blobs, folder: str, file: str, digest: Digest, start: int, length: int) -> bytes:
    """At most `length` bytes, from `start` on, of a file in `blobs`. Whole blocks are read and verified.

    folder: the key of the file's folder (`CheckpointPath.attempt`). file: its name. digest: what was saved. Errors are
    as in `file_of`.
    """
    first, end = start // BLOCK, min(start + length, digest.size)
    if start >= end:
        return b""
    last = (end - 1) // BLOCK
    data = blobs.part(f"{folder}/{file}", first * BLOCK, (last + 1 - first) * BLOCK)
    for block in range(first, last + 1):
        begin = (block - first) * BLOCK
        if hashlib.sha256(memoryview(data)[begin : begin + BLOCK]).hexdigest() != digest.blocks[block]:
            path = CheckpointPath.of_folder(folder)
            raise StoreError(f"checkpoint {path}: block {block} of {file} does not have the SHA-256 that was saved")
    return data[start - first * BLOCK : end - first * BLOCK]


def files_of(blobs: Blobs, path: CheckpointPath, wanted: Callable[[str], bool]) -> tuple[Saved, dict[str, bytes]]:
    """The commit of `path`, and those of its files that are `wanted`, all of the same save; errors as in `file_of`."""
    saved = committed(blobs, path)
    while True:
        try:
            return saved, {file: file_of(blobs, path, saved, file) for file in saved.files if wanted(file)}
        except FileNotFoundError as error:
            # The checkpoint may have been overwritten or deleted after its commit was read: then read again.
            before, saved = saved, committed(blobs, path)
            if saved.attempt == before.attempt:
                raise StoreError(f"checkpoint {path}: a file of attempt {saved.attempt} is missing") from error

"""Parts of states that worker processes write and read directly, with one safetensors file per process.

No process loads more of a state than it needs. The engine commits the parts with their names and digests.
"""

from __future__ import annotations

import errno
import json
import math
import secrets
import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np

from tinkerflow.backend.core.errors import NotFoundError, StoreAwayError, StoreError
from tinkerflow.backend.core.ids import new_id
from tinkerflow.backend.spec.checkpoint import BLOCK, CheckpointPath, Digest
from tinkerflow.backend.spec.commands import StoredState
from tinkerflow.backend.store import commit, peft
from tinkerflow.backend.store.blobs import Blobs, find
from tinkerflow.backend.store.local import MARK, mark_of
from tinkerflow.backend.store.peft import Floats

Shape = tuple[int, ...]
Wants = Callable[[Mapping[str, Shape]], Collection[str]]

PART = "part-{:05d}.safetensors"
_LENGTH = struct.Struct("<Q")
_THREADS = 4


@dataclass(frozen=True)
class _Stored:
    """The location of a tensor: its file, its first byte, and its end (exclusive)."""

    file: str
    shape: Shape
    begin: int
    end: int


def find_mark(blobs: Blobs) -> str | None:
    """The mark of a store; None if it has none yet."""
    return None if (found := find(blobs, MARK)) is None else mark_of(found)


def store_mark(blobs: Blobs) -> str:
    """The mark of a store, created if it has none yet. From then on, `blobs` fail if another folder is in its place."""
    while (mark := find_mark(blobs)) is None:
        with suppress(FileExistsError):
            blobs.create(MARK, new_id("store").encode())
    blobs.expect(mark)
    return mark


def is_store(blobs: Blobs, mark: str) -> bool:
    """Whether `blobs` are the store with that mark and can be written. OSError if the store cannot be reached.

    A full disk or an exhausted quota counts as writable, because there may be space again while the group serves.
    `blobs` then fail if another folder is in the store's place.
    """
    if find_mark(blobs) != mark:
        return False
    blobs.expect(mark)
    probe = f"reach/{secrets.token_hex(8)}"
    try:
        blobs.create(probe, mark.encode())
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        return True
    return blobs.remove(probe)


def write_part(blobs: Blobs, folder: str, rank: int, pieces: Mapping[str, Floats]) -> dict[str, Digest]:
    """Write the part of one process. Returns the file's name and digest; empty if the process has no shard."""
    if not pieces:
        return {}
    file, data = PART.format(rank), peft.encode(pieces)
    with _failures(f"write {folder}/{file}"):
        blobs.create(f"{folder}/{file}", data)
    return {file: Digest.of(data)}


def read_tensors(blobs: Blobs, state: StoredState, wants: Wants) -> dict[str, Floats]:
    """The requested tensors of a state by name. Every byte is verified.

    wants: returns the names to read, given the shapes of all tensors by name. NotFoundError: the state was deleted
    meanwhile. StoreError: names a damaged file. StoreAwayError: the store cannot be reached.
    """
    files = {file: digest for file, digest in state.files.items() if file.endswith(".safetensors")}

    def part(file: str, begin: int, end: int) -> bytes:
        with _failures(f"read {file} of checkpoint {CheckpointPath.of_folder(state.folder)}"):
            return commit.read_range(blobs, state.folder, file, files[file], begin, end - begin)

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="store") as threads:
        found: dict[str, _Stored] = {}
        for listed in threads.map(lambda file: _listed(file, files[file].size, part), files):
            found |= listed
        names = wants({name: stored.shape for name, stored in found.items()})
        runs = list(_runs([(name, found[name]) for name in names]))
        data = threads.map(lambda run: part(run[0][1].file, run[0][1].begin, run[-1][1].end), runs)
        return {
            name: np.frombuffer(raw, np.float32, math.prod(one.shape), one.begin - run[0][1].begin).reshape(one.shape)
            for run, raw in zip(runs, data, strict=True)
            for name, one in run
        }


def _listed(file: str, size: int, part: Callable[[str, int, int], bytes]) -> dict[str, _Stored]:
    """The tensors of a safetensors file, from its JSON header. Offsets count from the end of the header."""
    try:
        first = part(file, 0, min(size, BLOCK))
        (length,) = _LENGTH.unpack_from(first)
        start = _LENGTH.size + length
        text = first if start <= len(first) else part(file, 0, min(size, start))
        header = json.loads(text[_LENGTH.size : start])
        header.pop("__metadata__", None)
        stored = {
            name: _Stored(file, tuple(entry["shape"]), *(start + offset for offset in entry["data_offsets"]))
            for name, entry in header.items()
        }
        wrong = [name for name, entry in header.items() if entry["dtype"] != "F32"]
        if wrong or any(one.end - one.begin != 4 * math.prod(one.shape) or one.end > size for one in stored.values()):
            raise ValueError(f"tensors {wrong[:1] or ''} are not float32, or lie beyond its end")
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise StoreError(f"{file} is not a safetensors file of a state ({error})") from error
    return stored


def _runs(wanted: list[tuple[str, _Stored]]) -> Iterator[list[tuple[str, _Stored]]]:
    """Group neighboring tensors that are read together, at most about 16 blocks per group."""
    run: list[tuple[str, _Stored]] = []
    for name, one in sorted(wanted, key=lambda item: (item[1].file, item[1].begin)):
        last = run[-1][1] if run else None
        if last and (last.file != one.file or one.begin - last.end > BLOCK or one.end - run[0][1].begin > 16 * BLOCK):
            yield run
            run = []
        run.append((name, one))
    if run:
        yield run


@contextmanager
def _failures(doing: str) -> Iterator[None]:
    """Raise OSErrors as StoreAwayErrors, and a missing file (of a deleted state) as NotFoundError."""
    try:
        yield
    except FileNotFoundError as error:
        raise NotFoundError(f"cannot {doing}: it no longer exists ({error})") from error
    except OSError as error:
        raise StoreAwayError(f"cannot {doing} ({error})") from error

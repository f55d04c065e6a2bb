"""The work folder, where pipelines store data between runs, at any URL of `backend/store` (file, gs, memory).

    data/<digest>.jsonl           rows that passed their check
    quarantine/<digest>.jsonl     rows that failed it, each with its error
    tokens/<key>.npz              rows as tokens
    progress/<run>/plan           digest of everything that decides a training run's outcome; `parameters`: the values
    progress/<run>/segments/<n>   the finished segments of a training run
    progress/<run>/kept/<name>    measurements before its first step, and the report of rated answers
    rollouts/<training run>/<n>   the rollouts of a step, for people (backend/catalog/rollouts.py)
    evaluations/<run>/<n>         the rewarded answers of an evaluation of the run's weights, also for people
    champions/<name>/<n>.json     the champions of a name, one after another (backend/catalog/champions.py)

Objects are written once and never change. A second write of the same content does nothing. Only rollouts of old steps
are removed.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from tinkerflow.backend.store.blobs import Blobs


@cache
def open_work(url: str) -> Blobs:
    """Open the work folder at `url`. Each process has a single object per URL."""
    from tinkerflow.backend.store.blobs import open_blobs  # imported here, because parameter checks need no store

    return open_blobs(url)


def read_json(work: Blobs, key: str) -> Any | None:
    """The value that was written as `key`, or None."""
    try:
        return orjson.loads(work.read(key))
    except FileNotFoundError:
        return None


def create_json(work: Blobs, key: str, value: object) -> None:
    """Write a value as a new object. FileExistsError: the object exists with different content."""
    data = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    try:
        work.create(key, data)
    except FileExistsError:
        if work.read(key) != data:
            raise


def create_once(work: Blobs, key: str, data: bytes) -> None:
    """Write an object unless it exists. The key must imply the content."""
    with suppress(FileExistsError):
        work.create(key, data)


def digest(*parts: bytes | str) -> str:
    """A name for content, 32 hex digits: equal for equal parts."""
    hashed = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        hashed.update(len(data).to_bytes(8, "little") + data)
    return hashed.hexdigest()[:32]

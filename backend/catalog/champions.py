"""Champions: the best weights so far under a name, stored by pipelines in their work folder.

    champions/<name>/<n>.json     the n-th champion of a name

A new champion is a new entry, so the history is kept. `tasks/pipelines/champions.py` writes the entries.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.store.blobs import Blobs

_FOLDER = "champions"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def champion_names(work: Blobs) -> list[str]:
    """The names with champions, sorted. Folders whose names no champion can have are left out."""
    return [name for name in work.children(_FOLDER) if _NAME.fullmatch(name)]


def champion_key(name: str, number: int) -> str:
    """The key of the champion of `name` with this number."""
    return f"{_folder(name)}/{number:08d}.json"


def newest_champion(work: Blobs, name: str) -> dict[str, Any] | None:
    """The newest champion of `name` as written, or None."""
    folder = _folder(name)
    numbers = sorted(work.children(folder))
    return None if not numbers else dict(orjson.loads(work.read(f"{folder}/{numbers[-1]}")))


def champion_history(work: Blobs, name: str) -> list[dict[str, Any]]:
    """All champions of `name` as written, oldest first."""
    folder = _folder(name)
    return [dict(orjson.loads(work.read(f"{folder}/{number}"))) for number in sorted(work.children(folder))]


def checked_name(field: str, value: str) -> str:
    """The name `value` as part of a key. UserError: it could lead to another folder."""
    if not _NAME.fullmatch(value):
        raise UserError(f"{field} {value!r}: must be 1 to 128 of A-Z a-z 0-9 . _ - and begin with a letter or digit")
    return value


def _folder(name: str) -> str:
    return f"{_FOLDER}/{checked_name('champion', name)}"

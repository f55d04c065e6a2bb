"""Where rows come from: files and folders behind any fsspec URL, read one row at a time.

A file ends in .jsonl or .ndjson (also compressed: .gz, .bz2, .xz, .zst), .parquet or .arrow. A folder contains such
files at any depth, or was written by `save_to_disk` of `datasets`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import fsspec
from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs

from tinkerflow.backend.core.errors import UserError
from tinkerflow.tasks.pipelines.rated import SCHEME, rated_rows
from tinkerflow.tasks.pipelines.rows import RowError

_LINES = (".jsonl", ".ndjson")
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_BATCH = 1024  # rows of a Parquet file in memory at a time


@dataclass(frozen=True)
class RawRow:
    """A row as it was read. where: `file:line` for people; lines and rows count from 1."""

    where: str
    value: object


def read_rows(url: str, split: str, kind: str) -> Iterator[RawRow | tuple[RawRow, RowError]]:
    """All rows behind `url`, in the order of the files' names; a line that is not JSON comes with its error.

    split: in a folder, read only files and folders that are named for it (`train`, `train-00000-of-00001.parquet`); ""
    = all. kind: the schema that rows are made for, where they are made (`journal://`, rated.py).
    Raises UserError when there is nothing to read.
    """
    if url.startswith(SCHEME):
        for number, row in enumerate(rated_rows(url, kind), 1):
            yield RawRow(f"feedback:{number}", row)
        return
    filesystem, path = url_to_fs(url)
    if not filesystem.exists(path):
        raise UserError(f"data.url {url!r}: does not exist")
    files = [path] if filesystem.isfile(path) else _files(filesystem, path, split)
    if not files:
        named = f" of the split {split!r}" if split else ""
        raise UserError(f"data.url {url!r}: holds no .jsonl, .parquet or .arrow file{named}")
    for file in files:
        yield from _read(filesystem, file)


def _files(filesystem: AbstractFileSystem, folder: str, split: str) -> list[str]:
    saved = _saved_to_disk(filesystem, folder, split)
    if saved is not None:
        return saved
    found = [path for path in sorted(filesystem.find(folder)) if _kind(path)]
    if not split:
        return found
    below = [(path, path[len(folder) :].strip("/").split("/")) for path in found]
    return [path for path, parts in below if any(_named_for(part, split) for part in parts)]


def _named_for(part: str, split: str) -> bool:
    return part == split or part.startswith((f"{split}-", f"{split}.", f"{split}_"))


def _saved_to_disk(filesystem: AbstractFileSystem, folder: str, split: str) -> list[str] | None:
    """The Arrow files of a folder by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`; None for other folders."""
    if filesystem.exists(f"{folder}/dataset_dict.json"):
        splits = json.loads(filesystem.cat_file(f"{folder}/dataset_dict.json"))["splits"]
        if split not in splits and not (split == "" and len(splits) == 1):
            raise UserError(f"data.split {split!r}: must be one of {', '.join(splits)}")
        return _saved_to_disk(filesystem, f"{folder}/{split or splits[0]}", "")
    if not filesystem.exists(f"{folder}/state.json"):
        return None
    state = json.loads(filesystem.cat_file(f"{folder}/state.json"))
    return [f"{folder}/{file['filename']}" for file in state["_data_files"]]


def _kind(path: str) -> str:
    """The kind of a file: `lines`, `parquet`, `arrow`; empty for a file that we do not read."""
    name = PurePosixPath(path)
    ending = PurePosixPath(name.stem).suffix if name.suffix in _COMPRESSED else name.suffix
    return "lines" if ending in _LINES else {".parquet": "parquet", ".arrow": "arrow"}.get(name.suffix, "")


def _read(filesystem: AbstractFileSystem, path: str) -> Iterator[RawRow | tuple[RawRow, RowError]]:
    name = PurePosixPath(path).name
    match _kind(path):
        case "lines":
            yield from _lines(filesystem, path, name)
        case "parquet" | "arrow" as kind:
            for number, row in enumerate(_table(filesystem, path, kind), 1):
                yield RawRow(f"{name}:{number}", row)
        case _:
            raise UserError(f"data.url: {name}: must end in .jsonl, .ndjson (also compressed), .parquet or .arrow")


def _lines(filesystem: AbstractFileSystem, path: str, name: str) -> Iterator[RawRow | tuple[RawRow, RowError]]:
    compression = fsspec.utils.infer_compression(path)
    with filesystem.open(path, "rb", compression=compression) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{name}:{number}"
            try:
                yield RawRow(where, json.loads(line))
            except ValueError as error:  # also when the bytes are not UTF-8
                text = line.decode(errors="replace").rstrip("\n")
                yield RawRow(where, text), RowError("line", text, f"must be JSON ({error})")


def _table(filesystem: AbstractFileSystem, path: str, kind: str) -> Iterator[dict[str, Any]]:
    import pyarrow as pa  # here: the import takes half a second, which readers of lines need not wait
    import pyarrow.parquet as pq

    with filesystem.open(path, "rb") as file:
        batches = pq.ParquetFile(file).iter_batches(_BATCH) if kind == "parquet" else pa.ipc.open_stream(file)
        for batch in batches:
            yield from batch.to_pylist()

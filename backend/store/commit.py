"""Verified reads, and the format of the commit object, which lists a checkpoint's files with sizes and hashes."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, fields
from datetime import datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tinkerflow.backend.core.encryption import SUFFIX
from tinkerflow.backend.core.errors import NotFoundError, StoreError
from tinkerflow.backend.core.ids import is_name
from tinkerflow.backend.spec.checkpoint import (
    BLOCK,
    EXTERNAL_WEIGHTS,
    KINDS,
    RECOVERY,
    RUNS,
    CheckpointMeta,
    CheckpointPath,
    Digest,
    Saved,
    is_checkpoint_name,
    is_run_id,
)
from tinkerflow.backend.spec.optimizers import OPTIMIZERS
from tinkerflow.backend.spec.ranks import LoraSpec
from tinkerflow.backend.store.blobs import Blobs, find
from tinkerflow.backend.store.peft import ADAPTER, ADAPTER_CONFIG

FORMAT = "tinkerflow-checkpoint-1"
OPTIMIZER = "optimizer.safetensors"
MODEL = "model.safetensors"  # full-parameter weights under Hugging Face's names
_FACTS = {fact.name for fact in fields(CheckpointMeta)}
PIECES = re.compile(r"part-\d{5}\.safetensors")  # of a recovery snapshot that the worker processes wrote


def to_json(saved: Saved) -> bytes:
    """The commit object as JSON. It also records, for people, the versions of the programs that wrote it."""
    meta = {
        **vars(saved.meta),
        "user_metadata": dict(saved.meta.user_metadata),
        "expires_at": saved.meta.expires_at and saved.meta.expires_at.isoformat(),
        "run_metadata": dict(saved.meta.run_metadata),
    }
    commit = {
        "format": FORMAT,
        "path": saved.path,
        "attempt": saved.attempt,
        "spec": asdict(saved.spec),
        "step": saved.step,
        "optimizer": saved.optimizer,
        "created_at": saved.created_at.isoformat(),
        "meta": meta,
        "files": {name: asdict(digest) for name, digest in saved.files.items()},
        "versions": _versions(),
    }
    return seal(commit)


def seal(commit: Mapping[str, object]) -> bytes:
    """The bytes of a commit object: its JSON, with the SHA-256 of all its other fields."""
    sealed = {**commit, "sha256": _sha256(commit)}
    return (json.dumps(sealed, indent=2, sort_keys=True) + "\n").encode()


def from_json(data: bytes, path: CheckpointPath) -> Saved:
    """Parse the commit object of `path`. StoreError: it is damaged, foreign, or in another format."""
    try:
        commit: dict[str, Any] = json.loads(data)
        if commit["format"] != FORMAT:
            raise StoreError(
                f"checkpoint {path}: commit.json has format {commit['format']!r}; this release reads {FORMAT!r}"
            )
        if commit["path"] != str(path):
            raise StoreError(f"checkpoint {path}: its commit.json belongs to {commit['path']!r}")
        if commit.pop("sha256") != _sha256(commit):
            raise StoreError(f"checkpoint {path}: commit.json does not have the SHA-256 that it was saved with")
        # Unknown facts are left out: an earlier release wrote a topology, and later releases may add some.
        meta = {key: value for key, value in commit["meta"].items() if key in _FACTS}
        expires_at = meta["expires_at"]
        saved = Saved(
            path=str(path),
            run_id=path.run_id,
            kind=path.kind,
            name=path.name,
            attempt=str(commit["attempt"]),
            spec=LoraSpec(**commit["spec"]),
            step=int(commit["step"]),
            created_at=datetime.fromisoformat(commit["created_at"]),
            meta=CheckpointMeta(**{**meta, "expires_at": expires_at and datetime.fromisoformat(expires_at)}),
            files={
                name: Digest(**{**digest, "blocks": tuple(digest["blocks"])})
                for name, digest in commit["files"].items()
            },
            optimizer=_optimizer(commit["optimizer"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"checkpoint {path}: commit.json is damaged ({type(error).__name__}: {error})") from error
    # Files are read by the names in the commit, so these names are checked like the names in a request.
    if not is_name(saved.attempt) or not _are_files_of(saved.kind, set(saved.files)):
        raise StoreError(
            f"checkpoint {path}: commit.json names attempt {saved.attempt!r} and files {sorted(saved.files)}"
        )
    return saved


def _sha256(commit: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(commit, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _are_files_of(kind: str, names: set[str]) -> bool:
    plain = {MODEL} if names & {MODEL, MODEL + SUFFIX} else {ADAPTER, ADAPTER_CONFIG}
    if kind == EXTERNAL_WEIGHTS:
        return names in (plain, {name + SUFFIX for name in plain})
    if kind == RECOVERY and all(PIECES.fullmatch(name) for name in names):
        return bool(names)
    return plain <= names <= plain | {OPTIMIZER}


def _optimizer(name: object) -> str:
    if not isinstance(name, str) or name not in OPTIMIZERS:
        raise ValueError(f"optimizer {name!r} is unknown")
    return name


@cache
def _versions() -> Mapping[str, str]:
    return {package: _version(package) for package in ("tinkerflow", "numpy", "safetensors")}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"  # run from a checkout


# ------------------------------------------------------------------ reading
def paths(blobs: Blobs, run_id: str | None = None, kinds: Collection[str] = KINDS) -> Iterator[CheckpointPath]:
    """The paths of a run, or of all runs, at which a save has begun, whether or not it was committed."""
    runs = filter(is_run_id, blobs.children(RUNS)) if run_id is None else [run_id]
    for run in runs:
        for kind in kinds:
            for name in blobs.children(f"{RUNS}/{run}/{kind}"):
                if is_checkpoint_name(kind, name):
                    yield CheckpointPath(run, kind, name)


def find_commit(blobs: Blobs, path: CheckpointPath) -> Saved | None:
    """The checkpoint committed at `path`, or None.

    StoreError: the commit object is damaged, or belongs to another checkpoint.
    """
    data = find(blobs, path.commit)
    return None if data is None else from_json(data, path)


def get_commit(blobs: Blobs, path: CheckpointPath) -> Saved:
    """Like `find_commit`, but raises NotFoundError if there is no commit."""
    saved = find_commit(blobs, path)
    if saved is None:
        raise NotFoundError(f"checkpoint {path}: it is not in the store")
    return saved


def read_file(blobs: Blobs, path: CheckpointPath, saved: Saved, file: str) -> bytes:
    """The bytes of a file. FileNotFoundError: the file is missing. StoreError: the bytes are not the saved bytes."""
    data, digest = blobs.read(f"{path.attempt(saved.attempt)}/{file}"), saved.files[file]
    if len(data) != digest.size:
        raise StoreError(f"checkpoint {path}: {file} has {len(data)} bytes; {digest.size} were saved")
    if Digest.of(data) != digest:
        raise StoreError(f"checkpoint {path}: {file} does not have the SHA-256 {digest.sha256} that was saved")
    return data


def read_range(blobs: Blobs, folder: str, file: str, digest: Digest, start: int, length: int) -> bytes:
    """At most `length` bytes, from `start` on, of a file in `blobs`. Whole blocks are read and verified.

    folder: the key of the file's folder (`CheckpointPath.attempt`). file: its name. digest: from the commit. Errors as
    in `read_file`.
    """
    first, end = start // BLOCK, min(start + length, digest.size)
    if start >= end:
        return b""
    last = (end - 1) // BLOCK
    data = blobs.read_range(f"{folder}/{file}", first * BLOCK, (last + 1 - first) * BLOCK)
    for block in range(first, last + 1):
        begin = (block - first) * BLOCK
        if hashlib.sha256(memoryview(data)[begin : begin + BLOCK]).hexdigest() != digest.blocks[block]:
            path = CheckpointPath.of_folder(folder)
            raise StoreError(f"checkpoint {path}: block {block} of {file} does not have the SHA-256 that was saved")
    return data[start - first * BLOCK : end - first * BLOCK]


def read_files(blobs: Blobs, path: CheckpointPath, wanted: Callable[[str], bool]) -> tuple[Saved, dict[str, bytes]]:
    """The commit of `path` and its `wanted` files, all of the same save. Errors as in `read_file`."""
    saved = get_commit(blobs, path)
    while True:
        try:
            return saved, {file: read_file(blobs, path, saved, file) for file in saved.files if wanted(file)}
        except FileNotFoundError as error:
            # Read again, in case the checkpoint was overwritten or deleted after its commit was read.
            before, saved = saved, get_commit(blobs, path)
            if saved.attempt == before.attempt:
                raise StoreError(f"checkpoint {path}: a file of attempt {saved.attempt} is missing") from error

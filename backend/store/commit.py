"""The commit object: what a checkpoint is, and the size and hash of each of its files."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tinkerflow.backend.checkpoint_paths import EXTERNAL_WEIGHTS, RECOVERY, CheckpointPath
from tinkerflow.backend.commands import Digest, LoraSpec, Optimizer
from tinkerflow.backend.encryption import SUFFIX
from tinkerflow.backend.errors import StoreError
from tinkerflow.backend.ids import is_name
from tinkerflow.backend.spec.optimizers import DEFAULT_OPTIMIZER, OPTIMIZERS
from tinkerflow.backend.store.peft import ADAPTER, ADAPTER_CONFIG

FORMAT = "tinkerflow-checkpoint-1"
OPTIMIZER = "optimizer.safetensors"
FILES = (ADAPTER, ADAPTER_CONFIG, OPTIMIZER)
PIECES = re.compile(r"part-\d{5}\.safetensors")  # of a recovery snapshot that the worker processes wrote


@dataclass(frozen=True)
class CheckpointMeta:
    """Facts about a checkpoint that are saved beside its state.

    request_id: the request that asked for the save; repeating a save with the same id gives the same checkpoint.
    expires_at: with a time zone, or None for never. generation: of the worker group. run_metadata: the metadata of the
    training run. `Store.amend` changes public and expires_at after the save.
    """

    base_model: str
    owner: str
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    expires_at: datetime | None = None
    request_id: str = ""
    generation: int = 0
    run_metadata: Mapping[str, str] = field(default_factory=dict)
    public: bool = False


@dataclass(frozen=True)
class Saved:
    """A committed checkpoint, with everything that its database row holds: rows can be rebuilt from commits."""

    path: str
    run_id: str
    kind: str
    name: str
    attempt: str
    spec: LoraSpec
    step: int
    created_at: datetime
    meta: CheckpointMeta
    files: Mapping[str, Digest]
    optimizer: Optimizer = DEFAULT_OPTIMIZER

    @property
    def size_bytes(self) -> int:
        """The size of all files together."""
        return sum(digest.size for digest in self.files.values())


def to_json(saved: Saved) -> bytes:
    """The commit object as JSON. It also records the versions of the programs that wrote it, for people to read."""
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
    """The commit object of `path`; StoreError when it is damaged, has another format, or names another checkpoint."""
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
        # earlier versions wrote a topology, which nothing read
        meta = {key: value for key, value in commit["meta"].items() if key != "topology"}
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
    # Files are read by the names in the commit, so these are checked like the names in a request.
    if not is_name(saved.attempt) or not _are_files_of(saved.kind, set(saved.files)):
        raise StoreError(
            f"checkpoint {path}: commit.json names attempt {saved.attempt!r} and files {sorted(saved.files)}"
        )
    return saved


def _sha256(commit: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(commit, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _are_files_of(kind: str, names: set[str]) -> bool:
    plain = {ADAPTER, ADAPTER_CONFIG}
    if kind == EXTERNAL_WEIGHTS:
        return names in (plain, {name + SUFFIX for name in plain})
    if kind == RECOVERY and all(PIECES.fullmatch(name) for name in names):
        return bool(names)
    return plain <= names <= set(FILES)


def _optimizer(name: object) -> Optimizer:
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

"""Checkpoints: saved atomically, and verified byte by byte when they are read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import datetime
from typing import Self

from tinkerflow.backend.core.clock import Clock, SystemClock
from tinkerflow.backend.core.encryption import encrypt
from tinkerflow.backend.core.errors import NotFoundError, StoreError, UserError
from tinkerflow.backend.core.ids import new_id
from tinkerflow.backend.spec.checkpoint import (
    EXTERNAL_WEIGHTS,
    SAMPLER_WEIGHTS,
    WEIGHTS,
    CheckpointMeta,
    CheckpointPath,
    Digest,
    Saved,
    check_run_id,
)
from tinkerflow.backend.spec.commands import AdapterKept, AdapterState, StoredState
from tinkerflow.backend.store import commit, parts, peft
from tinkerflow.backend.store.blobs import Blobs, find, open_blobs
from tinkerflow.backend.store.commit import MODEL, OPTIMIZER
from tinkerflow.backend.store.commit_writer import CommitWriter
from tinkerflow.backend.store.failures import store_errors
from tinkerflow.backend.store.history import HistoryStore
from tinkerflow.backend.store.peft import ADAPTER, ADAPTER_CONFIG, Floats, adapter_config
from tinkerflow.backend.store.upkeep import StoreUpkeep
from tinkerflow.backend.store.uploaded_files import UploadedFiles

_log = logging.getLogger(__name__)


class Store:
    """The checkpoints under one URL. All methods block, and may be called from any thread and from many processes.

    A checkpoint exists if its commit object exists. The commit is written last, so an earlier crash leaves none.

    uploads: files of uploads and images. histories: requests of training runs. upkeep: finds damage and leftovers.
    """

    def __init__(self, url: str, blobs: Blobs, clock: Clock) -> None:
        """A store over `blobs`. url: identifies it in messages. Callers use `open`."""
        self.url = url
        self.blobs = blobs
        self.uploads = UploadedFiles(url, blobs)
        self.histories = HistoryStore(url, blobs)
        self.upkeep = StoreUpkeep(url, blobs)
        self._writer = CommitWriter(url, blobs)
        self._clock = clock

    @classmethod
    def open(cls, url: str, *, clock: Clock | None = None) -> Self:
        """The store at `file:///folder`, `gs://bucket/prefix` or `memory://name`. UserError: any other URL."""
        return cls(url, open_blobs(url), clock or SystemClock())

    def save(
        self, run_id: str, kind: str, name: str, state: AdapterState, meta: CheckpointMeta, *, overwrite: bool = False
    ) -> Saved:
        """Save `state` and the facts `meta` as `tinker://run_id/kind/name`. kind: `weights` or `sampler_weights`.

        ConflictError: the name is taken, and `overwrite` is False; or another save took the name during this one. A
        repetition with the same `meta.request_id` returns the checkpoint that the request saved. UserError: the name is
        malformed. StoreError: the store fails.
        """
        path = CheckpointPath(run_id, str(kind), name)
        if path.kind == EXTERNAL_WEIGHTS:
            raise UserError(f"checkpoint kind {kind!r}: must be one of {WEIGHTS}, {SAMPLER_WEIGHTS}")
        return self._save(path, state, meta, lambda: _files(state, meta), overwrite)

    def export(
        self,
        run_id: str,
        name: str,
        state: AdapterState,
        meta: CheckpointMeta,
        *,
        recipients: Sequence[str] = (),
        overwrite: bool = False,
    ) -> Saved:
        """Save the weights of `state` as `tinker://run_id/external_weights/name`, a PEFT folder for downloads.

        If all parameters are trained, the folder contains the model's weights under Hugging Face's names.
        With age `recipients`, each file is encrypted to them, and `.age` is added to its name. For `meta`, `overwrite`,
        repetition and errors see `save`.
        """
        path = CheckpointPath(run_id, EXTERNAL_WEIGHTS, name)
        plain = state.copy_with(moments={})

        def files() -> dict[str, bytes]:
            made = _files(plain, meta)
            return encrypt(made, recipients) if recipients else made

        return self._save(path, state, meta, files, overwrite)

    def copy(self, source: str, run_id: str, *, owner: str, expires_at: datetime | None, request_id: str) -> Saved:
        """Copy the checkpoint `source` into the run `run_id` of `owner`, with the same kind and name.

        expires_at: when the copy expires; None: never. Every file is verified. For errors see `load`, for repetition
        with the same `request_id` see `save`.
        """
        where = CheckpointPath.parse(source)
        with self._errors(f"copy {where}"):
            saved, files = commit.read_files(self.blobs, where, lambda file: True)
        meta = replace(
            saved.meta, owner=owner, expires_at=expires_at, request_id=request_id, run_metadata={}, public=False
        )
        path = CheckpointPath(run_id, where.kind, where.name)
        return self._save(path, saved, meta, lambda: files, overwrite=False)

    def _save(
        self,
        path: CheckpointPath,
        state: AdapterState | Saved,
        meta: CheckpointMeta,
        make_files: Callable[[], dict[str, bytes]],
        overwrite: bool,
    ) -> Saved:
        def make() -> tuple[Saved, dict[str, bytes]]:
            files = make_files()
            digests = {file: Digest.of(data) for file, data in files.items()}
            return self._new_commit(path, new_id("attempt"), state, meta, digests), files

        with self._errors(f"save {path}"):
            return self._writer.save(path, meta, make, overwrite=overwrite)

    def _new_commit(
        self,
        path: CheckpointPath,
        attempt: str,
        state: AdapterState | AdapterKept | Saved,
        meta: CheckpointMeta,
        files: Mapping[str, Digest],
    ) -> Saved:
        """A commit with the current time. attempt: the files' attempt. state: gives the shape, steps and optimizer."""
        return Saved(
            path=str(path),
            run_id=path.run_id,
            kind=path.kind,
            name=path.name,
            attempt=attempt,
            spec=state.spec,
            step=state.step,
            created_at=self._clock.now(),
            meta=meta,
            files=files,
            optimizer=state.optimizer,
        )

    def load(self, path: str, *, optimizer: bool = True) -> tuple[AdapterState, Saved]:
        """The state saved at `path`, and its commit. Without `optimizer`, moments are neither read nor returned.

        NotFoundError: there is no checkpoint. UserError: the path is malformed. StoreError: names the damaged file.
        """
        where = CheckpointPath.parse(path)
        if where.kind == EXTERNAL_WEIGHTS:
            raise UserError(f"checkpoint {where}: external weights are for downloads; load what save_state saved")
        with self._errors(f"load {where}"):
            saved, files = commit.read_files(self.blobs, where, lambda file: optimizer or file != OPTIMIZER)
        weights_file = MODEL if saved.spec.full else ADAPTER
        if weights_file not in files:
            pieces = {name: array for file in files for name, array in _decoded(where, file, files).items()}
            return AdapterState(saved.spec, saved.step, pieces, {}, saved.optimizer), saved
        weights = _decoded(where, weights_file, files)
        moments = _decoded(where, OPTIMIZER, files) if OPTIMIZER in files else {}
        return AdapterState(saved.spec, saved.step, weights, moments, saved.optimizer), saved

    def stored(self, path: str, *, optimizer: bool = True) -> tuple[StoredState, Saved]:
        """The location and shape of a state, for processes that read it themselves. Errors as in `load`."""
        where = CheckpointPath.parse(path)
        with self._errors(f"look up {where}"):
            saved = commit.get_commit(self.blobs, where)
        files = {file: digest for file, digest in saved.files.items() if optimizer or file != OPTIMIZER}
        return StoredState(saved.spec, saved.step, saved.optimizer, where.attempt(saved.attempt), files), saved

    def mark(self) -> str:
        """A unique text in this store. Hosts that read the same text at the same URL use the same objects."""
        with self._errors("read its mark"):
            return parts.store_mark(self.blobs)

    def find_mark(self) -> str | None:
        """The store's mark; None if `mark` was never called, or if another folder is in the store's place."""
        with self._errors("read its mark"):
            return parts.find_mark(self.blobs)

    def new_folder(self, run_id: str, kind: str, name: str) -> str:
        """The key of a new folder, into which processes write their parts of a state for `commit_parts`."""
        return CheckpointPath(run_id, kind, name).attempt(new_id("attempt"))

    def commit_parts(self, folder: str, kept: AdapterKept, meta: CheckpointMeta, files: Mapping[str, Digest]) -> Saved:
        """Commit the parts that processes wrote into `folder`. StoreError: a file has the wrong size.

        folder: from `new_folder`. kept: the state's shape. meta: see CheckpointMeta. files: digests by file.
        """
        path = CheckpointPath.of_folder(folder)
        saved = self._new_commit(path, folder.rpartition("/")[2], kept, meta, files)
        with self._errors(f"save {path}"):
            return self._writer.commit_files(path, saved)

    def discard(self, folder: str) -> None:
        """Remove files that were written for an abandoned commit."""
        self._writer.remove_leftovers(folder)

    def find(self, path: str) -> Saved | None:
        """The commit of `path`, or None. UserError: the path is malformed."""
        where = CheckpointPath.parse(path)
        with self._errors(f"look up {where}"):
            return commit.find_commit(self.blobs, where)

    def exists(self, path: str) -> bool:
        """Whether a checkpoint is saved at `path`."""
        return self.find(path) is not None

    def read_range(self, saved: Saved, file: str, start: int, length: int) -> bytes:
        """At most `length` bytes, from `start` on, of a file that the commit `saved` names.

        Whole blocks (commit.BLOCK) around these bytes are read and verified. NotFoundError: the checkpoint was deleted
        or overwritten meanwhile. StoreError: names the damaged file.
        """
        where = CheckpointPath.parse(saved.path)
        with self._errors(f"read {file} of {where}"):
            try:
                return commit.read_range(
                    self.blobs, where.attempt(saved.attempt), file, saved.files[file], start, length
                )
            except FileNotFoundError as error:
                raise NotFoundError(
                    f"checkpoint {where}: {file} of attempt {saved.attempt} no longer exists"
                ) from error

    def signed_url(self, path: str, attempt: str, file: str, seconds: int) -> str | None:
        """A URL that lets anyone read the file for `seconds`; None if this kind of store has no such URLs."""
        where = CheckpointPath.parse(path)
        with self._errors(f"sign {file} of {where}"):
            return self.blobs.signed_url(f"{where.attempt(attempt)}/{file}", seconds)

    def amend(self, path: str, attempt: str, *, public: bool, expires_at: datetime | None) -> bool:
        """Change `public` and `expires_at` in the commit of `path`. False: it is missing, damaged or foreign."""
        where = CheckpointPath.parse(path)
        with self._errors(f"amend {where}"):
            while (data := find(self.blobs, where.commit)) is not None:
                try:
                    saved = commit.from_json(data, where)
                except StoreError as error:
                    _log.warning("not amended: %s", error)
                    return False
                if saved.attempt != attempt:
                    return False
                now = commit.to_json(replace(saved, meta=replace(saved.meta, public=public, expires_at=expires_at)))
                if now == data or self._writer.replace_commit(where, data, now):
                    return True
            return False

    def delete(self, path: str, attempt: str = "") -> bool:
        """Remove a checkpoint, its commit first. Returns whether there was one.

        With `attempt`, remove only this attempt, not a later overwrite. Repeating the call after a crash finishes the
        deletion. A damaged commit is removed together with its files.
        """
        where = CheckpointPath.parse(path)
        with self._errors(f"delete {where}"):
            return self._writer.delete(where, attempt)

    def checkpoints(self, run_id: str | None = None) -> list[Saved]:
        """All checkpoints of a run, or of all runs, oldest first, read from the commits.

        Damaged commits are logged and left out, so that they do not hide the others. UserError: a malformed run id.
        """
        if run_id is not None:
            check_run_id(run_id)
        with self._errors("list checkpoints"):
            found = []
            for path in commit.paths(self.blobs, run_id):
                try:
                    saved = commit.find_commit(self.blobs, path)
                except StoreError as error:
                    _log.warning("left out of the list: %s", error)
                else:
                    found += [] if saved is None else [saved]
            return sorted(found, key=lambda saved: (saved.created_at, saved.path))

    def _errors(self, action: str) -> AbstractContextManager[None]:
        return store_errors(self.url, action)


def _files(state: AdapterState, meta: CheckpointMeta) -> dict[str, bytes]:
    if state.spec.full:
        files = {MODEL: peft.encode(state.weights)}
    else:
        files = {
            ADAPTER: peft.encode(state.weights),
            ADAPTER_CONFIG: adapter_config(meta.base_model, state.spec, state.weights),
        }
    return files | ({OPTIMIZER: peft.encode(state.moments)} if state.moments else {})


def _decoded(path: CheckpointPath, file: str, files: Mapping[str, bytes]) -> dict[str, Floats]:
    try:
        return peft.decode(files[file])
    except StoreError as error:
        raise StoreError(f"checkpoint {path}: {file} is {error}") from error

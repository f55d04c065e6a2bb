"""Checkpoints: saved whole or not at all, and read back only when every byte is as it was."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from typing import Self

from backend.clock import Clock, SystemClock
from backend.commands import AdapterState, LoraSpec, Optimizer
from backend.errors import ConflictError, NotFoundError, StoreError, UserError
from backend.ids import is_name, new_id
from backend.store import commit, tensors
from backend.store.blobs import Blobs, open_blobs
from backend.store.commit import OPTIMIZER, CheckpointMeta, Digest, Saved
from backend.store.encryption import encrypt
from backend.store.paths import (
    EXTERNAL_WEIGHTS,
    KINDS,
    RUNS,
    SAMPLER_WEIGHTS,
    WEIGHTS,
    CheckpointPath,
    check_run_id,
    is_run_id,
)
from backend.store.peft import ADAPTER, ADAPTER_CONFIG, adapter_config

_log = logging.getLogger(__name__)


class Store:
    """The checkpoints under one URL. All methods block, and may be called from any thread and from many processes.

    A checkpoint is its commit object. It is written last, so a crash before leaves nothing that can be seen.
    """

    def __init__(self, url: str, blobs: Blobs, clock: Clock) -> None:
        """Checkpoints kept in `blobs`; `url` is for messages. Use `open`."""
        self.url = url
        self._blobs = blobs
        self._clock = clock

    @classmethod
    def open(cls, url: str, *, clock: Clock | None = None) -> Self:
        """The store at `file:///folder`, `gs://bucket/prefix` or `memory://name`; UserError for other URLs."""
        return cls(url, open_blobs(url), clock or SystemClock())

    def save(
        self, run_id: str, kind: str, name: str, state: AdapterState, meta: CheckpointMeta, *, overwrite: bool = False
    ) -> Saved:
        """Save `state` as `tinker://run_id/kind/name`; kind is `weights` or `sampler_weights`.

        ConflictError when the name is taken, unless `overwrite`. Repeated with the same `meta.request_id`, it returns
        what that request saved. UserError for a name that may not be; StoreError when the store fails.
        """
        path = CheckpointPath(run_id, str(kind), name)
        if path.kind == EXTERNAL_WEIGHTS:
            raise UserError(f"checkpoint kind {kind!r}: must be one of {WEIGHTS}, {SAMPLER_WEIGHTS}")
        return self._save(path, state.spec, state.step, state.optimizer, meta, lambda: _files(state, meta), overwrite)

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
        """Save the weights of `state` as `tinker://run_id/external_weights/name`, to be downloaded and used elsewhere.

        A PEFT folder; with age `recipients` each of its files is encrypted to them, and its name ends with `.age`.
        Names, repetition and errors as in `save`.
        """
        path = CheckpointPath(run_id, EXTERNAL_WEIGHTS, name)
        plain = replace(state, moments={})

        def files() -> dict[str, bytes]:
            made = _files(plain, meta)
            return encrypt(made, recipients) if recipients else made

        return self._save(path, state.spec, state.step, state.optimizer, meta, files, overwrite)

    def copy(self, source: str, run_id: str, *, owner: str, expires_at: datetime | None, request_id: str) -> Saved:
        """Copy all files of a checkpoint to one of the same kind and name in `run_id`, which belongs to `owner`.

        Every file is checked on the way. Errors as in `load`; names and repetition as in `save`.
        """
        where = CheckpointPath.parse(source)
        with self._failures(f"copy {where}"):
            saved, files = self._files_of(where, lambda file: True)
        meta = replace(saved.meta, owner=owner, expires_at=expires_at, request_id=request_id)
        path = CheckpointPath(run_id, where.kind, where.name)
        return self._save(path, saved.spec, saved.step, saved.optimizer, meta, lambda: files, overwrite=False)

    def _save(
        self,
        path: CheckpointPath,
        spec: LoraSpec,
        step: int,
        optimizer: Optimizer,
        meta: CheckpointMeta,
        make_files: Callable[[], dict[str, bytes]],
        overwrite: bool,
    ) -> Saved:
        with self._failures(f"save {path}"):
            before = self._commit(path)
            if before is not None and (_same_request(before, meta) or not overwrite):
                return _same_or_conflict(before, meta)
            files = make_files()
            saved = Saved(
                path=str(path),
                run_id=path.run_id,
                kind=path.kind,
                name=path.name,
                attempt=new_id("attempt"),
                spec=spec,
                step=step,
                created_at=self._clock.now(),
                meta=meta,
                files={file: Digest.of(data) for file, data in files.items()},
                optimizer=optimizer,
            )
            try:
                self._write(path, saved, files)
                return self._publish(path, saved, overwrite=overwrite)
            except BaseException:
                self._discard_unless_committed(path, saved)
                raise

    def load(self, path: str, *, optimizer: bool = True) -> tuple[AdapterState, Saved]:
        """The state saved under `path`, and its commit; without `optimizer` its moments are neither read nor returned.

        NotFoundError when there is none; UserError for a malformed path; StoreError names the file that is damaged.
        """
        where = CheckpointPath.parse(path)
        if where.kind == EXTERNAL_WEIGHTS:
            raise UserError(f"checkpoint {where}: external weights are for downloads; load what save_state saved")
        with self._failures(f"load {where}"):
            saved, files = self._files_of(where, lambda file: optimizer or file != OPTIMIZER)
            try:
                weights = tensors.decode(files[ADAPTER])
                moments = tensors.decode(files[OPTIMIZER]) if OPTIMIZER in files else {}
            except StoreError as error:
                raise StoreError(f"checkpoint {where}: {error}") from error
        return AdapterState(saved.spec, saved.step, weights, moments, saved.optimizer), saved

    def find(self, path: str) -> Saved | None:
        """The commit of `path`, or None; UserError for a malformed path."""
        where = CheckpointPath.parse(path)
        with self._failures(f"look up {where}"):
            return self._commit(where)

    def exists(self, path: str) -> bool:
        """Whether something is saved under `path`."""
        return self.find(path) is not None

    def part(self, path: str, attempt: str, file: str, start: int, length: int) -> bytes:
        """At most `length` bytes from `start` on of a file that the commit of `path` names; not verified.

        NotFoundError when the checkpoint was deleted or saved anew meanwhile.
        """
        where = CheckpointPath.parse(path)
        with self._failures(f"read {file} of {where}"):
            try:
                return self._blobs.part(f"{where.attempt(attempt)}/{file}", start, length)
            except FileNotFoundError as error:
                raise NotFoundError(f"checkpoint {where}: {file} of attempt {attempt} is there no longer") from error

    def signed_url(self, path: str, attempt: str, file: str, seconds: int) -> str | None:
        """A URL of the file system's own by which anybody can read the file for so long; None where it has none."""
        where = CheckpointPath.parse(path)
        with self._failures(f"sign {file} of {where}"):
            return self._blobs.signed_url(f"{where.attempt(attempt)}/{file}", seconds)

    def delete(self, path: str, attempt: str = "") -> bool:
        """Remove a checkpoint, the commit first; whether there was one.

        With `attempt` only if it is that one, and not saved anew under its path. Repeated after a crash it finishes
        the work; a commit that is damaged goes with its files.
        """
        where = CheckpointPath.parse(path)
        with self._failures(f"delete {where}"):
            data = self._commit_bytes(where)
            try:
                saved = None if data is None else commit.from_json(data, where)
            except StoreError as error:
                _log.warning("deleted although it cannot be read: %s", error)
                ours = True
            else:
                ours = saved is not None and attempt in ("", saved.attempt)
                attempt = attempt or (saved.attempt if saved is not None else "")
            # Only the commit that we looked at: another process may have saved anew under this path since.
            found = ours and self._blobs.remove(where.commit, data)
            if attempt and (found or not ours):
                self._blobs.remove_folder(where.attempt(attempt))
            return found

    def checkpoints(self, run_id: str | None = None) -> list[Saved]:
        """All checkpoints of a run, or of all runs, oldest first; read from the commits.

        A damaged commit is logged and left out, so that it does not hide the others. UserError for a malformed run id.
        """
        with self._failures("list checkpoints"):
            runs = filter(is_run_id, self._blobs.children(RUNS)) if run_id is None else [check_run_id(run_id)]
            found = []
            for run in runs:
                for kind in KINDS:
                    for name in filter(is_name, self._blobs.children(f"{RUNS}/{run}/{kind}")):
                        found += self._listed(CheckpointPath(run, kind, name))
            return sorted(found, key=lambda saved: (saved.created_at, saved.path))

    def _listed(self, path: CheckpointPath) -> list[Saved]:
        try:
            saved = self._commit(path)
        except StoreError as error:
            _log.warning("left out of the list: %s", error)
            return []
        return [] if saved is None else [saved]

    def _write(self, path: CheckpointPath, saved: Saved, files: dict[str, bytes]) -> None:
        """Write all files at once, then see that each is there whole."""
        keys = {file: f"{path.attempt(saved.attempt)}/{file}" for file in files}
        with ThreadPoolExecutor(len(files), thread_name_prefix="store") as threads:
            for written in [threads.submit(self._blobs.create, keys[file], data) for file, data in files.items()]:
                written.result()
        for file, data in files.items():
            size = self._blobs.size(keys[file])
            if size != len(data):
                raise StoreError(f"checkpoint {path}: {file} has {size} bytes after writing {len(data)}")

    def _publish(self, path: CheckpointPath, saved: Saved, *, overwrite: bool) -> Saved:
        """Write the commit; with `overwrite` over what is there by now, so the last of many who overwrite stays."""
        data = commit.to_json(saved)
        while True:
            try:
                self._blobs.create(path.commit, data)
                return saved
            except FileExistsError:
                there = self._commit_bytes(path)
            if there is None:
                continue  # deleted since
            before = commit.from_json(there, path)
            if not overwrite or _same_request(before, saved.meta):
                self._tidy(path.attempt(saved.attempt))
                return _same_or_conflict(before, saved.meta)
            if self._blobs.replace(path.commit, there, data):
                self._tidy(path.attempt(before.attempt))
                return saved

    def _discard_unless_committed(self, path: CheckpointPath, saved: Saved) -> None:
        """After a failure: it may have come after the commit, and then the files are needed."""
        try:
            now = self._commit(path)
        except (OSError, StoreError) as error:
            _log.warning("attempt %s of %s is left behind: %s", saved.attempt, path, error)
            return
        if now is None or now.attempt != saved.attempt:
            self._tidy(path.attempt(saved.attempt))

    def _tidy(self, prefix: str) -> None:
        """Remove files that no commit names. They cost space and nothing else, so failing here fails nobody."""
        try:
            self._blobs.remove_folder(prefix)
        except OSError as error:
            _log.warning("store %s: %s is left behind: %s", self.url, prefix, error)

    def _commit(self, path: CheckpointPath) -> Saved | None:
        data = self._commit_bytes(path)
        return None if data is None else commit.from_json(data, path)

    def _commit_bytes(self, path: CheckpointPath) -> bytes | None:
        try:
            return self._blobs.read(path.commit)
        except FileNotFoundError:
            return None

    def _files_of(self, path: CheckpointPath, wanted: Callable[[str], bool]) -> tuple[Saved, dict[str, bytes]]:
        saved = self._found(path)
        while True:
            try:
                return saved, {file: self._read(path, saved, file) for file in saved.files if wanted(file)}
            except FileNotFoundError as error:
                # An overwrite or a deletion may have passed between the commit and its files: then look again.
                before, saved = saved, self._found(path)
                if saved.attempt == before.attempt:
                    raise StoreError(f"checkpoint {path}: a file of attempt {saved.attempt} is missing") from error

    def _found(self, path: CheckpointPath) -> Saved:
        saved = self._commit(path)
        if saved is None:
            raise NotFoundError(f"checkpoint {path}: there is none in store {self.url}")
        return saved

    def _read(self, path: CheckpointPath, saved: Saved, file: str) -> bytes:
        data, digest = self._blobs.read(f"{path.attempt(saved.attempt)}/{file}"), saved.files[file]
        if len(data) != digest.size:
            raise StoreError(f"checkpoint {path}: {file} has {len(data)} bytes; {digest.size} were saved")
        if Digest.of(data) != digest:
            raise StoreError(f"checkpoint {path}: {file} does not have the SHA-256 {digest.sha256} that was saved")
        return data

    @contextmanager
    def _failures(self, doing: str) -> Iterator[None]:
        """What goes wrong with files becomes a StoreError that says what was being done."""
        try:
            yield
        except OSError as error:
            raise StoreError(f"store {self.url}: cannot {doing} ({error})") from error


def _files(state: AdapterState, meta: CheckpointMeta) -> dict[str, bytes]:
    files = {
        ADAPTER: tensors.encode(state.weights),
        ADAPTER_CONFIG: adapter_config(meta.base_model, state.spec, state.weights),
    }
    return files | ({OPTIMIZER: tensors.encode(state.moments)} if state.moments else {})


def _same_request(saved: Saved, meta: CheckpointMeta) -> bool:
    return meta.request_id != "" and saved.meta.request_id == meta.request_id


def _same_or_conflict(saved: Saved, meta: CheckpointMeta) -> Saved:
    if _same_request(saved, meta):
        return saved
    raise ConflictError(f"checkpoint {saved.path} exists already; choose another name, or save with overwrite")

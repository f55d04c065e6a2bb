"""Checkpoints: saved whole or not at all, and verified byte by byte when they are read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from typing import Self

from tinkerflow.backend.core.clock import Clock, SystemClock
from tinkerflow.backend.core.encryption import encrypt
from tinkerflow.backend.core.errors import ConflictError, NotFoundError, StoreAwayError, StoreError, UserError
from tinkerflow.backend.core.ids import new_id
from tinkerflow.backend.spec.checkpoint import (
    EXTERNAL_WEIGHTS,
    SAMPLER_WEIGHTS,
    UPLOADS,
    WEIGHTS,
    CheckpointMeta,
    CheckpointPath,
    Digest,
    Saved,
    check_run_id,
)
from tinkerflow.backend.spec.commands import AdapterKept, AdapterState, StoredState
from tinkerflow.backend.store import commit, parts, peft, upkeep
from tinkerflow.backend.store.blobs import Blobs, open_blobs
from tinkerflow.backend.store.commit import MODEL, OPTIMIZER
from tinkerflow.backend.store.peft import ADAPTER, ADAPTER_CONFIG, Floats, adapter_config
from tinkerflow.backend.store.upkeep import Orphan, Snapshot

_log = logging.getLogger(__name__)


class Store:
    """The checkpoints under one URL. All methods block, and may be called from any thread and from many processes.

    A checkpoint exists when its commit object does. That is written last, so a crash before it leaves no checkpoint.
    """

    def __init__(self, url: str, blobs: Blobs, clock: Clock) -> None:
        """A store over `blobs`; `url` is for messages. Callers use `open`."""
        self.url = url
        self.blobs = blobs
        self._clock = clock

    @classmethod
    def open(cls, url: str, *, clock: Clock | None = None) -> Self:
        """The store at `file:///folder`, `gs://bucket/prefix` or `memory://name`; UserError for other URLs."""
        return cls(url, open_blobs(url), clock or SystemClock())

    def save(
        self, run_id: str, kind: str, name: str, state: AdapterState, meta: CheckpointMeta, *, overwrite: bool = False
    ) -> Saved:
        """Save `state` and the facts `meta` as `tinker://run_id/kind/name`; kind is `weights` or `sampler_weights`.

        ConflictError when the name is taken, unless `overwrite`. A repetition with the same `meta.request_id` returns
        the checkpoint that the request saved. UserError for a malformed name; StoreError when the store fails.
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

        Of a model of which all parameters are trained it has their file, by Hugging Face's names.
        With age `recipients`, each file is encrypted to them, under its name with `.age`. What `meta` and `overwrite`
        are, repetition and errors are as in `save`.
        """
        path = CheckpointPath(run_id, EXTERNAL_WEIGHTS, name)
        plain = state.copy_with(moments={})

        def files() -> dict[str, bytes]:
            made = _files(plain, meta)
            return encrypt(made, recipients) if recipients else made

        return self._save(path, state, meta, files, overwrite)

    def copy(self, source: str, run_id: str, *, owner: str, expires_at: datetime | None, request_id: str) -> Saved:
        """Copy all files of the checkpoint `source` to one of the same kind and name in `run_id`, which is `owner`'s.

        expires_at: of the copy, None: never. Every file is verified. Errors are as in `load`; repetition with the same
        `request_id` is as in `save`.
        """
        where = CheckpointPath.parse(source)
        with self._failures(f"copy {where}"):
            saved, files = commit.files_of(self.blobs, where, lambda file: True)
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
        with self._failures(f"save {path}"):
            before = commit.find(self.blobs, path)
            if before is not None and (_same_request(before, meta) or not overwrite):
                return _same_or_conflict(before, meta)
            files = make_files()
            digests = {file: Digest.of(data) for file, data in files.items()}
            saved = self._saved(path, new_id("attempt"), state, meta, digests)
            try:
                self._write(path, saved, files)
                return self._publish(path, saved, overwrite=overwrite)
            except BaseException:
                self._discard_unless_committed(path, saved)
                raise

    def _saved(
        self,
        path: CheckpointPath,
        attempt: str,
        state: AdapterState | AdapterKept | Saved,
        meta: CheckpointMeta,
        files: Mapping[str, Digest],
    ) -> Saved:
        """A commit as of now. attempt: whose files they are. state: what has its shape, steps and optimizer."""
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
        """The state saved under `path`, and its commit. Without `optimizer`, moments are neither read nor returned.

        NotFoundError when there is no checkpoint; UserError for a malformed path; StoreError names the damaged file.
        """
        where = CheckpointPath.parse(path)
        if where.kind == EXTERNAL_WEIGHTS:
            raise UserError(f"checkpoint {where}: external weights are for downloads; load what save_state saved")
        with self._failures(f"load {where}"):
            saved, files = commit.files_of(self.blobs, where, lambda file: optimizer or file != OPTIMIZER)
        weights_file = MODEL if saved.spec.full else ADAPTER
        if weights_file not in files:
            pieces = {name: array for file in files for name, array in _decoded(where, file, files).items()}
            return AdapterState(saved.spec, saved.step, pieces, {}, saved.optimizer), saved
        weights = _decoded(where, weights_file, files)
        moments = _decoded(where, OPTIMIZER, files) if OPTIMIZER in files else {}
        return AdapterState(saved.spec, saved.step, weights, moments, saved.optimizer), saved

    def stored(self, path: str, *, optimizer: bool = True) -> tuple[StoredState, Saved]:
        """The same as `load`, for processes that read the state themselves."""
        where = CheckpointPath.parse(path)
        with self._failures(f"look up {where}"):
            saved = commit.get(self.blobs, where)
        files = {file: digest for file, digest in saved.files.items() if optimizer or file != OPTIMIZER}
        return StoredState(saved.spec, saved.step, saved.optimizer, where.attempt(saved.attempt), files), saved

    def mark(self) -> str:
        """A text that no other store has: who reads the same text under the same URL reaches the same objects."""
        with self._failures("read its mark"):
            while True:
                try:
                    return self.blobs.read(parts.MARK).decode()
                except FileNotFoundError:
                    with suppress(FileExistsError):
                        self.blobs.create(parts.MARK, new_id("store").encode())

    def new_folder(self, run_id: str, kind: str, name: str) -> str:
        """The key of a folder into which processes write their parts of a state, for `commit_parts`."""
        return CheckpointPath(run_id, kind, name).attempt(new_id("attempt"))

    def commit_parts(self, folder: str, kept: AdapterKept, meta: CheckpointMeta, files: Mapping[str, Digest]) -> Saved:
        """Commit what processes have written into `folder`; StoreError when a file is not there as it was written.

        folder: of `new_folder`. kept: the state's shape. meta: see CheckpointMeta. files: digests, by file.
        """
        path = CheckpointPath.of_folder(folder)
        saved = self._saved(path, folder.rpartition("/")[2], kept, meta, files)
        with self._failures(f"save {path}"):
            try:
                for file, digest in files.items():
                    self._check_size(path, f"{folder}/{file}", digest.size)
                return self._publish(path, saved, overwrite=False)
            except BaseException:
                self._discard_unless_committed(path, saved)
                raise

    def discard(self, folder: str) -> None:
        """Remove what was written for a commit that does not come."""
        self._tidy(folder)

    def write_piece(self, upload_id: str, name: str, number: int, data: bytes) -> None:
        """Keep a piece of a file that is uploaded. name: of the pieces of one attempt to send it."""
        with self._failures(f"write a piece of upload {upload_id}"):
            self.blobs.create(f"{UPLOADS}/{upload_id}/{name}.{number:05d}", data)

    def pieces(self, upload_id: str, name: str, count: int) -> bytes:
        """The file in so many pieces; NotFoundError when one is gone."""
        with self._failures(f"read upload {upload_id}"):
            try:
                return b"".join(self.blobs.read(f"{UPLOADS}/{upload_id}/{name}.{n:05d}") for n in range(count))
            except FileNotFoundError as error:
                raise NotFoundError(
                    f"upload {upload_id!r}: its files are there no longer; begin another one"
                ) from error

    def remove_pieces(self, upload_id: str, name: str = "") -> None:
        """Remove the pieces of one attempt to send a file; without a name, those of the whole upload."""
        folder = f"{UPLOADS}/{upload_id}"
        with self._failures(f"remove upload {upload_id}"):
            if not name:
                self.blobs.remove_folder(folder)
            for piece in self.blobs.children(folder) if name else ():
                if piece.startswith(f"{name}."):
                    self.blobs.remove(f"{folder}/{piece}")

    def find(self, path: str) -> Saved | None:
        """The commit of `path`, or None; UserError for a malformed path."""
        where = CheckpointPath.parse(path)
        with self._failures(f"look up {where}"):
            return commit.find(self.blobs, where)

    def exists(self, path: str) -> bool:
        """Whether a checkpoint is saved under `path`."""
        return self.find(path) is not None

    def part(self, saved: Saved, file: str, start: int, length: int) -> bytes:
        """At most `length` bytes, from `start` on, of a file that the commit `saved` names.

        The blocks in which these bytes lie (commit.BLOCK) are read whole and verified. NotFoundError when the
        checkpoint was deleted or overwritten meanwhile; StoreError names the damaged file.
        """
        where = CheckpointPath.parse(saved.path)
        with self._failures(f"read {file} of {where}"):
            try:
                return commit.part_of(self.blobs, where.attempt(saved.attempt), file, saved.files[file], start, length)
            except FileNotFoundError as error:
                raise NotFoundError(
                    f"checkpoint {where}: {file} of attempt {saved.attempt} is there no longer"
                ) from error

    def signed_url(self, path: str, attempt: str, file: str, seconds: int) -> str | None:
        """A URL by which anybody can read the file for `seconds`; None when this kind of store has no such URLs."""
        where = CheckpointPath.parse(path)
        with self._failures(f"sign {file} of {where}"):
            return self.blobs.signed_url(f"{where.attempt(attempt)}/{file}", seconds)

    def amend(self, path: str, attempt: str, *, public: bool, expires_at: datetime | None) -> bool:
        """Change `public` and `expires_at` in the commit of `path`; False when it is gone, or of another attempt."""
        where = CheckpointPath.parse(path)
        with self._failures(f"amend {where}"):
            while (data := commit.raw(self.blobs, where)) is not None:
                saved = commit.from_json(data, where)
                if saved.attempt != attempt:
                    return False
                now = commit.to_json(replace(saved, meta=replace(saved.meta, public=public, expires_at=expires_at)))
                if now == data or self._put(where, data, now):
                    return True
            return False

    def delete(self, path: str, attempt: str = "") -> bool:
        """Remove a checkpoint, its commit first; whether there was one.

        With `attempt`, remove it only if it is of this attempt, and was not overwritten. A call that is repeated after
        a crash finishes the work. A damaged commit is removed together with its files.
        """
        where = CheckpointPath.parse(path)
        with self._failures(f"delete {where}"):
            found, of = False, attempt
            # Only the commit that was read: another process may have replaced or amended it since.
            while not found and (data := commit.raw(self.blobs, where)) is not None:
                try:
                    saved = commit.from_json(data, where)
                except StoreError as error:
                    _log.warning("deleted although it cannot be read: %s", error)
                else:
                    if attempt not in ("", saved.attempt):
                        break
                    of = saved.attempt
                found = self.blobs.remove(where.commit, data)
            if of:
                self.blobs.remove_folder(where.attempt(of))
            return found

    def checkpoints(self, run_id: str | None = None) -> list[Saved]:
        """All checkpoints of a run, or of all runs, oldest first; read from the commits.

        A damaged commit is logged and left out, so that it does not hide the others. UserError for a malformed run id.
        """
        if run_id is not None:
            check_run_id(run_id)
        with self._failures("list checkpoints"):
            found = []
            for path in commit.paths(self.blobs, run_id):
                try:
                    saved = commit.find(self.blobs, path)
                except StoreError as error:
                    _log.warning("left out of the list: %s", error)
                else:
                    found += [] if saved is None else [saved]
            return sorted(found, key=lambda saved: (saved.created_at, saved.path))

    def paths(self, run_id: str | None = None) -> list[str]:
        """The paths under which saves have begun, recovery snapshots included. Not all of them have a commit."""
        with self._failures("list paths"):
            return [str(path) for path in commit.paths(self.blobs, run_id, upkeep.ALL_KINDS)]

    def problems(self, path: str) -> list[str]:
        """Read all bytes of a checkpoint; a sentence for each problem, which names the file."""
        where = CheckpointPath.parse(path)
        with self._failures(f"verify {where}"):
            return upkeep.problems(self.blobs, where)

    def orphans(self, before: datetime) -> list[Orphan]:
        """Files of interrupted saves, into which nothing was written since `before`; see `upkeep.orphans`."""
        with self._failures("look for what was left behind"):
            return list(upkeep.orphans(self.blobs, before))

    def snapshots(self, before: datetime) -> list[Snapshot]:
        """Recovery snapshots that were committed before `before`. The journal knows which of them are needed."""
        with self._failures("look for recovery snapshots"):
            return list(upkeep.snapshots(self.blobs, before))

    def clear_drafts(self, before: datetime) -> int:
        """Remove unfinished commits whose writers died before `before`; how many."""
        with self._failures("clear drafts"):
            paths = commit.paths(self.blobs, kinds=upkeep.ALL_KINDS)
            return sum(self.blobs.clear_drafts(path.folder, before) for path in paths)

    def remove_orphan(self, orphan: Orphan) -> bool:
        """Remove an orphan; False when it was committed meanwhile."""
        with self._failures(f"remove attempt {orphan.attempt} of {orphan.path}"):
            return upkeep.remove(self.blobs, orphan)

    def _write(self, path: CheckpointPath, saved: Saved, files: dict[str, bytes]) -> None:
        """Write all files in parallel, then check the size of each."""
        keys = {file: f"{path.attempt(saved.attempt)}/{file}" for file in files}
        with ThreadPoolExecutor(len(files), thread_name_prefix="store") as threads:
            for written in [threads.submit(self.blobs.create, keys[file], data) for file, data in files.items()]:
                written.result()
        for file, data in files.items():
            self._check_size(path, keys[file], len(data))

    def _check_size(self, path: CheckpointPath, key: str, written: int) -> None:
        size, file = self.blobs.size(key), key.rpartition("/")[2]
        if size != written:
            raise StoreError(f"checkpoint {path}: {file} has {size} bytes after writing {written}")

    def _publish(self, path: CheckpointPath, saved: Saved, *, overwrite: bool) -> Saved:
        """Write the commit. With `overwrite`, replace the commit that is there: the last of several writers wins."""
        data = commit.to_json(saved)
        while True:
            if self._put(path, None, data):
                return saved
            there = commit.raw(self.blobs, path)
            if there is None:
                continue  # deleted since
            before = commit.from_json(there, path)
            if not overwrite or _same_request(before, saved.meta):
                self._tidy(path.attempt(saved.attempt))
                return _same_or_conflict(before, saved.meta)
            if self._put(path, there, data):
                self._tidy(path.attempt(before.attempt))
                return saved

    def _put(self, path: CheckpointPath, old: bytes | None, new: bytes) -> bool:
        """Create a commit (`old` None), or replace one; False when another is there. A truncated commit is undone."""
        try:
            if old is not None:
                done = self.blobs.replace(path.commit, old, new)
            else:
                try:
                    self.blobs.create(path.commit, new)
                    done = True
                except FileExistsError:
                    done = False
        except OSError:
            self._undo_cut(path, old, new)
            raise
        if done and self._undo_cut(path, old, new):
            raise OSError(f"{path.commit} arrived cut")
        return done

    def _undo_cut(self, path: CheckpointPath, old: bytes | None, new: bytes) -> bool:
        """If only a beginning of `new` has arrived, put back the bytes from before; whether that was necessary."""
        there = commit.raw(self.blobs, path)
        if there is None or there == new or not new.startswith(there):
            return False
        if old is None:
            return self.blobs.remove(path.commit, there)
        return self.blobs.replace(path.commit, there, old)

    def _discard_unless_committed(self, path: CheckpointPath, saved: Saved) -> None:
        """Remove the files of a failed save, unless the failure came after its commit: then the files are needed."""
        try:
            now = commit.find(self.blobs, path)
        except (OSError, StoreError) as error:
            _log.warning("attempt %s of %s is left behind: %s", saved.attempt, path, error)
            return
        if now is None or now.attempt != saved.attempt:
            self._tidy(path.attempt(saved.attempt))

    def _tidy(self, prefix: str) -> None:
        """Remove files that no commit names. A failure is only logged, because such files cost nothing but space."""
        try:
            self.blobs.remove_folder(prefix)
        except OSError as error:
            _log.warning("store %s: %s is left behind: %s", self.url, prefix, error)

    @contextmanager
    def _failures(self, doing: str) -> Iterator[None]:
        """Raise OSErrors as StoreErrors that say what was being done; StoreAwayError unless a file is missing."""
        try:
            yield
        except OSError as error:
            kind = StoreError if isinstance(error, FileNotFoundError) else StoreAwayError
            raise kind(f"store {self.url}: cannot {doing} ({error})") from error


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


def _same_request(saved: Saved, meta: CheckpointMeta) -> bool:
    return meta.request_id != "" and saved.meta.request_id == meta.request_id


def _same_or_conflict(saved: Saved, meta: CheckpointMeta) -> Saved:
    if _same_request(saved, meta):
        return saved
    raise ConflictError(f"checkpoint {saved.path} exists already; choose another name, or save with overwrite")

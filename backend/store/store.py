"""Checkpoints: saved whole or not at all, and read back only when every byte is as it was."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from typing import Self

from tinkerflow.backend.clock import Clock, SystemClock
from tinkerflow.backend.commands import AdapterState, LoraSpec, Optimizer
from tinkerflow.backend.errors import ConflictError, NotFoundError, StoreAwayError, StoreError, UserError
from tinkerflow.backend.ids import new_id
from tinkerflow.backend.store import commit, reading, tensors, upkeep
from tinkerflow.backend.store.blobs import Blobs, open_blobs
from tinkerflow.backend.store.commit import OPTIMIZER, CheckpointMeta, Digest, Saved
from tinkerflow.backend.store.encryption import encrypt
from tinkerflow.backend.store.paths import EXTERNAL_WEIGHTS, SAMPLER_WEIGHTS, WEIGHTS, CheckpointPath, check_run_id
from tinkerflow.backend.store.peft import ADAPTER, ADAPTER_CONFIG, adapter_config
from tinkerflow.backend.store.tensors import Floats
from tinkerflow.backend.store.upkeep import Orphan, Snapshot

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
            saved, files = reading.files_of(self._blobs, where, lambda file: True)
        meta = replace(
            saved.meta, owner=owner, expires_at=expires_at, request_id=request_id, run_metadata={}, public=False
        )
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
            before = reading.commit_of(self._blobs, path)
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
            saved, files = reading.files_of(self._blobs, where, lambda file: optimizer or file != OPTIMIZER)
        weights = _decoded(where, ADAPTER, files)
        moments = _decoded(where, OPTIMIZER, files) if OPTIMIZER in files else {}
        return AdapterState(saved.spec, saved.step, weights, moments, saved.optimizer), saved

    def find(self, path: str) -> Saved | None:
        """The commit of `path`, or None; UserError for a malformed path."""
        where = CheckpointPath.parse(path)
        with self._failures(f"look up {where}"):
            return reading.commit_of(self._blobs, where)

    def exists(self, path: str) -> bool:
        """Whether something is saved under `path`."""
        return self.find(path) is not None

    def part(self, saved: Saved, file: str, start: int, length: int) -> bytes:
        """At most `length` bytes from `start` on of a file that the commit `saved` names.

        They are those that were saved: the blocks they lie in (commit.BLOCK) are read whole and compared. NotFoundError
        when the checkpoint was deleted or saved anew meanwhile; StoreError names the file that is damaged.
        """
        where = CheckpointPath.parse(saved.path)
        with self._failures(f"read {file} of {where}"):
            try:
                return reading.part_of(self._blobs, where, saved, file, start, length)
            except FileNotFoundError as error:
                raise NotFoundError(
                    f"checkpoint {where}: {file} of attempt {saved.attempt} is there no longer"
                ) from error

    def signed_url(self, path: str, attempt: str, file: str, seconds: int) -> str | None:
        """A URL of the file system's own by which anybody can read the file for so long; None where it has none."""
        where = CheckpointPath.parse(path)
        with self._failures(f"sign {file} of {where}"):
            return self._blobs.signed_url(f"{where.attempt(attempt)}/{file}", seconds)

    def amend(self, path: str, attempt: str, *, public: bool, expires_at: datetime | None) -> bool:
        """Let the commit of `path` say so of itself from now on; False when it is not of this attempt, or is gone."""
        where = CheckpointPath.parse(path)
        with self._failures(f"amend {where}"):
            while (data := reading.commit_bytes(self._blobs, where)) is not None:
                saved = commit.from_json(data, where)
                if saved.attempt != attempt:
                    return False
                now = commit.to_json(replace(saved, meta=replace(saved.meta, public=public, expires_at=expires_at)))
                if now == data or self._put(where, data, now):
                    return True
            return False

    def delete(self, path: str, attempt: str = "") -> bool:
        """Remove a checkpoint, the commit first; whether there was one.

        With `attempt` only if it is that one, and not saved anew under its path. Repeated after a crash it finishes
        the work; a commit that is damaged goes with its files.
        """
        where = CheckpointPath.parse(path)
        with self._failures(f"delete {where}"):
            found, of = False, attempt
            # Only the commit that we looked at: another process may have saved anew, or amended it, since.
            while not found and (data := reading.commit_bytes(self._blobs, where)) is not None:
                try:
                    saved = commit.from_json(data, where)
                except StoreError as error:
                    _log.warning("deleted although it cannot be read: %s", error)
                else:
                    if attempt not in ("", saved.attempt):
                        break
                    of = saved.attempt
                found = self._blobs.remove(where.commit, data)
            if of:
                self._blobs.remove_folder(where.attempt(of))
            return found

    def checkpoints(self, run_id: str | None = None) -> list[Saved]:
        """All checkpoints of a run, or of all runs, oldest first; read from the commits.

        A damaged commit is logged and left out, so that it does not hide the others. UserError for a malformed run id.
        """
        if run_id is not None:
            check_run_id(run_id)
        with self._failures("list checkpoints"):
            found = []
            for path in reading.paths(self._blobs, run_id):
                try:
                    saved = reading.commit_of(self._blobs, path)
                except StoreError as error:
                    _log.warning("left out of the list: %s", error)
                else:
                    found += [] if saved is None else [saved]
            return sorted(found, key=lambda saved: (saved.created_at, saved.path))

    def paths(self, run_id: str | None = None) -> list[str]:
        """The paths of all that was begun, the service's own snapshots too; what has no commit does not exist."""
        with self._failures("list paths"):
            return [str(path) for path in reading.paths(self._blobs, run_id, upkeep.ALL_KINDS)]

    def problems(self, path: str) -> list[str]:
        """What is wrong with a checkpoint, all of whose bytes are read: one sentence each, which names the file."""
        where = CheckpointPath.parse(path)
        with self._failures(f"verify {where}"):
            return upkeep.problems(self._blobs, where)

    def orphans(self, before: datetime) -> list[Orphan]:
        """What saves that never were have left, if nobody has written to it since `before`: longer than any takes."""
        with self._failures("look for what was left behind"):
            return list(upkeep.orphans(self._blobs, before))

    def snapshots(self, before: datetime) -> list[Snapshot]:
        """The service's own recovery snapshots that were committed before then; whether one is needed it cannot say."""
        with self._failures("look for recovery snapshots"):
            return list(upkeep.snapshots(self._blobs, before))

    def clear_drafts(self, before: datetime) -> int:
        """Remove what writers of commits that died before then have left of their own; how many."""
        with self._failures("clear drafts"):
            paths = reading.paths(self._blobs, kinds=upkeep.ALL_KINDS)
            return sum(self._blobs.clear_drafts(path.folder, before) for path in paths)

    def remove_orphan(self, orphan: Orphan) -> bool:
        """Remove it, unless it has been committed since; whether it was removed."""
        with self._failures(f"remove attempt {orphan.attempt} of {orphan.path}"):
            return upkeep.remove(self._blobs, orphan)

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
            if self._put(path, None, data):
                return saved
            there = reading.commit_bytes(self._blobs, path)
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
        """Create a commit (`old` None), or replace one; False when another is there. One that arrived cut is undone."""
        try:
            if old is not None:
                done = self._blobs.replace(path.commit, old, new)
            else:
                try:
                    self._blobs.create(path.commit, new)
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
        """Where the beginning of `new` is all that arrived, put back what was there before; whether it was so."""
        there = reading.commit_bytes(self._blobs, path)
        if there is None or there == new or not new.startswith(there):
            return False
        if old is None:
            return self._blobs.remove(path.commit, there)
        return self._blobs.replace(path.commit, there, old)

    def _discard_unless_committed(self, path: CheckpointPath, saved: Saved) -> None:
        """After a failure: it may have come after the commit, and then the files are needed."""
        try:
            now = reading.commit_of(self._blobs, path)
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

    @contextmanager
    def _failures(self, doing: str) -> Iterator[None]:
        """What goes wrong with files becomes a StoreError that says what was being done."""
        try:
            yield
        except OSError as error:
            kind = StoreError if isinstance(error, FileNotFoundError) else StoreAwayError
            raise kind(f"store {self.url}: cannot {doing} ({error})") from error


def _files(state: AdapterState, meta: CheckpointMeta) -> dict[str, bytes]:
    files = {
        ADAPTER: tensors.encode(state.weights),
        ADAPTER_CONFIG: adapter_config(meta.base_model, state.spec, state.weights),
    }
    return files | ({OPTIMIZER: tensors.encode(state.moments)} if state.moments else {})


def _decoded(path: CheckpointPath, file: str, files: Mapping[str, bytes]) -> dict[str, Floats]:
    try:
        return tensors.decode(files[file])
    except StoreError as error:
        raise StoreError(f"checkpoint {path}: {file} is {error}") from error


def _same_request(saved: Saved, meta: CheckpointMeta) -> bool:
    return meta.request_id != "" and saved.meta.request_id == meta.request_id


def _same_or_conflict(saved: Saved, meta: CheckpointMeta) -> Saved:
    if _same_request(saved, meta):
        return saved
    raise ConflictError(f"checkpoint {saved.path} exists already; choose another name, or save with overwrite")

"""The data dir: private, writable, and served by one `tinkerflow up` at a time."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from tinkerflow.backend.core.disk import OTHERS, make_folder, make_private, open_private
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.service import LOCK, Owner, read_owner
from tinkerflow.deployments.options import minute

NEEDED_BYTES = 100 * 2**20
OF_DISK = "lost+found"  # an entry of each new disk
RESTORING = ".restoring"  # a file in the data dir while `tinkerflow restore` unpacks a backup, or after it was killed
# Beginnings of the names of all entries of a data dir.
OWN_ENTRIES = (
    *(LOCK, "group.secret", "jax-cache", "journal.db", "logs", "models", "pipelines", "prefect", "serve-", "store"),
    *("tracking", OF_DISK),
)


@contextmanager
def owned(data_dir: Path, api_url: str) -> Iterator[None]:
    """Make the data dir if it is missing, repair its modes, and own it for the block.

    UserError: another process owns the data dir, its disk is almost full, or it cannot be written.
    """
    make_data_dir(data_dir)
    try:
        lock = open_private(data_dir / LOCK, "a+")
    except OSError as error:
        raise _unusable(data_dir, error) from error
    with lock:
        if not _locks(lock):
            refuse_served(data_dir)
            raise _served(data_dir, "another process")  # the entry is not written yet, or comes from another release
        try:
            _write_owner(lock, owner := Owner(os.getpid(), minute(datetime.now(UTC)), api_url, stopped=""))
        except OSError as error:
            raise _unusable(data_dir, error) from error
        if (free := shutil.disk_usage(data_dir).free) < NEEDED_BYTES:
            needs = f"needs at least {NEEDED_BYTES / 2**20:.0f} MiB"
            raise UserError(
                f"data_dir '{data_dir}': its disk has {free / 2**20:.0f} MiB left, {needs}; make space, or choose "
                "another --data-dir"
            )
        make_private(*exposed(data_dir))
        try:
            yield
        finally:
            with suppress(OSError):  # a full disk
                _write_owner(lock, replace(owner, stopped=minute(datetime.now(UTC))))


def _write_owner(lock: IO[str], owner: Owner) -> None:
    lock.truncate(0)
    lock.write(json.dumps(asdict(owner)))
    lock.flush()


def make_data_dir(data_dir: Path) -> None:
    """Make the data dir if it is missing. UserError: it cannot be made, or a backup is not restored completely."""
    try:
        make_folder(data_dir)
        refuse_restoring(data_dir)
    except OSError as error:
        raise _unusable(data_dir, error) from error


def refuse_restoring(data_dir: Path) -> None:
    """Raise UserError if a restore into the data dir has not ended, or was killed."""
    if (data_dir / RESTORING).exists():
        fix = "wait for `tinkerflow restore`, or run it again if it was killed"
        raise UserError(f"data_dir '{data_dir}': only a part of a backup is restored; {fix}")


def refuse_served(data_dir: Path) -> None:
    """Raise UserError if a process serves the data dir."""
    if (owner := read_owner(data_dir)) is not None:
        raise _served(data_dir, f"process {owner.pid} at {owner.api_url}")


def _locks(lock: IO[str]) -> bool:
    """Try to take the lock, and try again because another process may hold it briefly in `read_owner`."""
    for _ in range(2):
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(0.1)
    return False


def _served(data_dir: Path, by: str) -> UserError:
    return UserError(f"data_dir '{data_dir}': is already served by {by}; stop it, or choose another --data-dir")


def _unusable(data_dir: Path, error: OSError) -> UserError:
    return UserError(f"data_dir '{data_dir}': cannot be written ({error.strerror}): {fix_of(error)}")


def fix_of(error: OSError) -> str:
    """Advice for a person after a file of the data dir could not be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space, or choose another --data-dir"
    if error.errno in (errno.EACCES, errno.EPERM):
        return "run as its owner, or choose another --data-dir"
    return "choose another --data-dir"


def exposed(data_dir: Path) -> list[Path]:
    """The files and folders of the service that other users may read or enter.

    The data dir itself is one of them only if it contains nothing else: it may be a folder such as /tmp or a home.
    """
    entries = [*data_dir.iterdir()]
    own = [entry for entry in entries if entry.name.startswith(OWN_ENTRIES)]
    if len(own) == len(entries):
        return open_to_others(data_dir)
    return [path for entry in own for path in open_to_others(entry)]


def open_to_others(folder: Path) -> list[Path]:
    """The files and folders of this user, at any depth, that other users may read or enter. Links are not followed."""
    found = [folder] if _is_open(folder) else []
    for base, folders, files in os.walk(folder):
        found += [path for name in (*folders, *files) if _is_open(path := Path(base, name))]
    return found


def _is_open(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return bool(status.st_mode & OTHERS) and not path.is_symlink() and status.st_uid == os.getuid()

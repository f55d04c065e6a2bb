"""Private files and folders that survive a power cut.

The service's files belong to its tenants, so other users of the machine must not read them. Modes are set when a file
is created, because before a later chmod, other users could open the file.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote

PRIVATE_FOLDER, PRIVATE_FILE = 0o700, 0o600
OTHERS = 0o077  # the permission bits of the group and of all other users

log = logging.getLogger(__name__)


def make_folder(folder: Path) -> None:
    """Make a private folder and its parents. Each new entry is flushed, so a power cut cannot lose the folder."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(PRIVATE_FOLDER, exist_ok=True)
    flush(folder.parent)


@contextmanager
def draft_of(folder: Path) -> Iterator[Path]:
    """An empty folder beside the new `folder`, which gets that name after the block, or is removed if the block fails.

    The draft of an interrupted call is replaced. OSError: `folder` cannot be created, or another call is creating it.
    """
    draft = folder.parent / f".{folder.name}.partial"
    draft.mkdir(parents=True, exist_ok=True)
    held = os.open(draft, os.O_RDONLY)
    try:
        lock_new(held, draft)
        try:
            for left in draft.iterdir():
                if left.is_dir():
                    shutil.rmtree(left)
                else:
                    left.unlink()
            yield draft
            draft.rename(folder)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
    finally:
        os.close(held)


def lock_new(held: int, draft: Path) -> None:
    """Lock the opened file or folder `draft`. OSError: another process has locked it, or has just renamed it."""
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        renamed = not os.path.samestat(os.fstat(held), draft.stat())
    except (BlockingIOError, FileNotFoundError):
        renamed = True
    if renamed:
        raise FileExistsError(errno.EEXIST, "another command is writing it", str(draft))


@contextmanager
def locked(file: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the exclusive lock of `file` for the block. Other processes of this host wait, and call `on_wait` before.

    The kernel frees the lock of a dead process. The file is created if it is missing, and stays.
    """
    with open_private(file, "ab") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(held, fcntl.LOCK_EX)
        yield


def open_private(path: Path, mode: str) -> IO[Any]:
    """Open a file like `open(path, mode)`. If the call creates the file, only its owner can read it."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags, PRIVATE_FILE))


def sqlite_url(path: Path, driver: str = "sqlite") -> str:
    """The URL of this path for the installed SQLAlchemy: version 2.1 decodes %20 in URLs, 2.0 does not."""
    from sqlalchemy import URL

    return URL.create(driver, database=str(path)).render_as_string()


def folder_of_url(url: str) -> Path:
    """The folder of a `file://` URL, with percent escapes such as `%20` decoded.

    Earlier releases took such a URL literally. If only a folder with the literal name exists, that folder is returned.
    """
    literal = Path(url.removeprefix("file://"))
    folder = Path(unquote(str(literal)))
    return literal if literal.is_dir() and not folder.is_dir() else folder


def flush(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_private(*paths: Path) -> None:
    """Remove other users' permissions from files and folders that an earlier release made. Missing paths are skipped.

    A folder's content is changed only if other users can access the folder itself. A path that belongs to another user
    is logged and left unchanged, because only its owner may change it.
    """
    for path in paths:
        try:
            found = path.lstat()
            if stat.S_ISLNK(found.st_mode) or not found.st_mode & OTHERS:
                continue
            if stat.S_ISDIR(found.st_mode):
                make_private(*path.iterdir())
            path.chmod(stat.S_IMODE(found.st_mode) & ~OTHERS)
        except FileNotFoundError:
            continue
        except PermissionError as error:
            log.warning("%s can be read by other users, and its mode cannot be changed: %s", path, error)

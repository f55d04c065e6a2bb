"""Files and folders that are private, and that survive a power cut.

What the service keeps belongs to its tenants, so other users of the machine must not read it. Modes are given when a
file is created: a later chmod would leave a moment in which others can open it.
"""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote

PRIVATE_FOLDER, PRIVATE_FILE = 0o700, 0o600
OTHERS = 0o077  # the bits of the group and of everybody else

log = logging.getLogger(__name__)


def make_folder(folder: Path) -> None:
    """Make a private folder and its parents, and flush each new entry, or a power cut could lose the folder."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(PRIVATE_FOLDER, exist_ok=True)
    flush(folder.parent)


def open_private(path: Path, mode: str) -> IO[Any]:
    """Open a file as `open(path, mode)` does. A file that this call creates can be read by its owner only."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags, PRIVATE_FILE))


def sqlite_url(path: Path, driver: str = "sqlite") -> str:
    """The URL in which the installed SQLAlchemy finds this path: 2.1 decodes %20 in URLs, and 2.0 does not."""
    from sqlalchemy import URL

    return URL.create(driver, database=str(path)).render_as_string()


def folder_of_url(url: str) -> Path:
    """The folder of a `file://` URL, in which `%20` is a blank and so on.

    Earlier releases took such a URL literally: a folder that has the literal name, and no other, is found.
    """
    literal = Path(url.removeprefix("file://"))
    folder = Path(unquote(str(literal)))
    return literal if literal.is_dir() and not folder.is_dir() else folder


def flush(path: Path) -> None:
    """Have the content of a file on the disk, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_private(*paths: Path) -> None:
    """Remove other users' permissions from files and folders that an earlier release made. Missing paths are skipped.

    The content of a folder is changed only if the folder itself is open to others. A path that belongs to another user
    is logged and stays as it is, because only its owner may change it.
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

"""What a power cut must not take: new folders, and the names that files were given."""

from __future__ import annotations

import os
from pathlib import Path


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, and flush each new entry, or a power cut could lose the folder."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    flush(folder.parent)


def flush(path: Path) -> None:
    """Have the content of a file on the disk, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""A folder whose disk is not mounted."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def unmounted(folder: Path) -> Iterator[None]:
    """Put an empty folder in the place of `folder` during the block."""
    disk = folder.with_name("disk")
    folder.rename(disk)
    folder.mkdir()
    try:
        yield
    finally:
        shutil.rmtree(folder)
        disk.rename(folder)

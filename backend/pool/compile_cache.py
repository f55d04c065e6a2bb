"""Deleting entries of JAX's persistent compilation cache that a kill cut short.

JAX writes entries in place and never replaces one, so such an entry would cost a compilation at every start. The
warning names the module only; entries are called `<module>-<hash>-cache`, so a few good ones of that module go too.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

log = logging.getLogger(__name__)
_UNREADABLE = re.compile(r"Error reading persistent compilation cache entry for '([\w.<>]+)'")


class CacheMender(logging.Handler):
    """Deletes what JAX warns about, once `logging.captureWarnings(True)` sends warnings to the logger `py.warnings`."""

    def __init__(self, folder: Path) -> None:
        """Mend the cache in `folder`."""
        super().__init__()
        self._folder = folder

    def emit(self, record: logging.LogRecord) -> None:
        """Delete the entries that `record` calls unreadable; other records change nothing."""
        named = _UNREADABLE.search(record.getMessage())
        if named is None:
            return
        for entry in self._folder.iterdir():
            if entry.name.startswith(f"{named[1]}-") and entry.name.endswith("-cache"):
                log.warning("deleting the unreadable cache entry %s", entry)
                entry.unlink(missing_ok=True)

"""JAX's persistent compilation cache for every rank of a group, and its repair after a kill.

JAX writes entries from process 0 only, so that no two processes write to one remote file, and on CPU an entry's key
depends on the rank. So the other ranks would compile everything again in each generation. Here every rank has a folder
of its own in the data directory of its host, and writes there: no two processes of a group share a file.

JAX writes entries in place and never replaces them, so an entry that a kill has cut short would cost a compilation at
every start. JAX's warning names only the module. Entries are called `<module>-<hash>-cache`, so a few good entries of
that module are deleted, too.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)
_UNREADABLE = re.compile(r"Error reading persistent compilation cache entry for '([\w.<>]+)'")


def folder_of(cache: str, rank: int) -> Path:
    """Where `rank` keeps its entries. Rank 0's are in `cache` itself, where any single process looks."""
    return Path(cache) / f"rank-{rank}" if rank else Path(cache)


def write_here(compiler: Any, compilation_cache: Any) -> None:
    """Let this process write what it compiles, whatever its rank. It replaces JAX's rule that only rank 0 writes.

    compiler, compilation_cache: the modules of these names in `jax._src`. JAX has no option for this, so the function
    that JAX calls with each compiled program is replaced. A JAX without that function keeps its rule, which is logged.
    """

    def write(
        key: str, seconds: float, module: str, backend: Any, executable: Any, host_callbacks: Sequence[Any] = ()
    ) -> None:
        # As JAX's function, without its check of the rank, and without its least sizes and times: they are 0 here.
        # Newer versions of JAX give it no host_callbacks.
        if host_callbacks:  # pointers of this process
            return
        try:
            compilation_cache.put_executable_and_time(key, module, executable, backend, int(seconds))
        except Exception as error:  # noqa: BLE001  a program that is not kept is compiled again
            text = f"Error writing persistent compilation cache entry for '{module}': {error!r}"
            warnings.warn(text, stacklevel=2)

    if not hasattr(compiler, "_cache_write"):
        log.warning("this version of JAX writes its compilation cache otherwise: this rank compiles at every start")
        return
    compiler._cache_write = write


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

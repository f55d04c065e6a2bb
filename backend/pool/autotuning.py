"""XLA's autotuning results for NVIDIA GPUs, kept in the store.

XLA measures the speed of the kernels for a product, and chooses the fastest. When a program is compiled again, XLA may
choose other kernels, which compute other bits. XLA writes each result to a file in JAX's compilation cache, and reads
the file when it compiles another program. This module copies the files to the store. A group whose cache is lost, or
that runs on another host, gets the results from the store before it compiles anything.

The results for a kind of device, compiler and flags share a folder. The digest of a group's programs (`Ready.programs`)
is computed from the same inputs. A result in the store never changes, so groups with equal digests use equal kernels.

Groups of several processes have no such files (`jax_setup`): rank 0 compiles for all ranks.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tinkerflow.backend.pool.transfers import reached_store
from tinkerflow.backend.spec.commands import GroupConfig

if TYPE_CHECKING:
    from tinkerflow.backend.store.blobs import Blobs

log = logging.getLogger(__name__)

FOLDER = "xla_gpu_per_fusion_autotune_cache_dir"  # JAX's name, in the folder of its compilation cache
_STORED = "autotuning"
_SUFFIX = ".textproto"  # of complete files
_SECONDS = 30.0  # between two searches for new results


def keep_results(config: GroupConfig, compiled_for: str) -> None:
    """Fetch the results that a group may need, and start publishing its own.

    config, compiled_for: the group's; see `AutotuningResults`. Without a store, the group uses its own results.
    """
    if not config.store_url:
        return
    if (blobs := reached_store(config, ThreadPoolExecutor(1, thread_name_prefix="autotuning"))) is None:
        return
    results = AutotuningResults(Path(config.compile_cache_dir), blobs, compiled_for)
    try:
        log.info("fetched %d autotuning result(s)", results.fetch())
    except OSError as error:
        log.warning("the store's autotuning results are not used, so kernels may differ: %r", error)
    results.keep_published()


class AutotuningResults:
    """The results in a compilation cache, and the results in the store."""

    def __init__(self, cache: Path, blobs: Blobs, compiled_for: str) -> None:
        """cache: JAX's folder. compiled_for: a text that identifies the device, its compiler, and their flags."""
        self._folder, self._blobs = cache / FOLDER, blobs
        self._key = f"{_STORED}/{hashlib.sha256(compiled_for.encode()).hexdigest()[:16]}"
        self._stored: set[str] = set()

    def fetch(self) -> int:
        """Write the stored results that the cache lacks, and return their number. Call this before compiling.

        OSError: the store cannot be reached.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        self._stored = set(self._blobs.children(self._key))
        missing = self._stored - {path.name for path in self._folder.iterdir()}
        for name in sorted(missing):
            content = self._blobs.read(f"{self._key}/{name}")
            draft = self._folder / f"fetched-{secrets.token_hex(8)}"
            try:
                draft.write_bytes(content)
                draft.rename(self._folder / name)
            finally:
                draft.unlink(missing_ok=True)
        return len(missing)

    def publish(self) -> int:
        """Store the results that the store lacks, and return their number. OSError: the store cannot be reached."""
        new = [path for path in sorted(self._folder.glob(f"*{_SUFFIX}")) if path.name not in self._stored]
        for path in new:
            with suppress(FileExistsError):  # another group was faster
                self._blobs.create(f"{self._key}/{path.name}", path.read_bytes())
            self._stored.add(path.name)
        return len(new)

    def keep_published(self) -> None:
        """Start a thread that publishes new results."""
        threading.Thread(target=self._work, name="autotuning", daemon=True).start()

    def _work(self) -> None:
        while True:
            try:
                if count := self.publish():
                    log.info("stored %d autotuning result(s)", count)
            except OSError as error:
                log.warning("autotuning results are not stored yet: %r", error)
            time.sleep(_SECONDS)

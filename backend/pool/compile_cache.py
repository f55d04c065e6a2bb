"""JAX's persistent compilation cache, complete for every rank of a group.

When a group starts again, all ranks must find every program that they have compiled. Ranks that compile a program
choose kernels together and wait for each other. JAX itself writes entries only from process 0, so every rank has its
own folder. If all ranks have the same key for the same program, rank 0 compiles for all (JAX's option
`jax_share_binary_between_hosts`), and the other ranks copy its entries when the group starts. Otherwise (on CPUs, where
a key depends on the rank) each rank compiles for itself and writes its own entries.

JAX writes entries in place and never replaces them. A process that is killed while writing leaves a truncated entry,
which would cost a compilation at every start. A starting process therefore deletes truncated entries.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile

import zstandard

log = logging.getLogger(__name__)
_ENTRY = "-cache"  # the suffix of each file that JAX writes
_CHECKED = "checked"  # a file with the time of the last check


def folder_of(cache: str, model_path: str, processes: int, rank: int) -> Path:
    """The folder for a process's entries: `cache` itself, or its subfolder for this rank of several.

    Groups of several processes share folders only if their models have the same name and configuration.
    """
    if processes == 1:
        return Path(cache)
    config = Path(model_path) / "config.json"
    model = hashlib.sha256(Path(model_path).name.encode() + (config.read_bytes() if config.exists() else b""))
    return Path(cache) / f"{model.hexdigest()[:12]}-{processes}" / f"rank-{rank}"


def delete_cut_entries(folder: Path) -> None:
    """Delete the truncated entries among all entries written since the last complete check.

    The time of a check is stored only after all its deletions, so the next call repeats an interrupted check.
    """
    folder.mkdir(parents=True, exist_ok=True)
    checked = folder / _CHECKED
    last = checked.stat().st_mtime_ns if checked.exists() else 0
    with NamedTemporaryFile(dir=folder, prefix=f"{_CHECKED}-") as clock:  # its time is from the file system's clock
        began = os.fstat(clock.fileno()).st_mtime_ns
        for entry in sorted(folder.glob(f"*{_ENTRY}")):
            with contextlib.suppress(FileNotFoundError):  # another group on this host has deleted the entry
                if entry.stat().st_mtime_ns >= last and _is_cut(entry.read_bytes()):
                    log.warning("deleting the truncated entry %s of the compilation cache", entry)
                    entry.unlink()
    checked.touch()
    os.utime(checked, ns=(began, began))


def _is_cut(entry: bytes) -> bool:
    if len(entry) >= len(zstandard.FRAME_HEADER) and not entry.startswith(zstandard.FRAME_HEADER):
        return False  # compressed by another algorithm, which this module cannot check
    try:
        zstandard.ZstdDecompressor().decompress(entry)
    except zstandard.ZstdError:
        return True
    return False


def has_common_keys(folder: Path, compile_probe: Callable[[], None], gather: Callable[[str], Sequence[str]]) -> bool:
    """Whether all ranks have the same key for the same program. Every rank must call this.

    folder: this rank's folder, where JAX writes its entries. compile_probe: compiles a program with the unique name
    `probe`. gather: sends this rank's text to all ranks, and returns the texts of all ranks.
    """
    for entry in folder.glob(f"*probe-*{_ENTRY}"):  # left by an earlier start
        entry.unlink()
    compile_probe()
    return len(set(gather(" ".join(entry.name for entry in folder.glob(f"*probe-*{_ENTRY}"))))) == 1


def copy_entries_of_rank_0(
    folder: Path,
    rank: int,
    gather: Callable[[str], Sequence[str]],
    publish: Callable[[str, bytes], None],
    receive: Callable[[str], bytes],
) -> None:
    """Copy the entries of rank 0 to every rank, and delete all other entries. Every rank calls this before it compiles.

    gather: see `has_common_keys`; the texts are in rank order. publish: called on rank 0 with the name and content of
    an entry. receive: returns the content that rank 0 published under a name.
    """
    lists = [set(text.split()) for text in gather(" ".join(entry.name for entry in folder.glob(f"*{_ENTRY}")))]
    for name in sorted(lists[0] - set[str].intersection(*lists)):
        if rank == 0:
            publish(name, (folder / name).read_bytes())
        elif name not in lists[rank]:
            (folder / name).write_bytes(receive(name))
    for name in lists[rank] - lists[0]:
        log.warning("deleting %s of the compilation cache of rank %d: rank 0 does not have it", name, rank)
        (folder / name).unlink()

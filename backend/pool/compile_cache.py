"""JAX's persistent compilation cache, kept whole for every rank of a group.

A group that starts again must find every program that it has compiled, on all ranks: ranks that compile a program help
each other to choose kernels, and wait for each other. JAX itself writes entries from process 0 only. So every rank has
a folder of its own. Where all ranks have the same key for the same program, rank 0 compiles for all (JAX's option
`jax_share_binary_between_hosts`), and the other ranks copy its entries when the group starts. Elsewhere (on CPUs, where
a key depends on the rank) each rank compiles for itself and writes its own entries.

JAX writes entries in place and never replaces them, so an entry that a kill has cut short would cost a compilation at
every start. Such entries are deleted when a process starts.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import zstandard

log = logging.getLogger(__name__)
_ENTRY = "-cache"  # the end of the name of each file that JAX writes
_CHECKED = "checked"  # a file that is as new as the last check


def folder_of(cache: str, model_path: str, processes: int, rank: int) -> Path:
    """Where a process keeps its entries: in `cache` itself, or for a rank of several in a folder of its own.

    Groups of several processes share no folder unless their models have the same name and configuration.
    """
    if processes == 1:
        return Path(cache)
    config = Path(model_path) / "config.json"
    model = hashlib.sha256(Path(model_path).name.encode() + (config.read_bytes() if config.exists() else b""))
    return Path(cache) / f"{model.hexdigest()[:12]}-{processes}" / f"rank-{rank}"


def delete_cut_entries(folder: Path) -> None:
    """Delete the entries that a kill has cut short, among those that were written since the last call."""
    folder.mkdir(parents=True, exist_ok=True)
    checked = folder / _CHECKED
    last = checked.stat().st_mtime_ns if checked.exists() else 0
    checked.touch()
    for entry in sorted(folder.glob(f"*{_ENTRY}")):
        if entry.stat().st_mtime_ns >= last and _is_cut(entry.read_bytes()):
            log.warning("deleting %s of the compilation cache: it was cut short", entry)
            entry.unlink(missing_ok=True)


def _is_cut(entry: bytes) -> bool:
    if len(entry) >= len(zstandard.FRAME_HEADER) and not entry.startswith(zstandard.FRAME_HEADER):
        return False  # another compression, which cannot be checked here
    try:
        zstandard.ZstdDecompressor().decompress(entry)
    except zstandard.ZstdError:
        return True
    return False


def has_common_keys(folder: Path, compile_probe: Callable[[], None], gather: Callable[[str], Sequence[str]]) -> bool:
    """Whether all ranks have the same key for the same program. Every rank must call it.

    folder: the rank's own, where JAX writes entries at the moment. compile_probe: compiles a program called `probe`,
    which no other program is called. gather: gives the text of this rank, and returns the texts of all ranks.
    """
    for entry in folder.glob(f"*probe-*{_ENTRY}"):  # of an earlier version, maybe
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
    """Give every rank the entries of rank 0, and no others. Every rank must call it before it compiles anything.

    gather: gives the text of this rank, and returns the texts of all ranks, in order. publish, receive: send bytes from
    rank 0 to all others, by name.
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

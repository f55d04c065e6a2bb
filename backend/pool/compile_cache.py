"""JAX's persistent compilation cache for every rank of a group, and its repair after a kill.

JAX writes entries from process 0 only, so that no two processes write to one remote file, and an entry's key may depend
on the rank. So the other ranks would compile everything again in each generation. Here every rank has a folder of its
own in the data directory of its host, and writes there: no two processes of a group share a file.

A rank must not find a program in its cache that another rank has to compile: ranks that compile help each other to
choose kernels, and wait for each other. So each entry has a note, `<key>-program`, that says which program it is, alike
on all ranks, and the digest of the entry. When a group starts, its ranks compare their notes, and delete the entries
that are not whole, or that some rank lacks. So after a lost folder, a cut entry or a new host, all ranks compile the
same programs.

JAX writes entries in place and never replaces them, so an entry that a kill has cut short would cost a single process,
which has no notes, a compilation at every start. JAX's warning names only the module. Entries are called
`<module>-<hash>-cache`, so a few good entries of that module are deleted, too.
"""

from __future__ import annotations

import hashlib
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)
_UNREADABLE = re.compile(r"Error reading persistent compilation cache entry for '([\w.<>]+)'")
_ENTRY, _NOTE = "-cache", "-program"


def folder_of(cache: str, model_path: str, processes: int, rank: int) -> Path:
    """Where a process keeps its entries: in `cache` itself, or for a rank of several in a folder of its own.

    Groups of several processes share no folder unless their model has the same name and configuration.
    """
    if processes == 1:
        return Path(cache)
    config = Path(model_path) / "config.json"
    model = hashlib.sha256(Path(model_path).name.encode() + (config.read_bytes() if config.exists() else b""))
    return Path(cache) / f"{model.hexdigest()[:12]}-{processes}" / f"rank-{rank}"


def write_with_notes(folder: Path, compiler: Any, compilation_cache: Any) -> dict[str, str]:
    """Let this process write what it compiles, whatever its rank, with notes; and return the keys of its programs.

    By JAX's rule only rank 0 writes. The dict holds the program of each key that was asked for, more and more of them.
    folder: its cache. compiler, compilation_cache: the modules of these names in `jax._src`. JAX has no option for
    this, so the functions that JAX calls for a program's key and with each compiled program are replaced. A JAX without
    these functions keeps its rule, which is logged.
    """
    programs: dict[str, str] = {}  # by key
    if not (hasattr(compiler, "_cache_write") and hasattr(compilation_cache, "get_cache_key")):
        log.warning("this version of JAX writes its compilation cache otherwise: this rank compiles at every start")
        return programs
    key_of: Callable[..., Any] = compilation_cache.get_cache_key
    compile_and_share: Any = getattr(compiler, "_compile_and_share_module", None)

    def get_cache_key(computation: Any, *args: Any, **kwargs: Any) -> str:
        key = str(key_of(computation, *args, **kwargs))
        programs[key] = _digest(str(computation.operation.get_asm(enable_debug_info=False)).encode())
        return key

    def write(
        key: str, seconds: float, module: str, backend: Any, executable: Any, host_callbacks: Sequence[Any] = ()
    ) -> None:
        # As JAX's function, without its check of the rank, and without its least sizes and times: they are 0 here.
        # Newer versions of JAX give it no host_callbacks.
        if host_callbacks:  # pointers of this process
            return
        try:
            compilation_cache.put_executable_and_time(key, module, executable, backend, int(seconds))
            _note(folder, key, programs[key])
        except Exception as error:  # noqa: BLE001  a program that is not kept is compiled again
            text = f"Error writing persistent compilation cache entry for '{module}': {error!r}"
            warnings.warn(text, stacklevel=2)

    def share(*args: Any, **kwargs: Any) -> Any:
        # JAX's function has rank 0 write what it compiled, and the other ranks use what they got, without writing it.
        executable = compile_and_share(*args, **kwargs)
        named = signature(compile_and_share).bind(*args, **kwargs).arguments
        if not (folder / f"{named['cache_key']}{_NOTE}").exists():
            write(named["cache_key"], 0.0, named["module_name"], named["backend"], executable)
        return executable

    if compile_and_share is not None:
        compiler._compile_and_share_module = wraps(compile_and_share)(share)  # JAX keeps programs in its attribute
    compilation_cache.get_cache_key = get_cache_key
    compiler._cache_write = write
    return programs


def agree(folder: Path, gather: Callable[[str], Iterable[str]]) -> None:
    """Keep only the entries that are whole, and of programs that every rank has. Every rank must call it at its start.

    gather: gives the text of this rank, and returns the texts of all ranks.
    """
    keys: dict[str, list[str]] = {}  # by program
    for program, key in _whole(folder):
        keys.setdefault(program, []).append(key)
    mine = {f"{program}x{len(found)}": found for program, found in keys.items()}
    shared = set[str].intersection(*(set(text.split()) for text in gather(" ".join(sorted(mine)))))
    kept = {key for name in shared for key in mine[name]}
    for suffix in (_NOTE, _ENTRY):
        for file in sorted(folder.glob(f"*{suffix}")):
            if file.name.removesuffix(suffix) not in kept:
                log.warning("deleting %s of the compilation cache: it is not whole, or not all ranks have it", file)
                file.unlink()


def _whole(folder: Path) -> Iterable[tuple[str, str]]:
    """(program, key) of each entry that is as its note says."""
    for note in folder.glob(f"*{_NOTE}"):
        key = note.name.removesuffix(_NOTE)
        program, _, digest = note.read_text().partition(" ")
        entry = folder / f"{key}{_ENTRY}"
        if entry.exists() and _digest(entry.read_bytes()) == digest:
            yield program, key


def _note(folder: Path, key: str, program: str) -> None:
    entry, partial = folder / f"{key}{_ENTRY}", folder / f"{key}.partial"
    partial.write_text(f"{program} {_digest(entry.read_bytes())}")
    partial.replace(folder / f"{key}{_NOTE}")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


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
        for entry in self._folder.glob(f"{named[1]}-*{_ENTRY}"):
            log.warning("deleting the unreadable cache entry %s", entry)
            entry.unlink(missing_ok=True)

"""Which cache entries a warning of JAX deletes. That JAX warns so is tested in test_jax_group.py."""

from __future__ import annotations

import inspect
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tinkerflow.backend.pool.compile_cache import CacheMender, agree, folder_of, write_with_notes


@pytest.mark.parametrize(
    ("text", "deleted"),
    [
        (
            "compiler.py:782: UserWarning: Error reading persistent compilation cache entry for 'jit_step': E: x",
            {"jit_step-1-cache"},
        ),
        ("Error reading persistent compilation cache entry for 'jit_other': E: x", set()),
        ("Error writing persistent compilation cache entry for 'jit_step': E: x", set()),
        ("Error reading persistent compilation cache entry for '../jit_step': E: x", set()),
        ("something else", set()),
    ],
)
def test_only_what_the_warning_names_is_deleted(tmp_path: Path, text: str, deleted: set[str]) -> None:
    names = {"jit_step-1-cache", "jit_step_more-2-cache", "jit_step-1-atime", "jit_forward-3-cache"}
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    record = logging.LogRecord("py.warnings", logging.WARNING, "", 0, "%s", (text,), None)
    CacheMender(tmp_path).emit(record)
    assert {p.name for p in tmp_path.iterdir()} == names - deleted


class Compiler:
    """As `jax._src.compiler` of a version that writes what rank 0 compiles."""

    def __init__(self) -> None:
        self._cache_write: Any = None


class Computation:
    """As JAX hands a program over; `operation` is its own."""

    def __init__(self, text: str) -> None:
        self.operation = self
        self.get_asm = lambda enable_debug_info: text


class Cache:
    """As `jax._src.compilation_cache`, with keys that depend on the rank."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.get_cache_key: Any = lambda computation, *args: f"jit_{computation.get_asm(False)}-{folder.name}"

    def put_executable_and_time(self, key: str, *entry: Any) -> None:
        (self.folder / f"{key}-cache").write_text(str(entry))


def write(folder: Path, *programs: str, arguments: int = 0) -> Path:
    """Compile `programs` with a cache in `folder`. arguments: what JAX gives beside the executable."""
    compiler, cache = Compiler(), Cache(folder)
    keys = write_with_notes(folder, compiler, cache)
    for program in programs:
        key = cache.get_cache_key(Computation(program), "devices", "options", "backend")
        compiler._cache_write(key, 1.5, f"jit_{program}", "backend", f"executable of {program}", *[()] * arguments)
    assert len(keys) == len(programs)
    return folder


def names(folder: Path) -> set[str]:
    return {path.name.partition("-")[0] for path in folder.iterdir()}


def agreed(*folders: Path) -> list[set[str]]:
    """What is left on each rank."""
    texts: list[str] = []
    for folder in folders:  # every rank's text, before any of them deletes
        with suppress(StopIteration):
            agree(folder, lambda text: [texts.append(text), next(iter(()))])  # type: ignore[func-returns-value]
    for folder in folders:
        agree(folder, lambda text: texts)
    return [names(folder) for folder in folders]


@pytest.mark.parametrize("arguments", [1, 0])
def test_every_rank_keeps_what_all_ranks_have_whole(tmp_path: Path, arguments: int) -> None:
    """arguments: 1 with JAX 0.10, 0 with newer versions."""
    one = write(tmp_path / "one", "a", "b", "c", "d", arguments=arguments)
    two = write(tmp_path / "two", "d", "c", "b", "a", arguments=arguments)
    assert agreed(one, two) == [{"jit_a", "jit_b", "jit_c", "jit_d"}] * 2
    (two / "jit_a-two-cache").unlink()  # lost
    (one / "jit_b-one-cache").write_text("cut")
    (two / "jit_c-two-program").unlink()
    assert agreed(one, two) == [{"jit_d"}] * 2
    assert agreed(one, write(tmp_path / "three")) == [set()] * 2  # a new host


def test_a_rank_writes_what_rank_0_compiled_for_it(tmp_path: Path) -> None:
    def compile_and_share(backend: str, computation: Computation, module_name: str, cache_key: str) -> str:
        return f"executable of {cache_key}"

    compile_and_share.modules_cache = {}
    compiler, cache = Compiler(), Cache(tmp_path / "one")
    compiler._compile_and_share_module = compile_and_share
    write_with_notes(cache.folder, compiler, cache)
    key = cache.get_cache_key(Computation("a"), "devices")
    for _ in range(2):
        shared = compiler._compile_and_share_module("backend", Computation("a"), "jit_a", cache_key=key)
        assert shared == "executable of jit_a-one"
    assert {path.name for path in cache.folder.iterdir()} == {"jit_a-one-cache", "jit_a-one-program"}
    assert compiler._compile_and_share_module.modules_cache is compile_and_share.modules_cache


def test_a_program_with_pointers_of_its_process_is_not_kept(tmp_path: Path) -> None:
    compiler, cache = Compiler(), Cache(tmp_path / "one")
    write_with_notes(cache.folder, compiler, cache)
    compiler._cache_write("key", 1.5, "jit_step", "backend", "executable", (print,))
    assert not names(cache.folder)


def test_a_jax_that_writes_otherwise_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = Cache(tmp_path / "one")
    key_of = cache.get_cache_key
    assert write_with_notes(cache.folder, object(), cache) == {}
    assert cache.get_cache_key is key_of
    assert caplog.messages == [
        "this version of JAX writes its compilation cache otherwise: this rank compiles at every start"
    ]


def test_the_functions_that_are_replaced_are_there() -> None:
    from jax._src import compilation_cache, compiler

    assert callable(compiler._cache_write) and callable(compilation_cache.get_cache_key)
    parameters = inspect.signature(compiler._compile_and_share_module).parameters
    assert {"backend", "module_name", "cache_key"} <= set(parameters)
    assert compiler._compile_and_share_module.modules_cache == {}


def test_groups_of_several_processes_have_folders_of_their_own(tmp_path: Path) -> None:
    def folder(name: str, config: str, processes: int, rank: int) -> Path:
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "config.json").write_text(config)
        return folder_of(str(tmp_path), str(tmp_path / name), processes, rank)

    assert folder("a", "1", 1, 0) == tmp_path
    found = [folder("a", "1", 2, 0), folder("a", "1", 2, 1), folder("a", "1", 4, 0), folder("a", "2", 2, 0)]
    assert len({*found, folder("b", "1", 2, 0)}) == 5
    assert found[0] == folder("a", "1", 2, 0)

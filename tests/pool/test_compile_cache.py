"""Which cache entries a warning of JAX deletes. That JAX warns so is tested in test_jax_group.py."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from tinkerflow.backend.pool.compile_cache import CacheMender, write_here


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


class Cache:
    """As `jax._src.compilation_cache`."""

    def __init__(self) -> None:
        self.put: list[tuple[Any, ...]] = []

    def put_executable_and_time(self, *entry: Any) -> None:
        self.put.append(entry)


def test_every_rank_writes_with_this_jax_and_with_newer_ones(caplog: pytest.LogCaptureFixture) -> None:
    compiler, cache = Compiler(), Cache()
    write_here(compiler, cache)
    compiler._cache_write("key", 1.5, "jit_step", "backend", "executable", ())  # 0.10
    compiler._cache_write("key", 1.5, "jit_step", "backend", "executable", (print,))
    compiler._cache_write("key", 2.5, "jit_step", "backend", "executable")  # 0.11
    assert cache.put == [("key", "jit_step", "executable", "backend", seconds) for seconds in (1, 2)]
    assert not caplog.messages
    write_here(object(), cache)
    assert caplog.messages == [
        "this version of JAX writes its compilation cache otherwise: this rank compiles at every start"
    ]


def test_the_function_that_is_replaced_is_there() -> None:
    from jax._src import compiler

    assert callable(compiler._cache_write)

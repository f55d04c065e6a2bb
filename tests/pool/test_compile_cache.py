"""Which cache entries a warning of JAX deletes. That JAX warns so is tested in test_jax_group.py."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tinkerflow.backend.pool.compile_cache import CacheMender


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

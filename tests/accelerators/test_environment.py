"""The folder, the packages and the pinned versions of the compilers' environment."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.accelerators import environment


def test_tool_environment_is_in_the_cache_and_depends_on_the_requirements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = environment.place()
    assert before == environment.place()
    assert before.parent == tmp_path / "tinkerflow"
    assert environment.python().parent.parent == before
    other = tmp_path / "requirements.txt"
    other.write_text(environment.REQUIREMENTS.read_text() + "libtpu==0.0.53\n")
    monkeypatch.setattr(environment, "REQUIREMENTS", other)
    assert environment.place() != before


def test_packages_are_those_of_the_compiler_environment() -> None:
    assert str(environment.packages()) in sys.path
    assert (environment.packages() / "jax").is_dir()


def test_compilers_use_the_pinned_jax() -> None:
    pins = dict(line.split("==") for line in environment.CONSTRAINTS.read_text().splitlines() if "==" in line)
    assert f"jax-cuda13-plugin[with-cuda]=={pins['jax']}" in environment.REQUIREMENTS.read_text().splitlines()

"""Folders and names that survive a power cut: what was flushed, and when."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tinkerflow.backend.core.disk import make_folder


def test_each_new_folder_is_flushed_in_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[Path] = []
    sync = os.fsync

    def synced(descriptor: int) -> None:
        flushed.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        sync(descriptor)

    monkeypatch.setattr("os.fsync", synced)
    make_folder(tmp_path / "a" / "b")
    assert flushed == [tmp_path, tmp_path / "a"]
    assert (tmp_path / "a" / "b").is_dir()
    make_folder(tmp_path / "a" / "b")
    assert len(flushed) == 2

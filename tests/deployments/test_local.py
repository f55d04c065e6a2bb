"""`tinkerflow.local` before it starts anything. With a service: tests/e2e/test_local.py."""

from __future__ import annotations

from pathlib import Path

import pytest

import tinkerflow


def test_invalid_setting_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="colour"), tinkerflow.local(data_dir=tmp_path, colour="red"):
        pass
    assert not list(tmp_path.iterdir())


def test_package_has_no_other_attributes() -> None:
    with pytest.raises(AttributeError, match="'tinkerflow' has no attribute 'remote'"):
        _ = tinkerflow.remote

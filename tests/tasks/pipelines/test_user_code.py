"""Rewards and environments that cannot be imported: the error gives the reason and the fix."""

from __future__ import annotations

import site
import sys
import xml
from collections.abc import Iterator
from pathlib import Path

import pytest

from tinkerflow.backend.core.errors import UserError
from tinkerflow.tasks.pipelines.user_code import import_named


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with modules, first on the import path."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "their_rewards.py").write_text("def letters(facts, answer):\n    return 1.0\n")
    (tmp_path / "their_broken.py").write_text("import math\n\nmath.no\n")
    (tmp_path / "their_needs.py").write_text("import missing_library\n")
    (tmp_path / "their_exit.py").write_text("raise SystemExit('bye')\n")
    (tmp_path / "their_typo.py").write_text("def letters(:\n")
    (tmp_path / "their_package").mkdir()
    (tmp_path / "their_package" / "__init__.py").touch()
    (tmp_path / "their_package" / "inner.py").touch()
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("their_")]:
        del sys.modules[name]


def refused(path: str) -> str:
    with pytest.raises(UserError) as raised:
        import_named("reward", path)
    return raised.value.message


def test_invalid_path_is_answered_with_similar_names_and_folders(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(site.getsitepackages()[0] + "/grpc_tools/_proto")  # as an import of grpc_tools adds it
    assert callable(import_named("reward", "their_rewards:letters"))
    error = refused("their_reward:letters")
    assert error.startswith("reward 'their_reward:letters': there is no module 'their_reward'")
    assert "(did you mean 'their_rewards'?); searched " + str(folder) in error and "site-packages" not in error
    error = refused("their_package.iner:f")
    assert f"no module 'their_package.iner' (did you mean 'inner'?); searched {folder / 'their_package'}" in error
    error = refused("xml.iner:f")
    assert error.endswith(f"no module 'xml.iner'; searched {Path(xml.__file__).parent}")
    assert refused("their_rewards.py:letters").endswith("without .py: write their_rewards:letters")
    file = folder / "their_rewards.py"
    assert refused("their_rewards:leters").endswith(f"{file} has no 'leters' (did you mean 'letters'?)")


def test_failing_module_names_its_line(folder: Path) -> None:
    failed = "the module fails when it is imported: "
    assert f"{failed}AttributeError: module 'math' has no attribute 'no' ({folder}/their_broken.py:3)" in refused(
        "their_broken:f"
    )
    error = refused("their_needs:f")
    assert f"{failed}ModuleNotFoundError: No module named 'missing_library' ({folder}/their_needs.py:1)" in error
    assert f"{failed}SystemExit: bye ({folder}/their_exit.py:1)" in refused("their_exit:f")
    assert f"{failed}SyntaxError: " in (error := refused("their_typo:f")) and "(their_typo.py, line 1)" in error

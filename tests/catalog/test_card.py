"""The license that a model card states; the rest of cards is tested with runs (tests/flows/test_fork.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tinkerflow.backend.catalog.card import license_of


@pytest.mark.parametrize(
    ("files", "stated"),
    [
        ({"README.md": "---\nlicense: apache-2.0\ntags: [x]\n---\n# Model\n"}, ("apache-2.0", "its README.md")),
        ({"README.md": "---\nlicense: other\nlicense_name: gemma\n---\n"}, ("gemma", "its README.md")),
        ({"README.md": "# No header\n", "LICENSE.txt": "\n  MIT License\n"}, ("MIT License", "its file LICENSE.txt")),
        ({"README.md": "---\n[broken\n---\n", "LICENSE": "MIT"}, ("MIT", "its file LICENSE")),
        ({}, ("", "its folder has no README.md or LICENSE that states it")),
    ],
)
def test_the_license_is_that_of_the_readme_or_of_the_license_file(
    tmp_path: Path, files: dict[str, str], stated: tuple[str, str]
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert license_of(tmp_path) == stated

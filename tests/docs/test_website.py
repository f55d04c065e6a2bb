"""The website is built from the pages without a warning, and loads nothing from other hosts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.docs.website import build, page_map

pytest.importorskip("zensical", reason="pip install '.[docs]'")


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("site"))


def test_every_page_is_built_and_in_the_navigation(html: Path) -> None:
    front = (html / "index.html").read_text()
    for entry in (entry for entries in page_map().values() for entry in entries):
        name = entry.file.removeprefix("../").removesuffix(".md")
        assert (html / name / "index.html").exists()
        assert (html / f"{name}.md").exists(), "llms.txt lists the Markdown"
        assert f'href="{name}/"' in front
    assert (html / "llms.txt").exists()


def test_pages_load_nothing_from_other_hosts(html: Path) -> None:
    for page in html.rglob("*.html"):
        text = page.read_text()
        loaded = re.findall(r"<(?:script|img|iframe)[^>]* src=\"([^\"]+)\"", text)
        loaded += re.findall(r"<link[^>]* rel=\"(?:stylesheet|preload|icon|preconnect)\"[^>]*>", text)
        assert loaded
        assert not [one for one in loaded if "//" in one], page


def test_pages_can_be_searched(html: Path) -> None:
    assert "tinkerflow blame" in (html / "search.json").read_text()

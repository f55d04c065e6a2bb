"""The website of the documentation: it is built without a warning, and served by the API."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.docs.website import build, page_map
from tests.e2e.browser import open_page
from tests.waiting import wait_for

from tinkerflow.api.console import render

TEXTS_OF_COMPONENTS = (
    "return [...document.querySelectorAll('*')].map((one) => one.shadowRoot?.textContent ?? '').join()"
)


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("zensical", reason="pip install '.[docs]'")
    return build(tmp_path_factory.mktemp("site"))


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A website of two pages, which the API serves."""
    folder = tmp_path / "website"
    (folder / "guide").mkdir(parents=True)
    (folder / "index.html").write_text("<h1>Welcome</h1><script>1</script>")
    (folder / "guide" / "index.html").write_text("<h1>Guide</h1>")
    (folder / "guide.md").write_text("# Guide")
    (tmp_path / "secret.html").write_text("of another folder")
    monkeypatch.setattr(render, "WEBSITE", folder)
    return folder


def test_documentation_is_readable_without_a_key(small: Path, start: Any, browse: Any) -> None:
    browser = browse(start(host="0.0.0.0", public_url="https://tune.example/ours/"))
    front = browser.get("/docs/")
    assert (front.status_code, front.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "Welcome" in front.text and front.headers["x-content-type-options"] == "nosniff"
    hashed = "'sha256-a4ayc/80/OGda4BO/1o/V0etpOqiLx1JwB5S3beHW0s='"
    assert f"script-src 'self' {hashed};" in front.headers["content-security-policy"]
    assert browser.get("/docs/guide/").text == "<h1>Guide</h1>" and browser.get("/docs/guide.md").text == "# Guide"
    assert [browser.get(path).headers["location"] for path in ("/docs", "/docs/guide")] == [
        "/ours/docs/",
        "/ours/docs/guide/",
    ]
    for missing in ("/docs/none", "/docs/none/", "/docs/guide/index", "/docs/..%2Fsecret.html", "/docs/%00"):
        assert browser.get(missing).status_code == 404, missing
    assert '<a href="/ours/docs/">Documentation</a>' in browser.get("/").text


def test_missing_documentation_shows_how_to_build_it(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(render, "WEBSITE", tmp_path / "none")
    answer = browser.get("/docs/settings/")
    assert answer.status_code == 404 and "python -m tests.docs.website" in answer.text
    assert "/docs/" not in browser.get("/").text


def test_every_page_is_built_and_in_the_navigation(html: Path) -> None:
    front = (html / "index.html").read_text()
    for entry in (entry for entries in page_map().values() for entry in entries):
        name = entry.file.removeprefix("../").removesuffix(".md")
        assert (html / name / "index.html").exists()
        assert (html / f"{name}.md").exists(), "llms.txt lists the Markdown"
        assert f'href="{name}/"' in front
    assert (html / "llms.txt").exists()
    assert "tinkerflow blame" in (html / "search.json").read_text()


def test_pages_load_nothing_from_other_hosts(html: Path) -> None:
    for page in html.rglob("*.html"):
        text = page.read_text()
        loaded = re.findall(r"<(?:script|img|iframe)[^>]* src=\"([^\"]+)\"", text)
        loaded += re.findall(r"<link[^>]* rel=\"(?:stylesheet|preload|icon|preconnect)\"[^>]*>", text)
        assert loaded
        assert not [one for one in loaded if "//" in one], page


def test_documentation_pages_are_accessible_and_can_be_searched(
    server: Any, html: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(render, "WEBSITE", html)
    with open_page(tmp_path / "chromium") as page:
        for path in ("", "pipelines/"):
            for width in (1400, 360):
                page.look(width=width)
                page.open(f"{server.url}/docs/{path}")
                for scheme in (0, 1):  # light and dark, chosen with the page's button
                    page.run(f"document.getElementById('__palette_{scheme}').click()")
                    assert page.barriers() == [], f"/docs/{path}, {width} wide, scheme {scheme}"
                assert page.run("return document.documentElement.scrollWidth") <= width
        page.look()
        page.open(f"{server.url}/docs/")
        page.click(".md-search__button")
        page.fill_active("blame")
        wait_for(lambda: "tinkerflow blame" in page.run(TEXTS_OF_COMPONENTS))
        assert page.complaints() == []

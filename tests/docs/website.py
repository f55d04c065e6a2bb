"""The documentation as a website: `python -m tests.docs.website` builds it, and the API serves it at `/docs/`.

Packages that are built from this checkout afterwards contain it.

The pages are those of `docs/`. `docs/index.md` is their map: its sections, in order, are the navigation, so each page
is listed in one place. The site loads no fonts and no scripts from other hosts.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.docs.pages import DOCS, ROOT

WEBSITE = ROOT / "api" / "console" / "website"
_CSS = "legible.css"
# The theme's own color of the current page in the navigation has too little contrast.
_LEGIBLE = """\
[data-md-color-scheme=default] { --md-accent-fg-color: #3346c8 }
[data-md-color-scheme=slate] { --md-accent-fg-color: #93a3ff }
"""
KINDS = ("Tutorials", "How-to guides", "Reference", "Explanation", "Project")


@dataclass(frozen=True)
class Entry:
    """A page in the map. file: relative to `docs/`. text: its subject."""

    title: str
    file: str
    text: str


def page_map() -> dict[str, list[Entry]]:
    """The entries of each section of `docs/index.md` that lists pages, in the order of KINDS."""
    sections = dict(re.findall(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", (DOCS / "index.md").read_text(), re.M | re.S))
    return {
        kind: [Entry(*found) for found in re.findall(r"^- \[(.+?)\]\((\S+?)\): (.+)$", sections[kind], re.M)]
        for kind in KINDS
    }


def summary() -> str:
    """The first paragraph of `docs/index.md`."""
    return " ".join((DOCS / "index.md").read_text().split("\n\n")[1].split())


def build(folder: Path) -> Path:
    """Build the site in `folder`/html and return that folder. CalledProcessError: the builder gives a warning."""
    pages, html = folder / "pages", folder / "html"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(DOCS, pages)
    for file in ROOT.glob("*.md"):
        if file.name != "README.md":
            shutil.copy(file, pages)
    for file in (*pages.rglob("*.md"), pages / "llms.txt"):
        above = "../" * len(file.relative_to(pages).parents)
        text = file.read_text().replace(f"]({above}", f"]({above.removesuffix('../')}")
        file.write_text(text.replace("](docs/", "](") if file.parent == pages else text)
    (pages / _CSS).write_text(_LEGIBLE)
    (folder / "mkdocs.yml").write_text(json.dumps(_config()))  # JSON is YAML
    builder = (sys.executable, "-m", "zensical", "build", "--strict", "--config-file", "mkdocs.yml")
    subprocess.run(builder, cwd=folder, check=True)
    for file in pages.rglob("*.md"):  # llms.txt lists the Markdown
        shutil.copy(file, html / file.relative_to(pages))
    return html


def _config() -> dict[str, object]:
    entries = {
        kind: [{entry.title: entry.file.removeprefix("../")} for entry in found] for kind, found in page_map().items()
    }
    palette = [
        {
            "scheme": scheme,
            "media": f"(prefers-color-scheme: {preferred})",
            "toggle": {"icon": f"material/{icon}", "name": f"Use {other} colors"},
        }
        for scheme, preferred, icon, other in (
            ("default", "light", "weather-night", "dark"),
            ("slate", "dark", "weather-sunny", "light"),
        )
    ]
    return {
        "site_name": "Tinkerflow",
        "site_description": summary(),
        "docs_dir": "pages",
        "site_dir": "html",
        "nav": [{"Tinkerflow": "index.md"}, *({kind: found} for kind, found in entries.items())],
        "theme": {
            "name": "material",
            "font": False,
            "palette": palette,
            "features": [
                "content.code.copy",
                "navigation.footer",
                "navigation.tabs",
                "navigation.top",
                "search.highlight",
            ],
        },
        "extra_css": [_CSS],
        "plugins": ["search"],
        "extra": {"generator": False},
        "markdown_extensions": [
            "attr_list",
            "tables",
            {"toc": {"permalink": True}},
            "pymdownx.highlight",
            "pymdownx.superfences",
        ],
    }


if __name__ == "__main__":
    built = build(ROOT / "build" / "site")
    shutil.rmtree(WEBSITE, ignore_errors=True)
    print(shutil.move(built, WEBSITE))

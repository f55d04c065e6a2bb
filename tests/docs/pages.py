"""The Markdown of the repository, and the names in it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def written() -> list[Path]:
    """The pages that users read: the Markdown files of docs/ and of the top level."""
    return sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md")])


def tracked() -> list[str]:
    """Every file that belongs to the repository: committed, or new and not ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.split("\n")
    return [name for name in found if name and (ROOT / name).is_file()]


def without_code_blocks(text: str) -> str:
    """`text` without its fenced code blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)


def links(text: str) -> list[str]:
    """Targets inside the repository of a page's links and images."""
    found = re.findall(
        r"\]\(([^)\s]+)\)|<img[^>]* src=\"([^\"]+)\"|<source[^>]* srcset=\"([^\"]+)\"", without_code_blocks(text)
    )
    targets = [next(filter(None, groups)) for groups in found]
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def anchors(text: str) -> set[str]:
    """The anchors that GitHub and MkDocs give to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", without_code_blocks(text), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def paths(text: str) -> set[str]:
    """Files and folders of the repository that a page names, as `backend/settings.py` or `tests/docs/`.

    Fenced code blocks do not count, because they show files of users.
    """
    rooms = "api|flows|tasks|backend|deployments|tests|docs|\\.ci|\\.package"
    return set(re.findall(rf"(?<![\w/.<-])((?:{rooms})/[\w./-]*\w/?)", without_code_blocks(text)))

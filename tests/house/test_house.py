from __future__ import annotations

from pathlib import Path

import pytest
from tests.house import commits, english


@pytest.mark.parametrize(
    ("subject", "body", "files", "problem"),
    [
        ("Share training time by project", "", ["a.py"], ""),
        ("Pass the owner to the pool", "", ["a.py"], ""),
        ("Shares training time by project", "", ["a.py"], "imperative"),
        ("Fixed a bug", "", ["a.py"], "imperative"),
        ("A cancelled prompt leaves nothing in its slot", "", ["a.py"], "imperative"),
        (
            "A cancelled prompt leaves nothing in its slot, also when its group is ended at that moment",
            "",
            [],
            "90 char",
        ),
        ("share training time", "", [], "capital"),
        ("Share training time.", "", [], "period"),
        ("Share training time by project", "", ["CHANGELOG.md"], "body"),
        ("Share training time by project", "Ten adapters get one share.", ["CHANGELOG.md"], ""),
    ],
)
def test_commit_messages(subject: str, body: str, files: list[str], problem: str) -> None:
    wrong = "; ".join(commits.problems(subject, body, files))
    assert problem in wrong if problem else not wrong


def test_prose_check_finds_translated_phrases(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("What is too much waits.\n\n    what is code is skipped here\n\nPages are zeroed before reuse.\n")
    prose = list(english.markdown_prose(page))
    assert [line for line, _ in prose] == [1, 5]
    module = tmp_path / "module.py"
    module.write_text('"""A page that is `what` it is."""\nX = 1  # told to end by a signal\n')
    texts = [sentence for _, text in english.python_prose(module) for sentence in english.sentences(text)]
    assert texts == ["A page that is X it is.", "told to end by a signal"]

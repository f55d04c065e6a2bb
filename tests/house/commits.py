"""Commit messages: `python -m tests.house.commits [RANGE]`, by default the commits since `SINCE`.

A subject is imperative and has at most 72 characters ("Share training time by project"). A commit that changes
CHANGELOG.md changes behavior, so its message has a body.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SINCE = "1dc6f9d"  # earlier messages follow no rule
LONGEST = 72
# The first word of a descriptive message: an article, a third person, a past tense or a gerund. Some imperatives have
# the same endings.
_IMPERATIVES = "pass|process|address|access|press|focus|discuss|bring|ring|string|embed|feed|need|speed|seed|shed"
_NOT_IMPERATIVE = re.compile(
    rf"(?i)^(?!(?:{_IMPERATIVES})\b)(?:an?|the|it|there|all|each|every|no|what|when|how|\w+(?:s|ed|ing))\b"
)


def problems(subject: str, body: str, files: list[str]) -> list[str]:
    """The problems of one commit message, as phrases. files: the paths that the commit changes."""
    wrong = []
    if len(subject) > LONGEST:
        wrong.append(f"the subject has {len(subject)} characters, at most {LONGEST} are allowed")
    if not subject[:1].isupper() or subject.endswith("."):
        wrong.append("the subject starts with a capital letter and ends without a period")
    if _NOT_IMPERATIVE.match(subject):
        wrong.append(f"the subject starts with an imperative, not with {subject.split(maxsplit=1)[0]!r}")
    if "CHANGELOG.md" in files and not body.strip():
        wrong.append("a change of CHANGELOG.md needs a body that explains the new behavior")
    return wrong


def main() -> None:
    """Print every wrong message; exit with 1 if there is one."""
    commits = sys.argv[1] if len(sys.argv) > 1 else f"{SINCE}..HEAD"
    known = subprocess.run(
        ["git", "rev-parse", "--quiet", "--verify", SINCE], cwd=ROOT, capture_output=True, check=False
    )
    if len(sys.argv) == 1 and known.returncode:
        print(f"commit messages were not checked: this clone does not have {SINCE}")
        return
    log = subprocess.run(
        ["git", "log", "--no-merges", "--name-only", "--format=%x00%h%x01%s%x01%b%x01", commits],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    wrong = []
    for entry in log.stdout.split("\0")[1:]:
        commit, subject, body, files = entry.split("\1")
        wrong += [f"{commit} {subject!r}: {problem}" for problem in problems(subject, body, files.split())]
    print("\n".join(wrong) or "all commit messages follow the rules")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()

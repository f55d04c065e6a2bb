"""Find prose that reads like a translation: `python -m tests.house.english [--list N] [PATH ...]`.

Counts sentences of docstrings, comments, long strings and Markdown, and names of tests, that match a pattern. Fails
when more than `MOST_CLAUSES` of 1,000 sentences have a clause as a noun, or more than `MOST` match any pattern. A match
is a place to look at, not a verdict. `--list N` prints N examples of each pattern.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_CLAUSES, MOST = 8, 45  # matches in 1,000 sentences
LEAST_WORDS = 4  # words of a sentence
LONG = 32  # words

CLAUSE = "a clause as a noun"
PATTERNS = {
    CLAUSE: r"(?:^|[,;:(] )(?:what|who|whoever|whatever)\b(?![^.]*\?)[^.,;]{3,}"
    r"|\b(?:is|are|of|from|by|with|than|in|for|to|and|or) what\b|\bthat which\b|\bthose who\b",
    "a machine that speaks": r"\b(?:says?|said|tells?|told|hears?|heard|asks?|asked) "
    r"(?:so|it|them|us|that|what|whether|which|how|when)\b|\b(?:is|are|was|were) told\b|\bby name\b",
    "a bookish word": r"\b(?:lest|anew|whom|thereof|therein|thereby|hitherto|nobody else|nought|upon"
    r"|beside(?! the point)|of late|by now|at once|so much|in place of|ceases?|hardly|whosoever|whoever)\b",
    "a clause with of which": r"\b(?:of|for|from|to|by|with) (?:which|whom|whose)\b",
    "a bare pronoun after a semicolon or colon": r"[;:] (?:it|they|this|that|these|those|one|both|others|such)\b",
    "an inverted clause": r"^(?:Of|Not|Nothing|Nobody|Never|Only|So|Such|Neither|Nor|Among|Without) [a-z]+[^.]{10,}"
    r"\b(?:is|are|was|were|has|have|does|do|may|can)\b",
    f"more than {LONG} words": rf"^(?:\S+\s+){{{LONG},}}\S+",
}


def sentences(text: str) -> Iterator[str]:
    """The sentences of a text, code in backticks replaced by X."""
    for part in re.split(r"(?<=[.!?])\s+|\n\s*\n|\n\s*[-*] ", re.sub(r"`[^`]*`", "X", text)):
        words = part.split()
        if len(words) >= LEAST_WORDS:
            yield " ".join(words)


def python_prose(path: Path) -> Iterator[tuple[int, str]]:
    """Docstrings, strings of a few words, names of functions as sentences, and comments, each with its line."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        elif isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(str(v.value) if isinstance(v, ast.Constant) else "X" for v in node.values)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name.removeprefix("test_").replace("_", " ")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("#! ")


def markdown_prose(path: Path) -> Iterator[tuple[int, str]]:
    """Paragraphs, without code, tables, headings and pictures."""
    text = re.sub(r"```.*?```", lambda code: "\n" * code[0].count("\n"), path.read_text(), flags=re.DOTALL)
    for paragraph in re.finditer(r"(?:^(?![ ]{4}|[|#<]|!\[).+\n?)+", text, flags=re.MULTILINE):
        yield text.count("\n", 0, paragraph.start()) + 1, paragraph[0]


def main() -> None:
    """Print the rates; exit with 1 if they are too high."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("paths", nargs="*", type=Path, help="files or folders [default: the whole repository]")
    parser.add_argument("--list", type=int, default=0, metavar="N", help="print N examples of each pattern")
    given = parser.parse_args()
    listed = subprocess.run(
        ["git", "ls-files", "--", *map(str, given.paths)], capture_output=True, text=True, check=True, cwd=ROOT
    )
    total, matches = 0, defaultdict[str, list[str]](list)
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.suffix not in (".py", ".md") or path.is_symlink() or name.endswith(("_pb2.py", "CHANGELOG.md")):
            continue
        for line, text in (python_prose if path.suffix == ".py" else markdown_prose)(path):
            for sentence in sentences(text):
                total += 1
                for pattern, expression in PATTERNS.items():
                    if re.search(expression, sentence):
                        matches[pattern].append(f"{name}:{line}: {sentence[:170]}")
    rates = {pattern: 1000 * len(matches[pattern]) / max(total, 1) for pattern in PATTERNS}
    for pattern, rate in rates.items():
        print(f"{rate:6.1f} of 1,000 sentences  {pattern}")
        for example in (
            matches[pattern][:: max(1, len(matches[pattern]) // given.list)][: given.list] if given.list else ()
        ):
            print(f"        {example}")
    print(f"{sum(rates.values()):6.1f} of 1,000 in all ({total} sentences)")
    if rates[CLAUSE] > MOST_CLAUSES or sum(rates.values()) > MOST:
        raise SystemExit(f"at most {MOST_CLAUSES} of 1,000 may have {CLAUSE}, and at most {MOST} may match in all")


if __name__ == "__main__":
    main()

"""The README's compatibility table: `python -m tests.compat.table` writes it anew."""

from __future__ import annotations

import importlib
from importlib.metadata import version

from tests.compat.refused import REFUSED
from tests.compat.registry import HERE, chunks, commands, methods, tests_of
from tests.compat.test_versions import VERSIONS

README = HERE.parents[1] / "README.md"
BEGIN, END = "<!-- compatibility: made by `python -m tests.compat.table` -->", "<!-- end of compatibility -->"


def cell(name: str) -> str:
    """What the table says of a name; empty when nothing is known of it."""
    if name in REFUSED:
        return f"refused: {REFUSED[name]}"
    return ", ".join(f"`{test.split('::')[1]}`" for test in tests_of(name))


def table() -> str:
    """The table, in Markdown: what it is, and the test that shows that it works, or why it is refused."""
    names = [*methods(), *commands(), *chunks()]
    refused = [name for name in names if name in REFUSED]
    lines = [
        BEGIN,
        f"Of SDK {version('tinker')}'s {len(names)} public methods, commands and kinds of prompt chunks, "
        f"{len(names) - len(refused)} work:",
        "the test named beside each (in `tests/compat`) calls it against the real service and checks what it does.",
        f"Training, saving, loading, sampling and listing give the same under SDKs {', '.join(VERSIONS)}.",
        "",
        "<details><summary>All of them</summary>",
        "",
        "| method, command or chunk | shown by |",
        "|---|---|",
        *(f"| `{name}` | {cell(name)} |" for name in names),
        "",
        "</details>",
        END,
    ]
    return "\n".join(lines)


def read_tests() -> None:
    """Import the room's tests, so that the registry knows what they declare."""
    for file in sorted(HERE.glob("test_*.py")):
        importlib.import_module(f"tests.compat.{file.stem}")


def rewritten(text: str) -> str:
    """The README `text` with its table made anew."""
    before, rest = text.split(BEGIN)
    return before + table() + rest.split(END)[1]


def main() -> None:
    """Write the table into the README."""
    read_tests()
    README.write_text(rewritten(README.read_text()))


if __name__ == "__main__":
    main()

"""The table of `docs/compatibility.md`, which `python -m tests.docs.generate` writes."""

from __future__ import annotations

import importlib
from importlib.metadata import version

from tests.compat.refused import ELSEWHERE, REFUSED
from tests.compat.registry import HERE, chunks, commands, methods, tests_of
from tests.compat.test_versions import VERSIONS


def cell(name: str) -> str:
    """The second cell of a name's row, or "" if no test exercises the name and no reason is given."""
    if name in REFUSED:
        return f"refused: {REFUSED[name]}"
    if name in ELSEWHERE:
        return ELSEWHERE[name]
    return ", ".join(f"`{test.split('::')[1]}`" for test in tests_of(name))


def table() -> str:
    """The table in Markdown: every name, with the tests that show that it works or the reason why it does not."""
    names = [*methods(), *commands(), *chunks()]
    working = [name for name in names if name not in REFUSED and name not in ELSEWHERE]
    lines = [
        f"Of SDK {version('tinker')}'s {len(names)} public methods, commands and kinds of prompt chunks, "
        f"{len(working)} work. The test in its row (in `tests/compat`) calls it against the real service and checks "
        "the result.",
        "",
        f"Training, saving, loading, sampling and listing give the same under SDKs {', '.join(VERSIONS)}.",
        "",
        "| method, command or chunk | shown by |",
        "|---|---|",
        *(f"| `{name}` | {cell(name)} |" for name in names),
    ]
    return "\n".join(lines)


def read_tests() -> None:
    """Import the folder's tests, which registers their declarations."""
    for file in sorted(HERE.glob("test_*.py")):
        importlib.import_module(f"tests.compat.{file.stem}")

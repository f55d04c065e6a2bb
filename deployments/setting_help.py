"""The descriptions and defaults of settings, for the help of commands.

Both are parsed from the text of `backend/settings.py`, because importing it takes 0.4 s of CPU time.
"""

from __future__ import annotations

import ast
from functools import cache
from inspect import cleandoc
from itertools import pairwise
from pathlib import Path
from typing import Any

_FILE = Path(__file__).parents[1] / "backend" / "settings.py"


def describe(name: str) -> tuple[str, Any]:
    """The description and the default of a setting. KeyError: there is no setting of this name."""
    node, text = _fields()[name]
    value, named = node, {}
    if isinstance(node, ast.Call):  # Field(8000, ge=0), Field(default=True, description="…") or Path("~/.tinkerflow")
        named = {word.arg: word.value for word in node.keywords}
        value = node.args[0] if node.args else named["default"]
    return text or ast.literal_eval(named["description"]), ast.literal_eval(value)


@cache
def _fields() -> dict[str, tuple[ast.expr, str]]:
    """The default of each setting, and the text below it."""
    tree = ast.parse(_FILE.read_text(encoding="utf-8"))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Settings")
    found = {}
    for node, after in pairwise(body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            found[node.target.id] = (node.value, cleandoc(str(text)))
    return found

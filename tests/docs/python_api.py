"""The public Python API: the names that users may import, with their docstrings."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
import textwrap
from typing import Any

# The only list of public names: test_pages.py compares it with the imports on all pages.
EXTENSION_POINTS = "Extension points"  # declared by their fields: users call none of their methods
PUBLIC = {
    "A service for a block of a program": {"tinkerflow": ("local",)},
    "Pipelines": {
        "tinkerflow.flows.pipelines": ("pipelines", "Pipeline"),
        "tinkerflow.tasks.pipelines.champions": ("champion", "promote", "Champion"),
    },
    "Rewards and environments": {
        "tinkerflow.tasks.pipelines.environments": ("Environment", "Reply", "EnvironmentUnavailableError"),
        "tinkerflow.tasks.pipelines.rows": ("Message",),
        "tinkerflow.tasks.pipelines.rewards": ("is_answer", "holds_answer"),
        "tinkerflow.tasks.pipelines.sandbox": ("run_python", "run_program", "Ran"),
    },
    "Tests of your own flows": {
        "tinkerflow.deployments.testing": ("tiny_service", "plain_calls", "prefect_harness", "TinyService"),
        "tinkerflow.deployments.cassettes.testing": ("cassette",),
        "tinkerflow.deployments.cassettes.play": ("play",),
    },
    EXTENSION_POINTS: {
        "tinkerflow.backend.spec.registry": ("registered",),
        "tinkerflow.backend.spec.losses": ("LossSpec", "TokenInput", "ConfigKey"),
        "tinkerflow.backend.spec.optimizers": ("OptimizerSpec",),
        "tinkerflow.backend.compute.models.family": ("Family",),
        "tinkerflow.backend.tracking.tracker": ("Tracker", "Writer"),
        "tinkerflow.api.chat.parsers": ("ParserSpec",),
        "tinkerflow.deployments.launching": ("Launcher", "Plan"),
    },
}


def reference() -> str:
    """Every public object with its signature, docstring and public methods, in Markdown."""
    parts = []
    for title, modules in PUBLIC.items():
        parts.append(f"## {title}")
        for module, names in modules.items():
            for name in names:
                thing = getattr(importlib.import_module(module), name)
                called = title != EXTENSION_POINTS or getattr(thing, "_is_protocol", False)
                parts += _described(name, thing, module, methods=called)
    return "\n\n".join(parts)


def _described(name: str, thing: Any, module: str, *, methods: bool = False) -> list[str]:
    """thing: a function, a class or a fixture of pytest. module: users import it from here; "" for a method."""
    thing = getattr(thing, "_get_wrapped_function", lambda: thing)()
    level, place = ("###", f"# {module}\n") if module else ("####", "")
    parts = [f"{level} `{name}`", f"```python\n{place}{_signature(thing)}```", _prose(thing)]
    if methods and inspect.isclass(thing):
        for member_name, member in vars(thing).items():
            method = member.fget if isinstance(member, property) else member
            if inspect.isfunction(method) and not member_name.startswith("_") and method.__doc__:
                parts += _described(f"{name}.{member_name}", method, "")
    return parts


def _prose(thing: Any) -> str:
    """The docstring, with each explained argument or field as a list item."""
    names = "|".join(thing.__annotations__)
    return re.sub(rf"(^|\.)\s*\b({names}): ", r"\1\n\n- `\2`: ", inspect.getdoc(thing) or "")


def _signature(thing: Any) -> str:
    """The head of a function, or of a class with its public fields, from the source."""
    head = ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0]
    assert isinstance(head, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    annotated = (node for node in head.body if isinstance(node, ast.AnnAssign) and isinstance(head, ast.ClassDef))
    fields = [node for node in annotated if not ast.unparse(node.target).startswith("_")]
    head.body = [*fields] or [ast.Expr(ast.Constant(...))]
    formatter = (sys.executable, "-m", "ruff", "format", "--line-length", "120", "-")
    return subprocess.run(formatter, input=ast.unparse(head), capture_output=True, text=True, check=True).stdout

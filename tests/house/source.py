"""Figures computed from the source."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOMS = ("api", "flows", "tasks", "backend", "deployments")
GENERATED = {"tinker_pb2.py", "tinker_pb2.pyi"}
MOST_PARAMETERS = 4  # a function with more parameters must document each of them

# One example of each kind of extension. A file that names it probably needs an edit for the next extension.
EXAMPLES = {
    "a token loss (cispo)": r"\bcispo\b",
    "an optimizer (Dimuon)": r"(?i)dimuon|\bmomentum\b|\bmuon\b",
    "a model family (Qwen3-MoE)": r"(?i)qwen3_?moe",
    "a pipeline (distill)": r"\bdistill\b",
    "a setting of the workers (decode_chunk)": r"(?<!def )\bdecode_chunk\b(?!\()",  # except for the sampler's method
    "a REST listing (audit events)": r"(?i)audit_?(view|page|log)|\baudit\.(events|page|list)|journal\.audit\b",
    "a store backend (GCS)": r"(?i)\bgcs\b|gcsblobs",
    "a pool command (DropSnapshot)": r"\bDropSnapshot\b",
    "a database column (when a result was read)": r"\bread_at\b",
    "a command of the command line (doctor)": r"\bdoctor\b",
}


def modules(tree: Path) -> list[Path]:
    """All Python files outside tests, except for generated ones."""
    return sorted(f for room in ROOMS for f in (tree / room).rglob("*.py") if f.name not in GENERATED)


def lines_outside_tests(tree: Path) -> int:
    """Lines of all Python files outside tests."""
    return sum(len(file.read_text().splitlines()) for file in modules(tree))


def lines_of_tests(tree: Path) -> int:
    """Lines of all Python files of the tests."""
    return sum(len(file.read_text().splitlines()) for file in (tree / "tests").rglob("*.py"))


def long_classes(tree: Path, most: int = 250) -> dict[str, int]:
    """The classes with more than `most` lines, each with its number of lines."""
    return {
        f"{file.relative_to(tree)} {node.name}": lines
        for file in modules(tree)
        for node in statements(file)
        if isinstance(node, ast.ClassDef) and (lines := (node.end_lineno or 0) - node.lineno + 1) > most
    }


def rooms(tree: Path) -> dict[str, tuple[int, int, int]]:
    """For each folder with Python files: its modules, and the arrows and circles between its children.

    An arrow is an import of one child by another; imports inside functions and for type checkers count.
    """
    folders = sorted({file.parent for file in modules(tree)})
    return {
        folder.relative_to(tree).as_posix(): (len(list(folder.glob("*.py"))), *_arrows_and_circles(tree, folder))
        for folder in folders
    }


def _arrows_and_circles(tree: Path, folder: Path) -> tuple[int, int]:
    prefix = ".".join(["tinkerflow", *folder.relative_to(tree).parts]) + "."
    graph: dict[str, set[str]] = {}
    for file in folder.rglob("*.py"):
        child = file.relative_to(folder).parts[0].removesuffix(".py")
        for node in statements(file):
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}." for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [f"{alias.name}." for alias in node.names]
            else:
                continue
            others = {name.removeprefix(prefix).split(".")[0] for name in names if name.startswith(prefix)}
            graph.setdefault(child, set()).update(
                other for other in others - {child} if (folder / other).is_dir() or (folder / f"{other}.py").is_file()
            )
    reached = {child: _reached(graph, child) for child in graph}
    circles = {
        frozenset({child, *(other for other in reached[child] if child in reached.get(other, ()))}) for child in graph
    }
    return sum(map(len, graph.values())), sum(len(circle) > 1 for circle in circles)


def _reached(graph: dict[str, set[str]], start: str) -> set[str]:
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        for other in graph.get(waiting.pop(), set()) - reached:
            reached.add(other)
            waiting.append(other)
    return reached


def files_that_name(tree: Path) -> dict[str, list[str]]:
    """For each kind of extension, the files whose code, without docstrings, names its example."""
    texts = {file: _code(file) for file in modules(tree)}
    return {
        change: [str(file.relative_to(tree)) for file, text in texts.items() if re.search(pattern, text)]
        for change, pattern in EXAMPLES.items()
    }


def class_names_used_twice(tree: Path) -> set[str]:
    """Names of classes that two or more modules define."""
    names = Counter(node.name for file in modules(tree) for node in statements(file) if isinstance(node, ast.ClassDef))
    return {name for name, count in names.items() if count > 1}


def undocumented(tree: Path) -> list[str]:
    """Public functions with five or more parameters whose docstring (or class's) does not mention all of them.

    Commands of the command line do not count, because their options have their own help.
    """
    found = []
    for file in modules(tree):
        for function, outer in _functions(_parse(file)):
            if function.name.startswith("_") and function.name != "__init__":
                continue
            if any(".command(" in ast.unparse(decorator) for decorator in function.decorator_list):
                continue
            given = function.args
            names = [
                a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs) if a.arg not in ("self", "cls")
            ]
            text = (ast.get_docstring(function) or "") + (ast.get_docstring(outer) or "" if outer else "")
            if len(names) > MOST_PARAMETERS and not all(_mentions(text, name) for name in names):
                found.append(f"{file.relative_to(tree)}:{function.lineno} {function.name}")
    return found


def untested(tree: Path) -> list[str]:
    """Modules that execute operations and have no test of their own name."""
    rooms = [tree / "tasks" / "execution", tree / "tasks"]
    room = next(r for r in rooms if r.is_dir())
    tests = {f.stem for f in (tree / "tests" / "tasks").rglob("test_*.py")}
    return [f.stem for f in sorted(room.glob("*.py")) if f.stem != "__init__" and f"test_{f.stem}" not in tests]


def _parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def statements(file: Path) -> Iterator[ast.AST]:
    """All statements of a file, including nested ones. A walk over expressions would take ten times as long."""
    waiting: list[ast.AST] = [_parse(file)]
    while waiting:
        node = waiting.pop()
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            waiting += getattr(node, part, ())
        yield node


def _code(file: Path) -> str:
    """The file's code without comments and docstrings."""
    tree = _parse(file)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            node.body[0] = ast.Pass()
    return ast.unparse(tree)


def _functions(
    tree: ast.AST, outer: ast.ClassDef | None = None
) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, ast.ClassDef | None]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node, outer
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, node)


def _mentions(text: str, name: str) -> bool:
    stem = re.sub(r"_[A-Z]\w*$", "", name)  # tokens_BT is mentioned as tokens, too
    return re.search(rf"\b{re.escape(stem)}", text) is not None

"""The layers point one way, all of it is imported as `tinkerflow`, and the top level holds what it should."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.house import source

ROOT = Path(__file__).parent.parent
ROOMS = ("api", "flows", "tasks", "backend", "deployments")
MAY_IMPORT = {
    "backend": {"backend"},
    "tasks": {"tasks", "backend"},
    "flows": {"flows", "tasks", "backend"},
    "api": {"api", "backend"},
    "deployments": {"deployments", "flows", "api", "tasks", "backend"},
}
JAX = {"jax", "jaxlib", "flax", "optax"}
MAY_NOT = {
    "backend": {"prefect", "fastapi", "starlette", "uvicorn", "tinker"},
    "tasks": {"fastapi"},
    "api": {"prefect"},
}


def modules() -> list[Path]:
    return sorted(p for room in ROOMS for p in (ROOT / room).rglob("*.py"))


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """What is executed when the module is loaded."""
    for child in ast.iter_child_nodes(node):
        only_for_types = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        if not only_for_types and not isinstance(child, ast.FunctionDef):
            yield child
            yield from statements(child)


def imports(path: Path, *, loaded: bool = False) -> set[str]:
    """The modules that a file imports; with `loaded`, not those that its functions import when they are called."""
    found: set[str] = set()
    tree = ast.parse(path.read_text())
    for node in statements(tree) if loaded else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            found |= {f"{module}.{alias.name}" for alias in node.names} if module == "tinkerflow" else {module}
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    names = imports(path)
    tops = {name.split(".")[0] for name in names}
    rooms = {name.split(".")[1] for name in names if name.startswith("tinkerflow.")}
    assert rooms & set(ROOMS) <= MAY_IMPORT[room]
    assert not tops & MAY_NOT.get(room, set())
    relative = path.relative_to(ROOT).as_posix()
    if relative.startswith(("backend/spec/losses/", "backend/spec/optimizers/")):
        assert not {name.split(".")[0] for name in imports(path, loaded=True)} & JAX
    elif not (
        relative.startswith("backend/compute/") or relative in ("backend/pool/worker.py", "backend/pool/jax_setup.py")
    ):
        assert not tops & JAX


@pytest.mark.parametrize(
    "path", [*modules(), *sorted((ROOT / "tests").rglob("*.py"))], ids=lambda p: str(p.relative_to(ROOT))
)
def test_everything_of_ours_is_imported_as_tinkerflow(path: Path) -> None:
    assert not {name.split(".")[0] for name in imports(path)} & set(ROOMS)


def test_importing_tinkerflow_loads_nothing_else() -> None:
    code = "import sys; before = set(sys.modules); import tinkerflow; print(sorted(set(sys.modules) - before))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "['tinkerflow']"


@pytest.mark.parametrize(
    "room",
    [
        "api",
        "flows",
        "tasks",
        "tasks.pipelines",
        "backend.pool",
        "backend.journal",
        "backend.store",
        "backend.wire",
        "backend.spec.optimizers",
    ],
)
def test_importing_a_room_does_not_load_jax(room: str) -> None:
    code = f"import tinkerflow.{room}, sys; print(sorted(set(sys.modules) & {JAX!r}))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert out.stdout.strip() == "[]"


def test_top_level_is_the_agreed_one() -> None:
    tracked = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()
    tops = {name.split("/")[0] for name in tracked if not name.startswith(".")}
    papers = {"README.md", "LICENSE", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "docs"}
    assert tops <= {*ROOMS, *papers, "tests", "pyproject.toml", "constraints.txt"}


def test_no_module_is_too_long_to_hold_one_idea() -> None:
    long = {
        str(p.relative_to(ROOT)): n
        for p in modules()
        if p.name != "tinker_pb2.py" and (n := len(p.read_text().splitlines())) > 600
    }
    assert not long


def test_constraints_name_no_host() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = [line for line in lines if line and not line.startswith("#")]
    assert pinned
    assert all("==" in line and "/" not in line and "@" not in line for line in pinned)


def test_no_class_name_is_used_twice() -> None:
    assert source.class_names_used_twice(ROOT) == set()

"""Imports point one way, between rooms and inside them; everything is imported as `tinkerflow`."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest
from tests.house import source

ROOT = Path(__file__).parent.parent
ROOMS = ("api", "flows", "tasks", "backend", "deployments")

# Each room may import only rooms of earlier lines. Rooms of one line do not import each other. Imports inside functions
# and for type checkers count.
ORDERS: Mapping[str, tuple[str, ...]] = {
    "": ("backend", "tasks", "flows api", "deployments"),
    "backend": (
        "core",
        "supervise spec",
        "settings",
        "compute store journal",
        "wire tracking service",
        "pool",
        "catalog",
    ),
    "api": (
        "schemas bodies bytes openapi text tokens trace",
        "errors metrics",
        "counted hosts",
        "connections identity",
        "sampler_sessions",
        "call",
        "links submit",
        "checkpoints",
        "endpoints",
        "chat",
        "routes console",
        "app",
        "serve",
    ),
    "backend/compute": (
        "platforms",
        "mesh compiles",
        "warming",
        "weights",
        "kernels",
        "models",
        "training",
        "sampler",
        "planning",
        "adapter_programs",
        "executor",
    ),
}
# Rooms and packages that a room must not import, although the order allows it.
MAY_NOT: Mapping[str, set[str]] = {
    "api": {"tasks", "prefect"},
    "tasks": {"fastapi"},
    "backend": {"prefect", "fastapi", "starlette", "uvicorn", "tinker"},
    "backend/pool": {"tinkerflow.backend.journal", "tinkerflow.backend.wire"},
    "backend/compute": {"tinkerflow.backend.settings"},
}
JAX = {"jax", "jaxlib", "flax", "optax"}
HEAVY = {"fastapi", "prefect", "torch", "transformers"}
SEE_TORCH = "import sys; sys.modules.pop('torch', None)"  # tests/without_torch hides torch
# Classes of more than 250 lines, each with the reason.
LONG_CLASSES = {
    "backend/settings.py Settings": "the table of all settings: one field, type, bound and help text after the other",
}
MAY_LOAD_JAX = ("backend/compute/", "backend/pool/worker.py", "backend/pool/jax_setup.py")


def modules(*folders: str) -> list[Path]:
    return sorted(p for room in folders or ROOMS for p in (ROOT / room).rglob("*.py"))


def at_loading(node: ast.AST) -> Iterator[ast.AST]:
    """The statements that are executed when the module is loaded."""
    for child in ast.iter_child_nodes(node):
        only_for_types = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        if not only_for_types and not isinstance(child, ast.FunctionDef):
            yield child
            yield from at_loading(child)


@cache
def imports(path: Path, *, loaded: bool = False) -> frozenset[str]:
    """The modules that a file imports. loaded: only those that are imported when the file is loaded."""
    names: set[str] = set()
    for node in at_loading(ast.parse(path.read_text())) if loaded else source.statements(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {_module(f"{node.module}.{alias.name}") for alias in node.names}
    return frozenset(names)


def _module(name: str) -> str:
    """`name` if it is a module of ours or foreign, otherwise the module that defines it."""
    if not name.startswith("tinkerflow."):
        return name
    parts = name.split(".")
    while len(parts) > 1 and not _file(parts):
        parts.pop()
    return ".".join(parts)


def _file(parts: list[str]) -> bool:
    path = ROOT.joinpath(*parts[1:])
    return path.with_suffix(".py").is_file() or path.is_dir()


def arrows(folder: str) -> dict[str, dict[str, str]]:
    """For each child of a folder (a module or a room): the siblings that it imports, each with a file that does."""
    prefix = ".".join(["tinkerflow", *filter(None, folder.split("/"))]) + "."
    graph: dict[str, dict[str, str]] = {}
    for path in modules(*([folder] if folder else ROOMS)):
        own = path.relative_to(ROOT / folder).parts[0].removesuffix(".py")
        for name in imports(path):
            if name + "." == prefix:
                other = "__init__"
            elif name.startswith(prefix):
                other = name.removeprefix(prefix).split(".")[0]
            else:
                continue
            if other != own:
                graph.setdefault(own, {}).setdefault(other, path.relative_to(ROOT).as_posix())
    return graph


def circle(graph: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Nodes that import each other in a circle, or [] if there is no circle."""
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        done.add(node)
        return next((found for other in graph.get(node, ()) if (found := visit(other, [*path, node]))), [])

    return next((found for node in graph if (found := visit(node, []))), [])


def folders() -> list[str]:
    return ["", *sorted({path.parent.relative_to(ROOT).as_posix() for path in modules()})]


@pytest.mark.parametrize("folder", ORDERS)
def test_rooms_import_only_earlier_rooms(folder: str) -> None:
    place = {room: number for number, line in enumerate(ORDERS[folder]) for room in line.split()}
    graph = {room: others for room, others in arrows(folder).items() if room != "__init__"}
    assert set(graph) <= set(place)
    wrong = [
        f"{file} imports {other}"
        for room, others in graph.items()
        for other, file in others.items()
        if other != "__init__" and place[other] >= place[room]
    ]
    assert not wrong


def test_folders_have_no_import_cycles() -> None:
    circles = {folder: found for folder in folders() if (found := circle(arrows(folder)))}
    assert not circles


def test_routes_do_not_import_each_other() -> None:
    assert not {route: others for route, others in arrows("api/routes").items() if route != "__init__"}


def test_rooms_do_not_import_excluded_packages() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for room, never in MAY_NOT.items()
        for path in modules(room)
        for name in imports(path)
        for no in never
        if f"{name}.".startswith((f"{no}.", f"tinkerflow.{no}."))
    ]
    assert not wrong


def test_prefect_is_imported_only_in_allowed_modules() -> None:
    """The engine reports to the protocols of flows/observers.py; only its wiring (flows/engine.py) names Prefect."""
    may = ("flows/prefect/", "flows/pipelines/", "tasks/pipelines/", "deployments/")
    wrong = []
    for path in modules():
        relative, ours = path.relative_to(ROOT).as_posix(), "tinkerflow.flows.prefect"
        prefect = {name for name in imports(path) if name.split(".")[0] == "prefect"}
        mirror = {name for name in imports(path) if f"{name}.".startswith(f"{ours}.") and relative != "flows/engine.py"}
        if not relative.startswith(may) and prefect | mirror:
            wrong.append(f"{relative} imports {', '.join(sorted(prefect | mirror))}")
    assert not wrong


def test_jax_is_imported_only_by_compute_and_workers() -> None:
    wrong = []
    for path in modules():
        relative = path.relative_to(ROOT).as_posix()
        if relative.startswith(MAY_LOAD_JAX):
            continue
        formulas = relative.startswith(("backend/spec/losses/", "backend/spec/optimizers/"))
        wrong += [relative for name in imports(path, loaded=formulas) if name.split(".")[0] in JAX]
    assert not wrong


def test_project_modules_are_imported_as_tinkerflow() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules(*ROOMS, "tests")
        for name in imports(path)
        if name.split(".")[0] in ROOMS
    ]
    assert not wrong


def test_rooms_import_names_that_a_room_lists() -> None:
    """`__all__` of a room's `__init__` lists the names that other rooms import from it."""
    wrong = []
    for path in modules():
        for name in imports(path):
            if not name.startswith("tinkerflow.backend."):
                continue
            room, _, module = name.removeprefix("tinkerflow.").rpartition(".")
            folder = ROOT.joinpath(*room.split("."))
            if folder == ROOT / "backend" or folder in path.parents or not module:
                continue
            listed = _listed(folder / "__init__.py")
            if listed and module not in listed and (folder / f"{module}.py").is_file():
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong


def _listed(init: Path) -> set[str]:
    for node in ast.parse(init.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


def test_importing_tinkerflow_loads_no_other_module() -> None:
    code = "import sys; before = set(sys.modules); import tinkerflow; print(sorted(set(sys.modules) - before))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "['tinkerflow']"


@pytest.mark.parametrize(
    ("names", "without"),
    [
        ("api flows tasks tasks.pipelines backend.pool backend.journal backend.store backend.wire", JAX),
        (
            "backend.compute.executor backend.pool.worker",
            {*HEAVY, "google.protobuf", "fsspec", "gcsfs", "pyrage", "sqlalchemy"},
        ),
        ("flows.engine", {"prefect"}),  # unless it is to be used
        ("backend.catalog.model_card", {*JAX, "torch"}),
        ("backend.spec.commands", {*JAX, "google.protobuf", "fsspec", "pydantic", "msgpack"}),
        ("backend.spec.losses backend.spec.optimizers", {*JAX, "google.protobuf", "pydantic"}),
        (
            "deployments.cassettes.play deployments.cassettes.testing",
            {*JAX, *HEAVY, "sqlalchemy", "pydantic", "numpy", "httpx"},
        ),
    ],
)
def test_modules_load_only_their_imports(names: str, without: set[str]) -> None:
    code = "; ".join(
        [SEE_TORCH, *(f"import tinkerflow.{name}" for name in names.split()), "print(sorted(sys.modules))"]
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert not without & set(ast.literal_eval(done.stdout))


def test_top_level_has_the_agreed_folders() -> None:
    tracked = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()
    tops = {name.split("/")[0] for name in tracked if not name.startswith(".")}
    papers = {"README.md", "LICENSE", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "docs"}
    assert tops <= {*ROOMS, *papers, "tests", "pyproject.toml", "constraints.txt"}


def test_no_module_is_too_long() -> None:
    lengths = {
        str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in modules() if p.name != "tinker_pb2.py"
    }
    assert not {name: length for name, length in lengths.items() if length > 600}


def test_no_class_is_too_long() -> None:
    assert set(source.long_classes(ROOT)) == set(LONG_CLASSES)


def test_constraints_name_no_host() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = [line for line in lines if line and not line.startswith("#")]
    assert pinned
    assert all("==" in line and "/" not in line and "@" not in line for line in pinned)


def test_class_names_are_unique() -> None:
    assert source.class_names_used_twice(ROOT) == set()

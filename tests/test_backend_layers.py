"""Inside `backend` the layers point one way: spec, then commands, then the rooms, which do not know each other."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from tests.test_layers import ROOT, imports

# They know no room.
LEAVES = {"errors", "ids", "disk", "encryption", "clock", "retry", "processes", "supervise"}
MAY_IMPORT = {
    "spec": {"errors"},
    "checkpoint": {"spec", "errors", "ids"},
    "commands": {"spec", "checkpoint"},
    "wire": {"spec", "commands", "checkpoint", "encryption", "errors", "ids"},
    "compute": {"spec", "commands", "errors", "processes"},
    "pool": {
        "spec",
        "checkpoint",
        "commands",
        "store",
        "errors",
        "processes",
        "retry",
        "supervise",
    },  # store: pool/transfers.py, late
    "journal": {"spec", "commands", "checkpoint", "errors", "ids", "clock", "retry"},
    "store": {"spec", "commands", "checkpoint", "disk", "encryption", "errors", "ids", "clock", "retry"},
}


def files(room: str) -> list[Path]:
    folder = ROOT / "backend" / room
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


@pytest.mark.parametrize(
    ("room", "path"),
    [(room, path) for room in MAY_IMPORT for path in files(room)],
    ids=lambda value: value.relative_to(ROOT).as_posix() if isinstance(value, Path) else "",
)
def test_a_room_imports_what_is_below_it(room: str, path: Path) -> None:
    parts = [name.split(".") for name in imports(path) if name.startswith("tinkerflow.backend")]
    assert {part[2] for part in parts if len(part) > 2} <= MAY_IMPORT[room] | {room}


@pytest.mark.parametrize("room", sorted(LEAVES))
def test_a_leaf_imports_no_room(room: str) -> None:
    for path in files(room):
        parts = [name.split(".") for name in imports(path) if name.startswith("tinkerflow.backend")]
        assert not {part[2] for part in parts if len(part) > 2} & MAY_IMPORT.keys(), path


@pytest.mark.parametrize(
    ("module", "without"),
    [
        ("tinkerflow.backend.compute.executor", {"google.protobuf", "fsspec", "gcsfs", "pyrage", "sqlalchemy"}),
        ("tinkerflow.backend.pool.worker", {"google.protobuf", "fsspec", "gcsfs", "pyrage", "sqlalchemy"}),
        ("tinkerflow.backend.commands", {"jax", "google.protobuf", "fsspec", "pydantic", "msgpack"}),
        ("tinkerflow.backend.spec.losses", {"jax", "optax", "google.protobuf", "pydantic"}),
    ],
)
def test_loading_a_module_loads_no_more_than_it_needs(module: str, without: set[str]) -> None:
    code = f"import sys; from {module} import *; print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert not without & set(ast.literal_eval(done.stdout))

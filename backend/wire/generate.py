"""Compile tinker.proto into tinker_pb2.py and .pyi: `python -m backend.wire.generate` (needs the `dev` extra)."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROTO = "backend/wire/tinker.proto"


def generate(folder: Path) -> None:
    """Write `backend/wire/tinker_pb2.py` and `.pyi` below `folder`; RuntimeError when the compiler refuses the file."""
    from grpc_tools import protoc  # type: ignore[import-untyped]

    arguments = ["protoc", f"--proto_path={ROOT}", f"--python_out={folder}", f"--pyi_out={folder}", str(ROOT / PROTO)]
    if code := protoc.main(arguments):
        raise RuntimeError(f"protoc ended with {code} on {PROTO}")


if __name__ == "__main__":
    generate(ROOT)
    sys.exit(0)

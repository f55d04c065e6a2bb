"""Compile tinker.proto into tinker_pb2.py and .pyi; needs the `dev` extra.

python -m tinkerflow.backend.wire.generate
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[3]
PROTO = "tinkerflow/backend/wire/tinker.proto"


def generate(folder: Path) -> None:
    """Write `tinker_pb2.py` and `.pyi` of this room below `folder`. RuntimeError: the compiler rejected the file."""
    from grpc_tools import protoc  # type: ignore[import-untyped]

    arguments = ["protoc", f"--proto_path={ROOT}", f"--python_out={folder}", f"--pyi_out={folder}", str(ROOT / PROTO)]
    if code := protoc.main(arguments):
        raise RuntimeError(f"protoc ended with {code} on {PROTO}")


if __name__ == "__main__":
    generate(ROOT)

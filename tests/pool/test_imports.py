"""A worker process loads compute code, and no code of requests or stores."""

from __future__ import annotations

import subprocess
import sys

FORBIDDEN = {"google.protobuf", "fsspec", "gcsfs", "pyrage", "sqlalchemy", "sqlmodel", "prefect", "fastapi"}


def test_a_worker_imports_no_library_of_requests_or_stores() -> None:
    code = "import sys, tinkerflow.backend.pool.worker, tinkerflow.backend.compute.executor; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not FORBIDDEN & {*out.stdout.split()}

"""The versions that must be the same on all hosts of a group, and from one driver to the next."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from functools import cache
from importlib.metadata import version
from pathlib import Path

from tinkerflow import backend
from tinkerflow.backend.pool.protocol.frames import fingerprint


@cache
def software() -> str:
    """For people, and for comparison: "python 3.11, jaxlib 0.10.2, messages 1a2b3c4d5e6f"."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return f"python {python}, jaxlib {version('jaxlib')}, messages {fingerprint()}"


@cache
def code_version() -> str:
    """The version of our own code and of JAX, as they were when this process first asked."""
    return f"jax {version('jax')}, {software()}, {files_version(Path(backend.__file__).parent.rglob('*.py'))}"


def files_version(files: Iterable[Path]) -> str:
    """A digest of the files' paths, sizes and times of change."""
    digest = hashlib.sha256()
    for file in sorted(files):
        status = file.stat()
        digest.update(f"{file} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()

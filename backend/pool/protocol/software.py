"""The versions that must be equal on all hosts of a group, and from one driver to the next."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.metadata import version
from pathlib import Path

from tinkerflow import backend
from tinkerflow.backend.pool.protocol.codec import fingerprint

WHOLE_BYTES = 32 * 2**20  # the largest file that is read completely
_BLOCK, _BLOCKS = 4096, 256


@cache
def software() -> str:
    """The versions, for comparison and for people: "python 3.11, jaxlib 0.10.2, messages 1a2b3c4d5e6f"."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return f"python {python}, jaxlib {version('jaxlib')}, messages {fingerprint()}"


@cache
def code_version() -> str:
    """The version of our own code and of JAX, read once per process."""
    root = Path(backend.__file__).parent
    return f"jax {version('jax')}, {software()}, {contents_version(root, root.rglob('*.py'))}"


def contents_version(folder: Path, files: Iterable[Path]) -> str:
    """A digest of the names and contents of files in `folder`, equal on all hosts with the same files.

    The digest of a file over WHOLE_BYTES covers its size and _BLOCKS blocks that are spread over the file. The weights
    of another model differ in some of these blocks. OSError: a file cannot be read.
    """
    with ThreadPoolExecutor(16) as readers:  # reads from a network file system have a high latency
        named = sorted((str(file.relative_to(folder)), file) for file in files if not file.is_dir())
        digests = readers.map(_content_digest, [file for _, file in named])
        lines = [f"{name} {digest}\n" for (name, _), digest in zip(named, digests, strict=True)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _content_digest(file: Path) -> str:
    with file.open("rb") as content:
        size = file.stat().st_size
        if size <= WHOLE_BYTES:
            return hashlib.file_digest(content, "sha256").hexdigest()
        digest = hashlib.sha256(str(size).encode())
        for number in range(_BLOCKS):
            content.seek((size - _BLOCK) * number // (_BLOCKS - 1))
            digest.update(content.read(_BLOCK))
        return digest.hexdigest()

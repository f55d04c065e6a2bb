"""What must be the same on all hosts of a group: the messages, and what computes."""

from __future__ import annotations

import sys
from functools import cache
from importlib.metadata import version

from backend.pool.codec import fingerprint


@cache
def software() -> str:
    """For people, and for comparison: "python 3.11, jaxlib 0.10.2, messages 1a2b3c4d5e6f"."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return f"python {python}, jaxlib {version('jaxlib')}, messages {fingerprint()}"

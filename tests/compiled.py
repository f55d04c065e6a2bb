"""Compiled programs of the tests' own process."""

from __future__ import annotations

import gc
import sys


def forget_programs() -> None:
    """Give back the memory maps of all compiled programs: where none is left, the compiler ends the process."""
    if jax := sys.modules.get("jax"):
        jax.clear_caches()
    gc.collect()

"""Compiled programs of the tests' own process, and programs for devices that are not there."""

from __future__ import annotations

import gc
import sys
from contextlib import AbstractContextManager
from typing import Any


def forget_programs() -> None:
    """Give back the memory maps of all compiled programs: where none is left, the compiler ends the process."""
    if jax := sys.modules.get("jax"):
        jax.clear_caches()
    gc.collect()


def as_on(kind: str, cores: int, platform: str) -> AbstractContextManager[object]:
    """In the block, JAX traces and lowers for a device that is not there. cores: its multiprocessors or TPU cores."""
    from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

    return use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice(kind, cores, platform)))


def lower_for(platform: str, function: Any, *args: Any) -> Any:
    """The program of a jitted function for `args` on "cuda" or "tpu". JAX 0.11 needs the kind of such a device."""
    with as_on(*{"cuda": ("NVIDIA H100 80GB HBM3", 132, "gpu"), "tpu": ("TPU v5p", 2, "tpu")}[platform]):
        return function.trace(*args).lower(lowering_platforms=(platform,))

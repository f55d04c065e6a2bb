"""Compiled programs of the tests' own process, and programs for devices that are not there."""

from __future__ import annotations

import gc
import sys
from typing import Any


def forget_programs() -> None:
    """Give back the memory maps of all compiled programs: where none is left, the compiler ends the process."""
    if jax := sys.modules.get("jax"):
        jax.clear_caches()
    gc.collect()


def lower_for(platform: str, function: Any, *args: Any) -> Any:
    """The program of a jitted function for `args` on "cuda" or "tpu". JAX 0.11 needs the kind of such a device."""
    from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

    device = {"cuda": AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu"), "tpu": AbstractDevice("TPU v5p", 2, "tpu")}
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device[platform])):
        return function.trace(*args).lower(lowering_platforms=(platform,))

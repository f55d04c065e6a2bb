"""Drop the compiled programs of the tests' process, and lower programs for absent devices."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def forget_programs() -> None:
    """Free the memory maps of all compiled programs: if a process runs out of them, the compiler ends it."""
    if jax := sys.modules.get("jax"):
        jax.clear_caches()
    gc.collect()


@contextmanager
def as_on(kind: str, cores: int, platform: str) -> Iterator[None]:
    """Let JAX trace and lower for an absent device in the block, even under a mesh of the present devices.

    cores: the device's multiprocessors or TPU cores.
    """
    import pytest
    from jax.sharding import AbstractDevice, AbstractMesh, Mesh, use_abstract_mesh

    device = AbstractDevice(kind, cores, platform)

    def abstract_mesh(mesh: Mesh) -> AbstractMesh:
        return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=mesh.axis_types, abstract_device=device)

    with pytest.MonkeyPatch.context() as patch, use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        patch.setattr(Mesh, "abstract_mesh", property(abstract_mesh))
        yield


def lower_for(platform: str, function: Any, *args: Any) -> Any:
    """The program of a jitted function for `args` on "cuda" or "tpu". JAX 0.11 needs a device kind."""
    with as_on(*{"cuda": ("NVIDIA H100 80GB HBM3", 132, "gpu"), "tpu": ("TPU v5p", 2, "tpu")}[platform]):
        return function.trace(*args).lower(lowering_platforms=(platform,))

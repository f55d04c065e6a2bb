"""What differs between CPUs, NVIDIA GPUs and TPUs: one profile for each platform."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class Platform:
    """name: as `jit(...).lower(lowering_platforms=...)` takes it."""

    name: str


CPU, CUDA, TPU = Platform("cpu"), Platform("cuda"), Platform("tpu")

_BY_BACKEND = {"cpu": CPU, "gpu": CUDA, "cuda": CUDA, "tpu": TPU}  # by what JAX calls its backend
_target: ContextVar[Platform | None] = ContextVar("target platform", default=None)


def platform() -> Platform:
    """The platform that programs are made for: the one of `compiling_for`, or else the one of JAX's devices."""
    return _target.get() or _BY_BACKEND[jax.default_backend()]


def on_cpu() -> bool:
    """Whether programs are made for CPUs, which XLA compiles some things differently for."""
    return platform() is CPU


@contextmanager
def compiling_for(target: Platform) -> Iterator[None]:
    """Make programs for `target`, although JAX's devices here are others."""
    token = _target.set(target)
    try:
        yield
    finally:
        _target.reset(token)

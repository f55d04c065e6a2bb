"""Warm-up: the programs that requests may need are compiled before any request needs them, in a thread of its own.

Nothing is run. JAX keeps what `jit(f).lower(shapes).compile()` makes where a call of `f` with such arguments looks for
it, and its persistent cache (pool/compile_cache.py) keeps it for the next process. The thread makes one program after
the other, and none while commands are executed or have been a moment ago: a request that comes while one is being made
shares the machine with that one, and waits for nothing.
"""

from __future__ import annotations

import heapq
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import jax

from tinkerflow.backend.commands import CompileStatus

log = logging.getLogger(__name__)

_CALM_SECONDS = 0.5  # without a command, before the next program is begun
_NICE = 10  # of the thread, where threads have priorities of their own


@dataclass(frozen=True)
class Program:
    """One program to be. `make` compiles it; those of the smallest `distance` from what is common come first."""

    name: str
    distance: int
    make: Callable[[], object]


class WarmUp:
    """The thread, what it has still to make, and what became of the rest. Without `on` it makes nothing."""

    def __init__(self, *, on: bool, calm_seconds: float = _CALM_SECONDS) -> None:
        """Nothing is wanted yet."""
        self._on, self._calm = on, calm_seconds
        self._changed = threading.Condition()
        self._number = count()
        self._todo: list[tuple[int, int, Program]] = []
        self._planned = self._ready = self._failed = self._needed = self._late = 0
        self._executing = 0  # commands
        self._calm_since = time.monotonic()
        if on:
            threading.Thread(target=self._work, name="warm-up", daemon=True).start()

    @property
    def warmth(self) -> CompileStatus:
        """How far it is."""
        with self._changed:
            return CompileStatus(self._planned, self._ready, self._failed, self._needed, self._late)

    def want(self, programs: Iterable[Program]) -> None:
        """Make these too."""
        if not self._on:
            return
        with self._changed:
            for program in programs:
                heapq.heappush(self._todo, (program.distance, next(self._number), program))
                self._planned += 1
            self._changed.notify()

    @contextmanager
    def pause(self, made: Callable[[], int]) -> Iterator[None]:
        """Begin nothing within the block: a command is executed. made: how many programs that thread has made."""
        before, was_ready = made(), self._ready == self._planned > 0
        with self._changed:
            self._executing += 1
        try:
            yield
        finally:
            with self._changed:
                if was_ready:
                    self._late += made() - before
                else:
                    self._needed += made() - before
                self._executing -= 1
                self._calm_since = time.monotonic()
                self._changed.notify()

    def _work(self) -> None:
        if hasattr(os, "setpriority"):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while True:
            program = self._next()
            began, failed = time.monotonic(), 0
            try:
                program.make()
                log.info("warm-up: %s in %.2f s", program.name, time.monotonic() - began)
            except Exception:  # whoever needs it will be told; the group must not end for it
                log.exception("warm-up: %s could not be compiled", program.name)
                failed = 1
            with self._changed:
                self._ready += 1
                self._failed += failed

    def _next(self) -> Program:
        with self._changed:
            while True:
                wait = self._calm_since + self._calm - time.monotonic()
                if self._todo and not self._executing and wait <= 0:
                    return heapq.heappop(self._todo)[2]
                self._changed.wait(wait if self._todo and not self._executing else None)


def result_of(function: Any, *args: Any) -> Any:
    """Compile a jitted function for `args` (arrays, or what is like them); what it would give, without values."""
    lowered = function.lower(*args)
    compiled = lowered.compile()
    return jax.tree.map(_like, lowered.out_info, compiled.output_shardings)


def like(tree: Any, where: Any) -> Any:
    """The pytree of arrays as they would be with sharding `where`, without values."""
    return jax.tree.map(lambda leaf: _like(leaf, where), tree)


def _like(leaf: Any, where: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

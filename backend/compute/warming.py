"""Warm-up: a thread compiles the programs that requests may need before any request needs them.

The programs are not run. JAX stores the result of `jit(f).lower(shapes).compile()` in the cache that calls of `f` read,
and in its persistent cache for the next process. The thread compiles one program at a time. It starts no compilation
while commands are executed, or shortly after. A request that arrives during a compilation shares the machine with it,
but does not wait for it.
"""

from __future__ import annotations

import heapq
import logging
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import jax

from tinkerflow.backend.spec.commands import CompileStatus

log = logging.getLogger(__name__)

_CALM_SECONDS = 0.5  # after the last command, before the next program is compiled
_MOST_MAPS = 0.5  # of the memory maps; the rest is for programs that commands need
# Niceness of the thread, on systems where threads have priorities. XLA's own threads, which generate code, have the
# priority of the process. On a CPU they take 98 % of a large program's compile time.
_NICE = 10


@dataclass(frozen=True)
class Program:
    """A program to compile, by calling `make`. Programs with the smallest `distance` are compiled first."""

    name: str
    distance: int
    make: Callable[[], object]


class WarmUp:
    """The compiling thread, its queue and its counts. Nothing is compiled unless `on` is set."""

    def __init__(
        self, *, on: bool, calm_seconds: float = _CALM_SECONDS, maps_used: Callable[[], float] = lambda: 0.0
    ) -> None:
        """Start the thread if `on`.

        calm_seconds: the time after the last command before the thread compiles a program. maps_used(): the used share
        of this process's memory maps. Beyond half of them, nothing is compiled ahead.
        """
        self.on = on
        self._calm, self._maps_used = calm_seconds, maps_used
        self._changed = threading.Condition()
        self._number = count()
        self._todo: list[tuple[int, int, Program, Hashable]] = []
        self._planned = self._ready = self._failed = self._needed = self._late = 0
        self._executing = 0  # commands
        self._calm_since = time.monotonic()
        if on:
            threading.Thread(target=self._work, name="warm-up", daemon=True).start()

    @property
    def warmth(self) -> CompileStatus:
        """The counts so far."""
        with self._changed:
            return CompileStatus(self._planned, self._ready, self._failed, self._needed, self._late)

    def want(self, programs: Iterable[Program], owner: Hashable = None) -> None:
        """Add programs to the queue. owner: the argument of `forget` that removes them."""
        if not self.on:
            return
        with self._changed:
            for program in programs:
                heapq.heappush(self._todo, (program.distance, next(self._number), program, owner))
                self._planned += 1
            self._changed.notify()

    def forget(self, owner: Hashable) -> None:
        """Remove the programs of `owner` from the queue."""
        with self._changed:
            left = [entry for entry in self._todo if entry[3] != owner]
            self._planned -= len(self._todo) - len(left)
            self._todo = left
            heapq.heapify(left)

    @contextmanager
    def pause(self, made: Callable[[], int]) -> Iterator[None]:
        """Start no compilation within the block, which executes a command.

        made(): the number of programs that the calling thread has compiled.
        """
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
                if self._maps_used() < _MOST_MAPS:
                    program.make()
                    seconds = time.monotonic() - began
                    log.info("warm-up: %d of %d, %s in %.2f s", self._ready + 1, self._planned, program.name, seconds)
                else:
                    log.info("warm-up: %s is left out: few memory maps are left (vm.max_map_count)", program.name)
            except Exception:  # only a command that needs this program fails, not the group
                log.exception("warm-up: %s could not be compiled", program.name)
                failed = 1
            del program  # free its arguments before waiting for the next program
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
    """Compile a jitted function for `args` (arrays, or shapes). Returns the shapes and shardings of its result."""
    lowered = function.lower(*args)
    compiled = lowered.compile()
    return jax.tree.map(_like, lowered.out_info, compiled.output_shardings)


def like(tree: Any, where: Any) -> Any:
    """The shape and dtype of each array in a pytree, with the sharding `where`."""
    return jax.tree.map(lambda leaf: _like(leaf, where), tree)


def _like(leaf: Any, where: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

"""The number of executables that JAX has created. It must not grow after the warm-up."""

from __future__ import annotations

import threading
from collections import Counter

import jax.monitoring

_EVENT = "/jax/core/compile/backend_compile_duration"  # also recorded for programs from the persistent cache


class CompileCounter:
    """Counts the executables that this process creates from now on. JAX keeps a reference to the counter forever."""

    def __init__(self) -> None:
        self._by_thread: Counter[int] = Counter()
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    @property
    def count(self) -> int:
        """Executables created by all threads."""
        return self._by_thread.total()

    @property
    def here(self) -> int:
        """Executables created by the calling thread."""
        return self._by_thread[threading.get_ident()]

    def _on_event(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _EVENT:
            self._by_thread[threading.get_ident()] += 1

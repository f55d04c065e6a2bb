"""How many executables JAX has made: after warm-up the number must stand still."""

from __future__ import annotations

import threading
from collections import Counter

import jax.monitoring

_EVENT = "/jax/core/compile/backend_compile_duration"  # also recorded for one that the persistent cache had


class CompileCounter:
    """Counts the executables made in this process from now on. JAX keeps the counter for the life of the process."""

    def __init__(self) -> None:
        """Start at 0."""
        self._by_thread: Counter[int] = Counter()
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    @property
    def count(self) -> int:
        """Executables made by all threads."""
        return self._by_thread.total()

    @property
    def here(self) -> int:
        """Executables made by the calling thread."""
        return self._by_thread[threading.get_ident()]

    def _heard(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _EVENT:
            self._by_thread[threading.get_ident()] += 1

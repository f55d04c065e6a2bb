"""How many executables JAX has made: after warm-up the number must stand still."""

from __future__ import annotations

import jax.monitoring

_EVENT = "/jax/core/compile/backend_compile_duration"  # also recorded for one that the persistent cache had


class CompileCounter:
    """Counts the executables made in this process since the counter was. JAX keeps it for the process's life."""

    def __init__(self) -> None:
        """Start at 0."""
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _EVENT:
            self.count += 1

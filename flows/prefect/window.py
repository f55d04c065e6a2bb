"""A window: the operations that one task run shows. Operations start at once; the window only watches them end."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from tinkerflow.backend.journal import Outcome
from tinkerflow.tasks.execution.operation import Operation

MOST = 500  # operations of one task run


class Window:
    """The operations that one task run shows. It ends when it is closed and they have ended."""

    def __init__(self, on_end: Callable[[str, str], None], linger: Callable[[], float] | None = None) -> None:
        """An open window that shows nothing yet.

        on_end: called once with the final state of the task run (`Completed` or `Failed`) and a sentence about it.
        linger: seconds that an idle window stays open for more operations, asked each time it becomes idle; None: the
        window closes when it becomes idle.
        """
        self.open = True
        self._on_end = on_end
        self._linger = linger
        self._following = 0
        self._kinds: Counter[str] = Counter()
        self._errors: list[str] = []
        self._idle: asyncio.TimerHandle | None = None

    @property
    def full(self) -> bool:
        """Whether it shows as many operations as one task run may."""
        return self._kinds.total() >= MOST

    def add(self, operation: Operation) -> None:
        """Show one more operation, while the window is open."""
        if self._idle is not None:
            self._idle.cancel()
        self._kinds[operation.request.kind] += 1
        self._following += 1
        operation.answered.add_done_callback(self._ended)

    def close(self) -> None:
        """Take no more."""
        if self._idle is not None:
            self._idle.cancel()
        if self.open:
            self.open = False
            self._end_if_over()

    def _ended(self, answered: asyncio.Task[Outcome | None]) -> None:
        self._following -= 1
        if answered.cancelled() or answered.exception() is not None:
            self._errors.append("not answered: the engine stopped")
        elif (outcome := answered.result()) is None:
            self._errors.append("interrupted by the end of its worker group: it is executed again")
        elif outcome.error is not None:
            self._errors.append(outcome.error)
        if not self.open:
            self._end_if_over()
        elif not self._following:
            seconds = max(self._linger(), 0.01) if self._linger is not None else 0.0
            self._idle = asyncio.get_running_loop().call_later(seconds, self.close)

    def _end_if_over(self) -> None:
        if self._following:
            return
        text = ", ".join(f"{kind} x{count}" if count > 1 else kind for kind, count in self._kinds.items())
        if self._errors:
            self._on_end("Failed", f"{text}; {len(self._errors)} failed: {self._errors[0]}")
        else:
            self._on_end("Completed", text)

"""A window: the operations that one task run shows. Operations never wait for a window."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from tinkerflow.backend.journal import Outcome
from tinkerflow.tasks.execution.operation import Operation

# A run's page with 500 task runs takes six seconds to open (tests/benchmarks/RESULTS.md). Therefore each later task run
# shows more operations: 200 task runs show five million operations of one run.
SINGLE = 60  # task runs of one batch each
GROWTH = 1.1  # each later task run shows this many times more operations


def window_size(number: int) -> int:
    """How many operations the run's window `number`, counted from 0, shows at least."""
    return max(1, round(GROWTH ** (number - SINGLE)))


def windows_of(operations: int) -> int:
    """How many windows show this many operations."""
    number = 0
    while operations > 0:
        operations -= window_size(number)
        number += 1
    return number


class Window:
    """The operations that one task run shows. A window ends when it is closed and its operations have ended."""

    def __init__(
        self, on_end: Callable[[State[None]], None], size: int = 1, linger: Callable[[], float] = lambda: 0.0
    ) -> None:
        """An open window that shows nothing yet.

        on_end: called once with the final state of the task run. size: operations after which the window may close.
        linger: seconds that a full window stays open for more operations while none is in flight.
        """
        self.open = True
        self._on_end = on_end
        self._size = size
        self._linger = linger
        self._in_flight = 0
        self._kinds: Counter[str] = Counter()
        self._errors: list[str] = []
        self._idle: asyncio.TimerHandle | None = None

    @property
    def full(self) -> bool:
        """Whether it shows at least `size` operations."""
        return self._kinds.total() >= self._size

    def add(self, operation: Operation) -> None:
        """Show one more operation, while the window is open."""
        if self._idle is not None:
            self._idle.cancel()
        self._kinds[operation.request.kind] += 1
        self._in_flight += 1
        operation.answered.add_done_callback(self._ended)

    def close(self) -> None:
        """Take no more operations."""
        if self._idle is not None:
            self._idle.cancel()
        if self.open:
            self.open = False
            self._end_if_over()

    def _ended(self, answered: asyncio.Task[Outcome | None]) -> None:
        self._in_flight -= 1
        if answered.cancelled() or answered.exception() is not None:
            self._errors.append("not answered: the engine stopped")
        elif (outcome := answered.result()) is None:
            self._errors.append("interrupted because its worker group ended: it is executed again")
        elif outcome.error is not None:
            self._errors.append(outcome.error)
        if not self.open:
            self._end_if_over()
        elif not self._in_flight and self.full:
            self._idle = asyncio.get_running_loop().call_later(max(self._linger(), 0.01), self.close)

    def _end_if_over(self) -> None:
        if self._in_flight:
            return
        text = ", ".join(f"{kind} x{count}" if count > 1 else kind for kind, count in self._kinds.items())
        if self._errors:
            self._on_end(Failed(message=f"{text}; {len(self._errors)} failed: {self._errors[0]}"))
        else:
            self._on_end(Completed(message=text))

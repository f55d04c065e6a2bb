"""Tasks that end together with the object that started them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine


class TaskSet:
    """Tasks that are cancelled together. on_error: called with the exception of each task that fails."""

    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        self._on_error = on_error
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def run(self, work: Coroutine[None, None, None]) -> None:
        """Start a task. After `close`, do nothing."""
        if self._closed:
            work.close()
            return
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)

    def close(self) -> None:
        """Stop starting tasks. Running tasks continue."""
        self._closed = True

    async def cancel(self) -> None:
        """Cancel all tasks, and wait until they have ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_error(error)

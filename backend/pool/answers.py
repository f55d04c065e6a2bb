"""A worker's answers: each command's, in their order, also while the devices are still computing.

Where an executor begins a command and does not wait for its devices, a thread here does. So the next command is begun,
and computed, while the results of the last one are copied to the host and sent.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue

from tinkerflow.backend.commands import Command, DeferredReply, Reply
from tinkerflow.backend.errors import DevicesError, UserError
from tinkerflow.backend.pool import codec
from tinkerflow.backend.pool.messages import Ack, to_failed
from tinkerflow.backend.pool.transport import WorkerLink

log = logging.getLogger(__name__)

OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"  # how XLA says it


class Answers:
    """Gives replies back in the order of their commands, also those that are still to be waited for."""

    def __init__(self, send: Callable[[int, Sequence[codec.Buffer], WorkerLink | None], None], rank: int) -> None:
        """`send` sends an encoded message as a frame to a driver."""
        self._send = send
        self._rank = rank
        self._begun: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._unanswered = 0
        self._changed = threading.Condition()  # that number has
        self._waiter: threading.Thread | None = None

    def give(
        self, driver: WorkerLink, index: int, command: Command, execute: Callable[[Command], Reply | DeferredReply]
    ) -> None:
        """Execute `command`, which came as frame `index`, and answer it, now or when what it has begun is done.

        For one thread. Raises what must end the process, once all commands before this one are answered: so it is this
        one that is blamed.
        """
        name = type(command).__name__
        try:
            body = self._attempt(name, partial(execute, command))
        except Exception:
            self.drain()
            raise
        if not callable(body) and not self._unanswered:
            self._send(index, body, driver)
            return
        with self._changed:
            self._unanswered += 1
        self._begun.put(partial(self._finish, driver, index, name, body))
        if self._waiter is None:
            self._waiter = threading.Thread(target=self._work, name="answers", daemon=True)
            self._waiter.start()

    def drain(self) -> None:
        """Return when all that was given is answered."""
        with self._changed:
            self._changed.wait_for(lambda: not self._unanswered)

    def _work(self) -> None:
        while True:
            self._begun.get()()

    def _finish(self, driver: WorkerLink, index: int, name: str, body: list[codec.Buffer] | DeferredReply) -> None:
        while callable(body):
            body = self._attempt(name, body)
        self._send(index, body, driver)
        with self._changed:
            self._unanswered -= 1
            self._changed.notify()

    def _attempt(self, name: str, execute: Callable[[], Reply | DeferredReply]) -> list[codec.Buffer] | DeferredReply:
        try:
            reply = execute()
            return reply if callable(reply) else codec.encode(reply if self._rank == 0 else Ack(None))
        except UserError as error:
            log.info("%s: %s: %s", name, type(error).__name__, error)
            failed = to_failed(error)
        except Exception as error:
            if OUT_OF_MEMORY in str(error) or isinstance(error, DevicesError):
                raise  # nobody knows what is left on the devices: a fresh group does
            log.exception("%s failed", name)
            failed = to_failed(error)
        return codec.encode(failed if self._rank == 0 else Ack(failed))

"""The bell: whoever waits is woken by a notification, in this process or another one, instead of asking the database.

Topics are short texts: `model:<id>` (work came for it, or it ended), `sample`, `done:<request_id>`, `session:<id>`,
`answered:<clone>:<sampler_id>` (one of its requests was answered), `cancel:<request_id>` (stop sampling it).
A bell may be lost (a full buffer, a broken connection): a listener also looks for itself once a second.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from tinkerflow.backend.journal.database import is_sqlite


class Carrier(Protocol):
    """Takes topics to the listeners of other processes, and brings theirs."""

    def send(self, topics: tuple[str, ...]) -> None:
        """Tell every other process; what cannot be delivered is lost."""
        ...

    def start(self, deliver: Callable[[tuple[str, ...]], None]) -> None:
        """From the return of this call on, call `deliver` (in a thread) with what other processes send."""
        ...

    def close(self) -> None:
        """Stop and give everything back."""
        ...


class Topics:
    """The topics that one listener has not seen yet: each once, in the order of their first ring."""

    def __init__(self, prefixes: tuple[str, ...]) -> None:
        """Collect topics that start with one of `prefixes`; all of them when it is empty."""
        self._prefixes = prefixes or ("",)
        self._loop = asyncio.get_running_loop()
        self._unseen: dict[str, None] = {}
        self._some = asyncio.Event()
        self._lock = threading.Lock()
        self._woken = False

    def put(self, topics: tuple[str, ...]) -> None:
        """Add topics, from any thread."""
        wanted = [topic for topic in topics if topic.startswith(self._prefixes)]
        if not wanted:
            return
        with self._lock:
            self._unseen.update(dict.fromkeys(wanted))
            wake, self._woken = not self._woken, True
        if wake and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._some.set)

    def __aiter__(self) -> AsyncIterator[str]:
        """The topics, as they come, without end."""
        return self

    async def __anext__(self) -> str:
        """The next topic; waits until there is one."""
        while True:
            with self._lock:
                if self._unseen:
                    topic = next(iter(self._unseen))
                    del self._unseen[topic]
                    return topic
                self._some.clear()
                self._woken = False
            await self._some.wait()


class Bell:
    """Rings for listeners in this process directly, and for those of other processes through the database's carrier."""

    def __init__(self, url: str) -> None:
        """A bell for the users of the database `url`. Nothing is opened before the first listener or ring."""
        self._carrier = _carrier(url)
        self._lock = threading.Lock()
        self._listeners: set[Topics] = set()
        self._started = False

    def ring(self, *topics: str) -> None:
        """Wake the listeners of `topics`, from any thread. Never raises for a listener that cannot be reached."""
        if not topics:
            return
        self._deliver(topics)
        self._carrier.send(topics)

    @asynccontextmanager
    async def listen(self, *prefixes: str) -> AsyncIterator[AsyncIterator[str]]:
        """Inside, an endless iterator of the topics that start with one of `prefixes` (none given: all topics)."""
        topics = Topics(prefixes)
        await asyncio.to_thread(self._add, topics)
        try:
            yield topics
        finally:
            with self._lock:
                self._listeners.discard(topics)

    def close(self) -> None:
        """Stop listening to other processes."""
        self._carrier.close()

    def _add(self, topics: Topics) -> None:
        with self._lock:
            if not self._started:
                self._carrier.start(self._deliver)
                self._started = True
            self._listeners.add(topics)

    def _deliver(self, topics: tuple[str, ...]) -> None:
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener.put(topics)


def _carrier(url: str) -> Carrier:
    if is_sqlite(url):
        from tinkerflow.backend.journal.bell_sockets import SocketCarrier

        return SocketCarrier(url)
    from tinkerflow.backend.journal.bell_postgres import PostgresCarrier

    return PostgresCarrier(url)

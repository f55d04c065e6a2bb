"""Notifications: whoever waits for a change is woken by it, in any process, instead of asking the database.

A topic is a short text:

- `model:<id>`: work came for the model, or the model ended
- `sample`: a sample came, or was answered without being executed
- `session:<id>`: the session ended
- `cancel:<request_id>`: nobody wants the sample any more
- `done:<request_id>`: the request is answered
- `tokens`: samples that stream have new tokens (streams.py)
- `answered:<clone>:<sampler_id>`: a request of this clone of the sampler is answered; without a clone: of any clone

A notification may be lost (a full buffer, a broken connection), so every subscriber also looks at the database once a
second. Processes that share an SQLite file reach each other through UNIX datagram sockets (SocketTransport): every
subscribed process binds one socket in a private folder, and publishing sends one datagram to each. Processes with a
different TMPDIR do not hear each other. Processes on Postgres use LISTEN and NOTIFY (notify_postgres.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import secrets
import socket
import stat
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self

import sqlalchemy as sa
from sqlalchemy.engine import make_url

from tinkerflow.backend.core.errors import ServerError
from tinkerflow.backend.journal.database import is_sqlite

if TYPE_CHECKING:
    from tinkerflow.backend.journal.notify_postgres import PostgresTransport
    from tinkerflow.backend.journal.streams import TokenSubscriptions

log = logging.getLogger(__name__)

TOKENS = "tokens"
CLONE_BLOCK = 1_000_000_000  # the sequence ids of clone n of a client are [n * CLONE_BLOCK, (n + 1) * CLONE_BLOCK)
RECHECK_SECONDS = 1.0  # between two looks at the database, in case notifications were lost
_PATH_LIMIT = 100  # bytes; Linux takes 107, macOS 103
_NAME_LENGTH = 20  # bytes at most, for `/<pid>-<8 hex digits>`
_DATAGRAM = 4096  # bytes; well below every system's limit
_FULL_TRIES = 3  # a receiver holds 10 datagrams on Linux: give its thread a moment
_FULL_WAIT = 0.001


class Subscription:
    """The topics that one subscriber has not seen yet: each once, in the order of their first publication."""

    def __init__(self, prefixes: tuple[str, ...]) -> None:
        """Collect topics that start with one of `prefixes`; all topics when it is empty."""
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
        """Iterate over the topics as they come, without end."""
        return self

    async def __anext__(self) -> str:
        """Return the next topic; wait until there is one."""
        while True:
            with self._lock:
                if self._unseen:
                    topic = next(iter(self._unseen))
                    del self._unseen[topic]
                    return topic
                self._some.clear()
                self._woken = False
            await self._some.wait()


class Notifier:
    """Publishes topics to subscribers in this process directly, and to other processes through a transport."""

    def __init__(self, url: str) -> None:
        """Prepare to notify the users of the database `url`. Nothing is opened before it is used."""
        self._transport = _transport(url)
        self._lock = threading.Lock()
        self._subscriptions: set[Subscription] = set()
        self._started = False

    def publish(self, *topics: str) -> None:
        """Wake the subscribers of `topics`, from any thread. Unreachable subscribers raise no error."""
        if not topics:
            return
        self._deliver(topics)
        self._transport.send(topics)

    @asynccontextmanager
    async def subscribe(self, *prefixes: str) -> AsyncIterator[AsyncIterator[str]]:
        """Inside, an endless iterator of the topics that start with one of `prefixes` (none given: all topics)."""
        subscription = Subscription(prefixes)
        await asyncio.to_thread(self._add, subscription)
        try:
            yield subscription
        finally:
            with self._lock:
                self._subscriptions.discard(subscription)

    def close(self) -> None:
        """Stop listening to other processes. Whoever subscribes from now on hears of this process alone."""
        with self._lock:  # a thread may be starting the transport, whose subscriber was cancelled
            self._started = True
        self._transport.close()

    def _add(self, subscription: Subscription) -> None:
        with self._lock:
            if not self._started:
                self._transport.start(self._deliver)
                self._started = True
            self._subscriptions.add(subscription)

    def _deliver(self, topics: tuple[str, ...]) -> None:
        with self._lock:
            subscriptions = list(self._subscriptions)
        for subscription in subscriptions:
            subscription.put(topics)


def _transport(url: str) -> SocketTransport | PostgresTransport:
    if is_sqlite(url):
        return SocketTransport(url)
    from tinkerflow.backend.journal.notify_postgres import PostgresTransport

    return PostgresTransport(url)


# ------------------------------------------------------------------ clients that wait for answers
def answered(sampler_id: str, seq_id: int | None = None) -> str:
    """The topic for answers of a sampler: `answered:<clone>:<sampler>`, for all its clones without seq_id."""
    return f"answered:{'' if seq_id is None else seq_id // CLONE_BLOCK}:{sampler_id}"


class Waiter:
    """One client's wait for a request, or for the requests of one clone of a sampler (`clone`, as text).

    seen: the cursor that the client has read up to; an answer with a higher number wakes it.
    """

    def __init__(self, clone: str | None = None) -> None:
        """Use ResultSubscriptions.request or ResultSubscriptions.sampler."""
        self.clone = clone
        self.seen: int | None = None
        self._event = asyncio.Event()

    async def wait(self, seconds: float) -> bool:
        """Whether the answer is there, or comes within `seconds`.

        Of a sampler: whether there was an answer since the last wait. It may be another clone's.
        """
        try:
            async with asyncio.timeout(seconds):
                await self._event.wait()
        except TimeoutError:
            return False
        if self.clone is not None:
            self.sleep()
        return True

    def wake(self) -> None:
        """End the wait: there is an answer."""
        self._event.set()

    def sleep(self) -> None:
        """The next wait lasts until the next `wake`."""
        self._event.clear()


class ResultSubscriptions:
    """Wakes thousands of waiting clients: one task listens, another asks the database for all of them once a second.

        with subscriptions.request(request_id) as waiter:
            ...  # look for the answer, and when it is not there:
            await waiter.wait(seconds)

    A waiter hears of every answer from the moment its `with` block is entered. So look inside the block, and wait when
    there is nothing: no answer falls in between. For a sampler, set `waiter.seen` to the cursor before waiting.
    """

    def __init__(
        self,
        notifier: Notifier,
        finished: Callable[[Collection[str]], set[str]],
        last_completions: Callable[[Collection[str]], dict[str, int]],
        tokens: TokenSubscriptions,
        *,
        recheck_seconds: float = RECHECK_SECONDS,
    ) -> None:
        """Use it as an async context manager.

        notifier: publishes the topics `done:`, `answered:` and `tokens`.
        finished: which of these request ids are answered, in one query.
        last_completions: the number of each sampler's last answer, in one query.
        tokens: who listens to samples that stream.
        recheck_seconds: between two looks at the database.
        """
        self.tokens = tokens
        self._notifier = notifier
        self._finished = finished
        self._last_completions = last_completions
        self._recheck_seconds = recheck_seconds
        self._requests: dict[str, set[Waiter]] = {}
        self._samplers: dict[str, set[Waiter]] = {}
        self._stack = AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        """Start listening."""
        topics = await self._stack.enter_async_context(self._notifier.subscribe("done:", "answered:", TOKENS))
        running = (self._listen(topics), self._check(), self.tokens.run())
        self._tasks = [asyncio.create_task(one) for one in running]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop; clients that still wait get False at the end of their timeout."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stack.aclose()

    def request(self, request_id: str, waiter: Waiter | None = None) -> AbstractContextManager[Waiter]:
        """Inside, a waiter for the answer of one request. An id that does not exist is never answered.

        waiter: one that waits for something else too; None = a new one.
        """
        return _entered(self._requests, request_id, waiter or Waiter())

    def sampler(self, sampler_id: str, clone: int) -> AbstractContextManager[Waiter]:
        """Inside, a waiter for every answer to one clone's requests of a sampler."""
        return _entered(self._samplers, sampler_id, Waiter(str(clone)))

    @property
    def waiting(self) -> int:
        """How many requests and samplers somebody waits for."""
        return len(self._requests) + len(self._samplers)

    async def _listen(self, topics: AsyncIterator[str]) -> None:
        async for topic in topics:
            if topic.startswith("done:"):
                self._answered(topic.removeprefix("done:"))
                continue
            if topic == TOKENS:
                self.tokens.wake()
                continue
            _, clone, sampler_id = topic.split(":", 2)
            for waiter in self._samplers.get(sampler_id, ()):
                if clone in ("", waiter.clone):
                    waiter.wake()

    async def _check(self) -> None:
        while True:
            await asyncio.sleep(self._recheck_seconds)
            self.tokens.wake()
            try:
                if self._requests:
                    for request_id in await asyncio.to_thread(self._finished, list(self._requests)):
                        self._answered(request_id)
                if self._samplers:
                    self._wake_behind(await asyncio.to_thread(self._last_completions, list(self._samplers)))
            except sa.exc.SQLAlchemyError:
                # Waiting must outlive a database that is away for a moment: the next second asks again.
                log.exception("cannot ask the journal for %d waiting clients; asking again soon", self.waiting)

    def _answered(self, request_id: str) -> None:
        for waiter in self._requests.get(request_id, ()):
            waiter.wake()

    def _wake_behind(self, numbers: dict[str, int]) -> None:
        for sampler_id, waiters in self._samplers.items():
            for waiter in waiters:
                if waiter.seen is not None and numbers.get(sampler_id, 0) > waiter.seen:
                    waiter.wake()


@contextmanager
def _entered(waiters: dict[str, set[Waiter]], key: str, waiter: Waiter) -> Iterator[Waiter]:
    waiters.setdefault(key, set()).add(waiter)
    try:
        yield waiter
    finally:
        waiters[key].discard(waiter)
        if not waiters[key]:
            del waiters[key]


# ------------------------------------------------------------------ between processes that share an SQLite file
class SocketTransport:
    """Carries topics between processes through UNIX datagram sockets."""

    def __init__(self, url: str) -> None:
        """Carry topics for the users of the SQLite file of `url`; nothing is opened yet."""
        self._folder = socket_folder(url)
        self._own = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._sender: socket.socket | None = None
        self._receiver: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def send(self, topics: tuple[str, ...]) -> None:
        """Send to every socket in the folder but our own; remove sockets whose process is gone."""
        try:
            if not _is_private(self._folder):
                log.warning("notification lost: folder %s is not ours alone", self._folder)
                return
            names = os.listdir(self._folder)  # noqa: PTH208  # half the cost of Path.iterdir, on every commit
        except FileNotFoundError:  # nobody listens
            return
        for name in names:
            if name != self._own:
                for datagram in packed(topics, _DATAGRAM):
                    self._send_one(name, datagram)

    def start(self, deliver: Callable[[tuple[str, ...]], None]) -> None:
        """Bind our socket and read it in a thread: the event loop may be busy, and ten datagrams fill the buffer."""
        self._receiver = _bound(self._folder, self._own)
        self._thread = threading.Thread(target=_receive, args=(self._receiver, deliver), name="notifier", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Remove our socket and end its thread."""
        if self._thread is not None and self._receiver is not None:
            self._send_one(self._own, b"")
            # The empty datagram ends the thread; a buffer that stays full for seconds leaves a daemon thread behind.
            self._thread.join(timeout=5)
            (self._folder / self._own).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # others still listen there
                self._folder.rmdir()
            self._receiver.close()
            self._thread = self._receiver = None
        with self._lock:
            if self._sender is not None:
                self._sender.close()
                self._sender = None

    def _send_one(self, name: str, datagram: bytes) -> None:
        path = self._folder / name
        for attempt in range(_FULL_TRIES + 1):
            try:
                self._sending().sendto(datagram, str(path))
            except BlockingIOError:
                if attempt < _FULL_TRIES:
                    time.sleep(_FULL_WAIT)
                    continue
                log.debug("notification lost: the buffer of %s is full", path)
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)  # its process died without closing
            except FileNotFoundError:
                log.debug("notification lost: %s closed just now", path)
            except OSError as error:
                log.warning("notification lost: cannot send to %s: %s", path, error)
            return

    def _sending(self) -> socket.socket:
        with self._lock:
            if self._sender is None:
                self._sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                self._sender.setblocking(False)
            return self._sender


def socket_folder(url: str) -> Path:
    """Where the listeners of the SQLite file of `url` bind their sockets."""
    database = os.fsencode(Path(make_url(url).database or "").resolve())
    name = f"tinkerflow-{os.getuid()}-{hashlib.sha256(database).hexdigest()[:16]}"
    usual = Path(tempfile.gettempdir()) / name
    return usual if len(os.fsencode(usual)) + _NAME_LENGTH <= _PATH_LIMIT else Path("/tmp") / name


def packed(topics: tuple[str, ...], limit: int) -> Iterator[bytes]:
    """The topics, one a line, in as few messages of at most `limit` bytes as it takes."""
    message = b""
    for topic in topics:
        line = topic.encode() + b"\n"
        if message and len(message) + len(line) > limit:
            yield message
            message = b""
        message += line
    if message:
        yield message


def unpacked(message: bytes) -> tuple[str, ...]:
    """The topics of one message."""
    return tuple(message.decode().splitlines())


def _receive(receiver: socket.socket, deliver: Callable[[tuple[str, ...]], None]) -> None:
    with contextlib.suppress(OSError):  # closed
        while message := receiver.recv(65536):
            deliver(unpacked(message))


def _bound(folder: Path, name: str) -> socket.socket:
    receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    for last in (False, False, True):
        try:
            _make_private(folder)
            receiver.bind(str(folder / name))
            break
        except FileNotFoundError:  # the last listener left in between, and took the folder away
            if last:
                receiver.close()
                raise
        except BaseException:
            receiver.close()
            raise
    return receiver


def _make_private(folder: Path) -> None:
    """Make the folder for our user alone; ServerError when another user made it first."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not _is_private(folder):
        raise ServerError(
            f"notification folder {folder}: must be a folder of user {os.getuid()} with mode 0700; remove it"
        )


def _is_private(folder: Path) -> bool:
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077

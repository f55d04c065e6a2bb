"""The bell between processes of one machine that share an SQLite file: UNIX datagram sockets in a private folder.

Every listening process binds one socket there; a ring sends one datagram to each. The folder is named by a hash of
the database's path, because a socket's path may have 107 bytes at most. Processes with different TMPDIR do not hear
each other; their listeners then find work by looking once a second.
"""

from __future__ import annotations

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
from collections.abc import Callable, Iterator
from pathlib import Path

from sqlalchemy.engine import make_url

from tinkerflow.backend.errors import ServerError

log = logging.getLogger(__name__)

_PATH_LIMIT = 100  # bytes; Linux takes 107, macOS 103
_NAME_LENGTH = 20  # bytes at most, for `/<pid>-<8 hex digits>`
_DATAGRAM = 4096  # bytes; well below every system's limit
_FULL_TRIES = 3  # a receiver holds 10 datagrams on Linux: give its thread a moment
_FULL_WAIT = 0.001


class SocketCarrier:
    """Carries topics between processes through UNIX datagram sockets."""

    def __init__(self, url: str) -> None:
        """For the SQLite file of `url`; nothing is opened yet."""
        self._folder = socket_folder(url)
        self._own = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._sender: socket.socket | None = None
        self._receiver: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def send(self, topics: tuple[str, ...]) -> None:
        """Send to every socket in the folder but our own; remove those that nobody holds any more."""
        try:
            if not _is_private(self._folder):
                log.warning("bell lost: folder %s is not ours alone", self._folder)
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
        self._thread = threading.Thread(target=_receive, args=(self._receiver, deliver), name="bell", daemon=True)
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
                log.debug("bell lost: the buffer of %s is full", path)
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)  # its process died without closing
            except FileNotFoundError:
                log.debug("bell lost: %s closed just now", path)
            except OSError as error:
                log.warning("bell lost: cannot send to %s: %s", path, error)
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
    """Make the folder for us alone; one that somebody else made first is refused."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not _is_private(folder):
        raise ServerError(f"bell folder {folder}: must be a folder of user {os.getuid()} with mode 0700; remove it")


def _is_private(folder: Path) -> bool:
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077

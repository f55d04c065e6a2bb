"""Notifications between processes that share an SQLite file, through UNIX datagram sockets.

Every subscribed process binds one socket in a private folder, and a publisher sends datagrams to each of them.
Processes with different values of TMPDIR do not reach each other.
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
from collections.abc import Callable
from pathlib import Path

from tinkerflow.backend.core.disk import PRIVATE_FOLDER
from tinkerflow.backend.core.errors import ServerError
from tinkerflow.backend.journal.database import driver_url
from tinkerflow.backend.journal.topics import pack_topics, unpack_topics

log = logging.getLogger(__name__)

_PATH_LIMIT = 100  # bytes; Linux allows 107, macOS 103
_NAME_LENGTH = 20  # bytes at most, for `/<pid>-<8 hex digits>`
_DATAGRAM = 4096  # bytes; well below every system's limit
_FULL_TRIES = 3  # a receiver's buffer holds 10 datagrams on Linux: give its thread a moment
_FULL_WAIT = 0.001


class SocketTransport:
    """Carries topics between processes through UNIX datagram sockets."""

    def __init__(self, url: str) -> None:
        """Prepare for the users of the SQLite file of `url`. Nothing is opened yet."""
        self._folder = socket_folder(url)
        self._own_name = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._sender: socket.socket | None = None
        self._receiver: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def send(self, topics: tuple[str, ...]) -> None:
        """Send to every socket in the folder except our own, and remove sockets of dead processes."""
        try:
            if not _is_private(self._folder):
                log.warning("notification lost: folder %s can be used by other users", self._folder)
                return
            names = os.listdir(self._folder)  # noqa: PTH208  # half the cost of Path.iterdir, on every commit
        except FileNotFoundError:  # no process has subscribed
            return
        for name in names:
            if name != self._own_name:
                for datagram in pack_topics(topics, _DATAGRAM):
                    self._send_datagram(name, datagram)

    def start(self, deliver: Callable[[tuple[str, ...]], None]) -> None:
        """Bind our socket, and read it in a thread: the event loop may be busy, and ten datagrams fill the buffer."""
        self._receiver = _bind(self._folder, self._own_name)
        self._thread = threading.Thread(target=_receive, args=(self._receiver, deliver), name="notifier", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Remove our socket and end its thread."""
        if self._thread is not None and self._receiver is not None:
            self._send_datagram(self._own_name, b"")
            # The empty datagram ends the thread. If the buffer stays full for seconds, the daemon thread remains.
            self._thread.join(timeout=5)
            (self._folder / self._own_name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # the folder contains sockets of other processes
                self._folder.rmdir()
            self._receiver.close()
            self._thread = self._receiver = None
        with self._lock:
            if self._sender is not None:
                self._sender.close()
                self._sender = None

    def _send_datagram(self, name: str, datagram: bytes) -> None:
        path = self._folder / name
        for attempt in range(_FULL_TRIES + 1):
            try:
                self._sending_socket().sendto(datagram, str(path))
            except BlockingIOError:
                if attempt < _FULL_TRIES:
                    time.sleep(_FULL_WAIT)
                    continue
                log.debug("notification lost: the buffer of %s is full", path)
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)  # its process died without closing it
            except FileNotFoundError:
                log.debug("notification lost: %s was closed just now", path)
            except OSError as error:
                log.warning("notification lost: cannot send to %s: %s", path, error)
            return

    def _sending_socket(self) -> socket.socket:
        with self._lock:
            if self._sender is None:
                self._sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                self._sender.setblocking(False)
            return self._sender


def socket_folder(url: str) -> Path:
    """The folder in which the processes that use the SQLite file of `url` bind their sockets."""
    database = os.fsencode(Path(driver_url(url).database or "").resolve())
    name = f"tinkerflow-{os.getuid()}-{hashlib.sha256(database).hexdigest()[:16]}"
    folder = Path(tempfile.gettempdir()) / name
    return folder if len(os.fsencode(folder)) + _NAME_LENGTH <= _PATH_LIMIT else Path("/tmp") / name


def _receive(receiver: socket.socket, deliver: Callable[[tuple[str, ...]], None]) -> None:
    with contextlib.suppress(OSError):  # the socket was closed
        while message := receiver.recv(65536):
            deliver(unpack_topics(message))


def _bind(folder: Path, name: str) -> socket.socket:
    receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    for last in (False, False, True):
        try:
            _make_private(folder)
            receiver.bind(str(folder / name))
            break
        except FileNotFoundError:  # the last subscriber has just left and removed the folder
            if last:
                receiver.close()
                raise
        except BaseException:
            receiver.close()
            raise
    return receiver


def _make_private(folder: Path) -> None:
    """Create the folder, private to our user. ServerError: another user created it first."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(PRIVATE_FOLDER)
    if not _is_private(folder):
        raise ServerError(
            f"notification folder {folder}: must be a folder of user {os.getuid()} with mode 0700; remove it"
        )


def _is_private(folder: Path) -> bool:
    info = folder.lstat()
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not info.st_mode & 0o077

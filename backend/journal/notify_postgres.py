"""Notifications between processes that share a Postgres database: LISTEN and NOTIFY on one channel."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable

import psycopg

from tinkerflow.backend.journal.database import driver_url
from tinkerflow.backend.journal.topics import pack_topics, unpack_topics

log = logging.getLogger(__name__)

_CHANNEL = "tinkerflow_topics"
_LIMIT = 7000  # bytes; Postgres allows 7,999
_RECONNECT_SECONDS = 1.0
_STOP_CHECK_SECONDS = 0.5


class PostgresTransport:
    """Carries topics with NOTIFY on one connection, and receives them with LISTEN on another."""

    def __init__(self, url: str) -> None:
        """Prepare for the users of the database of `url`. Nothing is connected yet."""
        self._conninfo = driver_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
        self._own_name = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._sender: psycopg.Connection | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def send(self, topics: tuple[str, ...]) -> None:
        """NOTIFY the other processes. A broken connection, or one to a standby server, is reopened once."""
        with self._lock:
            for message in pack_topics(topics, _LIMIT):
                self._notify(f"{self._own_name}\n{message.decode()}")

    def start(self, deliver: Callable[[tuple[str, ...]], None]) -> None:
        """Connect, LISTEN, and read in a thread. It reconnects while the connection is broken, from the start on."""
        connection = self._try_to_listen(logging.WARNING)
        self._thread = threading.Thread(target=self._receive, args=(connection, deliver), name="notifier", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close both connections."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)
            self._thread = None
        with self._lock:
            self._close_sender()

    def _notify(self, message: str) -> None:
        for last in (False, True):
            try:
                if self._sender is None:
                    self._sender = psycopg.connect(self._conninfo, autocommit=True)
                self._sender.execute("SELECT pg_notify(%s, %s)", (_CHANNEL, message))
            except psycopg.Error as error:
                self._close_sender()
                if last:
                    log.warning("notification lost: cannot notify through Postgres: %s", error)
            else:
                return

    def _close_sender(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def _connect_listening(self) -> psycopg.Connection:
        connection = psycopg.connect(self._conninfo, autocommit=True)
        try:
            connection.execute(f"LISTEN {_CHANNEL}")
        except psycopg.Error:
            connection.close()
            raise
        return connection

    def _try_to_listen(self, level: int = logging.DEBUG) -> psycopg.Connection | None:
        try:
            return self._connect_listening()
        except psycopg.Error as error:
            log.log(level, "notifications: cannot listen through Postgres yet: %s", error)
            return None

    def _receive(self, connection: psycopg.Connection | None, deliver: Callable[[tuple[str, ...]], None]) -> None:
        while not self._stop.is_set():
            if connection is None:
                if not self._stop.wait(_RECONNECT_SECONDS):
                    connection = self._try_to_listen()
                continue
            try:
                for notification in connection.notifies(timeout=_STOP_CHECK_SECONDS):
                    sender, *topics = unpack_topics(notification.payload.encode())
                    if sender != self._own_name:
                        deliver(tuple(topics))
            except psycopg.Error as error:
                log.warning("notifications: lost the listening connection to Postgres; reconnecting: %s", error)
                connection.close()
                connection = None
        if connection is not None:
            connection.close()

"""Streams: tokens on their way from the engine to listeners, before the result is stored.

The engine writes the new tokens of all streamed samples as one row, and publishes one topic, `tokens`. Each API process
then reads its unread rows with one query, and passes the tokens to its own listeners. A row is kept for KEPT_SECONDS.
The result contains the same tokens, so a listener that missed some of them gets them with the result. After a crash,
the engine decodes and writes the same tokens again, and listeners skip tokens that they have already received.

Rows become visible in the order of their ids, because a single process, the engine, writes them one at a time.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakValueDictionary

import msgspec
import numpy as np
import sqlalchemy as sa
from sqlmodel import col

from tinkerflow.backend.core.errors import JournalBusyError
from tinkerflow.backend.journal.database import Aggregate
from tinkerflow.backend.journal.tables import StreamedRow
from tinkerflow.backend.journal.topics import TOKENS
from tinkerflow.backend.journal.waiter import Waiter
from tinkerflow.backend.spec.commands import Candidates, NewTokens

log = logging.getLogger(__name__)

KEPT_SECONDS = 30.0  # a process that reads later gets the missed tokens with the results
_MOST_ROWS = 1000  # read in one query
_MOST_HELD = 8192  # unread tokens of a slow listener, which gets the rest with the result
_LAST = sa.select(sa.func.max(col(StreamedRow.id)))
_AFTER = (
    sa.select(col(StreamedRow.id), col(StreamedRow.tokens))
    .where(col(StreamedRow.id) > sa.bindparam("after"))
    .order_by(col(StreamedRow.id))
    .limit(_MOST_ROWS)
)
_WRITE = sa.insert(StreamedRow)
_EXPIRE = sa.delete(StreamedRow).where(col(StreamedRow.written_at) < sa.bindparam("before"))


@dataclass(frozen=True)
class StreamedTokens:
    """New tokens of a sample, and the name of its stream (`stream_name`)."""

    stream: str
    new: NewTokens


def stream_name(sampler_id: str, seq_id: int | None) -> str:
    """The name of a sample's stream. It is known before the request is stored, so no token is missed."""
    return f"{sampler_id}#{seq_id}"


class Streams(Aggregate):
    """Rows of new tokens."""

    def __init__(self, *parts: Any) -> None:
        """parts: the arguments of `Aggregate`."""
        super().__init__(*parts)
        self._writing = threading.Lock()

    def write(self, tokens: Sequence[StreamedTokens]) -> None:
        """Write new tokens and publish them. FencedError if another engine has taken the lease."""
        row = {"written_at": self._now(), "tokens": _packed(tokens)}
        with self._writing, self._write(fenced=True, lasting=False) as connection:
            connection.execute(_WRITE, row)
        self._publish(TOKENS)

    def last(self) -> int:
        """The id of the newest row; 0 if there is none."""
        with self._read() as connection:
            return connection.execute(_LAST).scalar_one() or 0

    def after(self, seen: int) -> tuple[list[StreamedTokens], int]:
        """The tokens written after the row `seen`, oldest first, and the id of the newest row."""
        with self._read() as connection:
            rows = connection.execute(_AFTER, {"after": seen}).all()
        return [one for row in rows for one in _unpacked(row.tokens)], rows[-1].id if rows else seen

    def expire(self) -> None:
        """Delete rows that are older than KEPT_SECONDS. The results contain their tokens."""
        with self._write() as connection:
            connection.execute(_EXPIRE, {"before": self._ago(KEPT_SECONDS)})


def _packed(tokens: Sequence[StreamedTokens]) -> bytes:
    rows = []
    for one in tokens:
        new, top = one.new, one.new.top
        listed = None if top is None else [top.tokens_Nk.shape[1], *map(_bytes, (top.tokens_Nk, top.logprobs_Nk))]
        sampled = [_bytes(new.tokens_T), _bytes(new.logprobs_T)]
        rows.append([one.stream, new.request_id, new.index, new.start, *sampled, listed, new.stop_reason])
    return msgspec.msgpack.encode(rows)


def _unpacked(row: bytes) -> list[StreamedTokens]:
    found = []
    for stream, request_id, index, start, tokens, logprobs, listed, stop_reason in msgspec.msgpack.decode(row):
        top = None
        if listed is not None:
            k, top_tokens, top_logprobs = listed
            top = Candidates(_ints(top_tokens).reshape(-1, k), _floats(top_logprobs).reshape(-1, k))
        new = NewTokens(request_id, index, start, _ints(tokens), _floats(logprobs), top, stop_reason)
        found.append(StreamedTokens(stream, new))
    return found


def _bytes(array: Any) -> bytes:
    return bytes(array.astype("<i4" if array.dtype.kind == "i" else "<f4", copy=False).tobytes())


def _ints(data: bytes) -> Any:
    return np.frombuffer(data, "<i4")


def _floats(data: bytes) -> Any:
    return np.frombuffer(data, "<f4")


# ------------------------------------------------------------------ listeners
class Listener(Waiter):
    """Waits for the tokens of one stream and for its request's answer. answered: whether the request has its answer."""

    def __init__(self) -> None:
        """Use TokenSubscriptions.listen."""
        super().__init__()
        self.answered = False
        self._held: list[NewTokens] = []
        self._size = 0
        self._known: dict[int, int] = {}
        self._ended: set[int] = set()

    def put(self, new: NewTokens) -> None:
        """Store new tokens until `take`. Repeated tokens, and tokens after a gap, are ignored."""
        known, end = self._known.get(new.index, 0), new.start + len(new.tokens_T)
        old = new.index in self._ended or (end <= known and new.stop_reason is None)
        if old or new.start > known or self._size > _MOST_HELD:
            return
        if new.start < known:
            new = _later(new, known - new.start)
        self._known[new.index] = max(end, known)
        if new.stop_reason is not None:
            self._ended.add(new.index)
        self._size += len(new.tokens_T)
        self._held.append(new)
        super().wake()

    def take(self) -> list[NewTokens]:
        """Return the tokens received since the last call."""
        held, self._held, self._size = self._held, [], 0
        if not self.answered:
            self.sleep()
        return held

    def wake(self) -> None:
        """End the wait, because the request has its answer."""
        self.answered = True
        super().wake()


def _later(new: NewTokens, skipped: int) -> NewTokens:
    top = new.top
    if top is not None:
        top = Candidates(top.tokens_Nk[skipped:], top.logprobs_Nk[skipped:])
    rest = {"tokens_T": new.tokens_T[skipped:], "logprobs_T": new.logprobs_T[skipped:], "top": top}
    return replace(new, start=new.start + skipped, **rest)  # type: ignore[arg-type]


@dataclass
class TokenSubscriptions:
    """The listeners of one process. While there are any, `run` reads rows for all of them.

    last: returns the newest row's id. after: returns the tokens after a row, and the newest row's id.
    """

    last: Callable[[], int]
    after: Callable[[int], tuple[list[StreamedTokens], int]]
    _listeners: WeakValueDictionary[str, Listener] = field(default_factory=WeakValueDictionary)
    _seen: int | None = None  # the newest row that was read; None while there are no listeners
    _some: asyncio.Event = field(default_factory=asyncio.Event)
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def listen(self, stream: str) -> Listener:
        """Create a listener for a stream that has not begun. It is removed when the caller drops it."""
        listener = self._listeners[stream] = Listener()
        async with self._reading:
            if self._seen is None:
                self._seen = await asyncio.to_thread(self.last)
        return listener

    def wake(self) -> None:
        """Make `run` look for new tokens."""
        self._some.set()

    async def run(self) -> None:
        """Pass tokens to listeners as they arrive. Never returns."""
        while True:
            await self._some.wait()
            self._some.clear()
            try:
                async with self._reading:
                    await self._hand_out()
            except (sa.exc.SQLAlchemyError, JournalBusyError):
                log.exception("cannot read tokens for %d streams; trying again soon", len(self._listeners))

    async def _hand_out(self) -> None:
        if not self._listeners:
            self._seen = None
        while self._seen is not None:
            found, newest = await asyncio.to_thread(self.after, self._seen)
            if newest == self._seen:
                return
            self._seen = newest
            self._deliver(found)

    def _deliver(self, found: Sequence[StreamedTokens]) -> None:
        for one in found:
            if (listener := self._listeners.get(one.stream)) is not None:
                listener.put(one.new)

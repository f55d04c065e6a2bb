"""Request bodies: read within limits of size, memory and time, and decompressed.

The first SMALL bytes of a body are read immediately. A longer body first reserves memory for its whole size in a
`BodyMemory`, which projects share fairly. Meanwhile uvicorn reads at most 64 KiB of it, so waiting bodies cost nothing.
"""

from __future__ import annotations

import asyncio
import io
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import zstandard
from fastapi import Request

from tinkerflow.backend.core.errors import BodyTooLargeError, TooManyError, UserError
from tinkerflow.backend.core.fairness import FairQueue

BODY = "tinkerflow.body"  # in a request's scope: its `Body`
SMALL = 2**16  # bytes of the largest body that takes nothing from a BodyMemory
MEDIUM = 2**23  # bytes of the largest body that does not wait for larger ones
WAIT_SECONDS = 10.0  # longest wait for memory; then the client must send the request again
_PATIENCE_SECONDS = 2.0  # bodies wait this long before slower ones give way
_SLOW_RATE = 2**20  # bytes per second of a body that does not give way
_MAX_WINDOW = 2**27  # bytes of history that a zstd frame may require
_COUNTED = 2**20  # bytes of JSON whose values are counted in one step
_COMMA, _LIST, _OBJECT = b",[{"

Decompress = Callable[[bytes, int], Awaitable[bytes]]  # a frame and the size of its content to the content


@dataclass(eq=False)
class Share:
    """The bytes of a BodyMemory that one body holds. arrived: bytes received so far. since: when the body began."""

    owner: str
    size: int
    since: float
    arrived: int = 0
    deadline: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))

    def delay(self, now: float) -> float:
        """The delay in seconds, relative to a body that arrives at _SLOW_RATE."""
        return now - self.since - self.arrived / _SLOW_RATE


class BodyMemory:
    """Memory for bodies. A project may hold at most half of it, or a single body of any size.

    Bodies wait in a queue that is fair among projects. While a body waits, bodies that arrive slowly give way.
    """

    def __init__(self, total: int) -> None:
        """total: size of the memory in bytes."""
        self._total = total
        self._held: Counter[str] = Counter()
        self._receiving: set[Share] = set()
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue()

    async def take(self, owner: str, size: int) -> Share:
        """Take `size` bytes for a body of the project `owner`. TooManyError: none were free for WAIT_SECONDS."""
        loop = asyncio.get_running_loop()
        granted: asyncio.Future[None] = loop.create_future()
        ticket = self._queue.push(owner, granted, min(size, self._total))
        self._serve()
        until = loop.time() + WAIT_SECONDS
        try:
            while not granted.done():
                if (left := until - loop.time()) <= 0:
                    raise TooManyError("other large requests are being read: send this request again")
                await asyncio.wait((granted,), timeout=min(_PATIENCE_SECONDS, left))
                if not granted.done():
                    self._end_slowest(loop.time())
        except BaseException:
            if granted.done():
                self._give_back(owner, int(ticket.cost))
            else:
                self._queue.withdraw(ticket)
            raise
        return Share(owner, int(ticket.cost), loop.time())

    @asynccontextmanager
    async def receiving(self, share: Share) -> AsyncIterator[None]:
        """The context in which a body arrives. TooManyError: the body was slow and gave way to others."""
        try:
            async with share.deadline:
                self._receiving.add(share)
                yield
        except TimeoutError:
            raise TooManyError("the body arrived slowly while other requests waited: send it again") from None
        finally:
            self._receiving.discard(share)

    def give_back(self, share: Share) -> None:
        """Free the bytes of a share. Repeating this has no effect."""
        size, share.size = share.size, 0
        self._give_back(share.owner, size)

    def _give_back(self, owner: str, size: int) -> None:
        self._held[owner] -= size
        self._held += Counter()  # drops projects that hold nothing
        self._serve()

    def _serve(self) -> None:
        """Grant waiting bodies their bytes, in order. A body that does not fit holds back all bodies behind it."""
        for ticket in self._queue:
            held = self._held[ticket.owner]
            if held and held + ticket.cost > self._total / 2:
                continue
            if ticket.cost > self._total - self._held.total():
                return
            self._held[ticket.owner] += int(ticket.cost)
            self._queue.serve(ticket).set_result(None)

    def _end_slowest(self, now: float) -> None:
        slowest = max(self._receiving, key=lambda share: share.delay(now), default=None)
        if slowest is not None and slowest.delay(now) > _PATIENCE_SECONDS:
            self._receiving.discard(slowest)
            slowest.deadline.reschedule(now)


@dataclass(frozen=True)
class Memories:
    """The memory of medium bodies, of large bodies, and of the pieces of uploaded files."""

    medium: BodyMemory
    large: BodyMemory
    pieces: BodyMemory

    @classmethod
    def for_bodies_of(cls, most: int) -> Memories:
        """Memory for two bodies of the largest size, `most` bytes, in addition to medium ones."""
        return cls(BodyMemory(16 * MEDIUM), BodyMemory(2 * most), BodyMemory(16 * MEDIUM))

    def fitting(self, size: int) -> BodyMemory:
        return self.medium if size <= MEDIUM else self.large


class Body:
    """The body of one request. Call `release` to free its memory when the content is no longer needed."""

    def __init__(self, request: Request, most: int, rule: str, owner: str, memories: Memories) -> None:
        """Nothing is read yet.

        request: the request with the body. most: maximum size in bytes, before and after decompression. rule: the
        origin of this limit, for errors. owner: the project that the memory is charged to. memories: shared by all
        requests.
        """
        self._request = request
        self._most = most
        self._rule = rule
        self._owner = owner
        self._memories = memories
        self.size = 0  # size of the content, once it is read
        self._memory: BodyMemory | None = None
        self._share: Share | None = None

    async def read(self, decompress: Decompress) -> bytes:
        """Read the body and decompress it. Reading stops at the first violation.

        decompress: decompresses a large zstd frame.
        BodyTooLargeError: more than `most` bytes. UserError: the body does not match its headers.
        TooManyError: no memory was free, or the body arrived too slowly while others waited.
        """
        headers = self._request.headers
        encoding = headers.get("content-encoding", "identity").lower()
        if encoding not in ("identity", "zstd"):
            raise UserError(f"Content-Encoding is {encoding!r}: must be zstd or absent")
        declared = headers.get("content-length", "")
        expected = int(declared) if declared.isascii() and declared.isdecimal() else None
        if expected is not None and expected > self._most:
            raise self._too_large()
        stream, content = self._request.stream(), io.BytesIO()
        ended = await self._receive(stream, content, SMALL)
        needed = 0 if ended else self._most if expected is None else expected
        size = 0
        if encoding == "zstd":
            needed += (size := self._content_size(content.getvalue()))
        if needed > SMALL:
            self._memory = self._memories.fitting(needed)
            self._share = await self._memory.take(self._owner, needed)
            async with self._memory.receiving(self._share):
                if not ended:
                    await self._receive(stream, content, self._most)
        body = content.getvalue()
        self.size = size or len(body)
        if encoding == "identity":
            return body
        return await decompress(body, size) if size > SMALL else decompressed(body, size)

    def release(self) -> None:
        """Free the body's memory. Repeating this has no effect."""
        if self._memory is not None and self._share is not None:
            self._memory.give_back(self._share)

    async def _receive(self, stream: AsyncIterator[bytes], content: io.BytesIO, enough: int) -> bool:
        """Read until `content` exceeds `enough` bytes. Returns whether the body ended before that."""
        async for part in stream:
            content.write(part)
            if self._share is not None:
                self._share.arrived += len(part)
            if content.tell() > self._most:
                raise self._too_large()
            if content.tell() > enough:
                return False
        return True

    def _content_size(self, beginning: bytes) -> int:
        size = content_size(beginning)
        if size > self._most:
            raise BodyTooLargeError(
                f"the request body has {size} bytes when decompressed: must have at most {self._most} ({self._rule})"
            )
        return size

    def _too_large(self) -> BodyTooLargeError:
        return BodyTooLargeError(f"the request body is too large: must have at most {self._most} bytes ({self._rule})")


def content_size(frame: bytes) -> int:
    """The size of a zstd frame's content, as its header declares. UserError: the header is invalid or declares no size.

    Without a declared size, a truncated frame would pass.
    """
    try:
        size = zstandard.get_frame_parameters(frame).content_size
    except zstandard.ZstdError as error:
        raise _broken_frame(error) from error
    if size == zstandard.CONTENTSIZE_UNKNOWN:
        raise UserError("the request body is a zstd frame without a content size: must declare its content size")
    return int(size)


def decompressed(frame: bytes, size: int) -> bytes:
    """The content, of `size` bytes, of the single zstd frame in `frame`. Slow for large frames."""
    try:
        decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
        return decompressor.decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise _broken_frame(error) from error


def _broken_frame(error: Exception) -> UserError:
    return UserError(f"Content-Encoding is zstd: the request body must be one complete zstd frame: {error}")


def check_values(body: bytes, most: int, rule: str) -> None:
    """Limit the number of values in a JSON body, by a fast count that is never too low.

    BodyTooLargeError: there are more than `most` values. Each takes up to 64 bytes once parsed, so `[[],[],...` would
    take twenty times the memory of its text. rule: the origin of `most`, for the error.
    """
    text, values = np.frombuffer(body, np.uint8), 1
    for start in range(0, len(text), _COUNTED):
        part = text[start : start + _COUNTED]
        values += int(np.count_nonzero((part == _COMMA) | (part == _LIST) | (part == _OBJECT)))
    if values > most:
        raise BodyTooLargeError(f"the request body has about {values} values: must have at most {most} ({rule})")

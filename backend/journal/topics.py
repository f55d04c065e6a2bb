"""Topics: short texts that name a change. Processes that wait for the change subscribe to its topic.

- `model:<id>`: new work arrived for the model, or the model ended
- `sample`: a sample arrived, or was answered without being executed
- `session:<id>`: the session ended
- `cancel:<request_id>`: the sample is no longer wanted
- `done:<request_id>`: the request is answered
- `tokens`: streamed samples have new tokens (streams.py)
- `answered:<clone>:<sampler_id>`: a request of this clone of the sampler is answered; without a clone, one of any clone
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

TOKENS = "tokens"
CLONE_BLOCK = 1_000_000_000  # the sequence ids of clone n of a client are [n * CLONE_BLOCK, (n + 1) * CLONE_BLOCK)


def answered(sampler_id: str, seq_id: int | None = None) -> str:
    """The topic `answered:<clone>:<sampler>` for answers of a sampler; without seq_id, for all clones."""
    return f"answered:{'' if seq_id is None else seq_id // CLONE_BLOCK}:{sampler_id}"


class Transport(Protocol):
    """Carries topics between processes that share a database. A topic may be lost."""

    def send(self, topics: tuple[str, ...]) -> None:
        """Send topics to the other processes. Unreachable processes raise no error."""

    def start(self, deliver: Callable[[tuple[str, ...]], None]) -> None:
        """Start calling `deliver`, in a thread, with the topics of other processes."""

    def close(self) -> None:
        """Stop, and release all resources."""


def pack_topics(topics: tuple[str, ...], limit: int) -> Iterator[bytes]:
    """The topics, one per line, in as few messages of at most `limit` bytes as possible."""
    message = b""
    for topic in topics:
        line = topic.encode() + b"\n"
        if message and len(message) + len(line) > limit:
            yield message
            message = b""
        message += line
    if message:
        yield message


def unpack_topics(message: bytes) -> tuple[str, ...]:
    return tuple(message.decode().splitlines())

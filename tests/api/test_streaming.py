"""Streams over HTTP: tokens arrive before the result, each once, on several servers. Slow readers delay no one."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from tests.api.conftest import BASE, KEY, Running
from tests.waiting import wait_for

from tinkerflow.backend.journal import Journal, Pending
from tinkerflow.backend.journal.streams import StreamedTokens, stream_name
from tinkerflow.backend.spec.commands import NewTokens, SampledSequence, SampleResult
from tinkerflow.backend.wire import encode_sample

pytestmark = pytest.mark.usefixtures("lettered")
TOKENS = [2 + n % 12 for n in range(40)]


class Decoder:
    """Decodes TOKENS for every streaming request, in chunks set by the test."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.requests: dict[str, Pending] = {}

    def take(self, count: int) -> None:
        """Wait for `count` requests."""
        taken = wait_for(lambda: len(found := self.journal.requests.pending_samples(1000)) == count and found)
        self.requests = {request.id: request for request in taken}

    def decode(self, start: int, end: int) -> None:
        """Stream tokens [start, end) of every request."""
        tokens = []
        for request in self.requests.values():
            some = np.array(TOKENS[start:end], np.int32)
            new = NewTokens(request.id, 0, start, some, -some.astype(np.float32))
            tokens.append(StreamedTokens(stream_name(str(request.sampler_id), request.seq_id), new))
        self.journal.streams.write(tokens)

    def answer(self, tokens: int = len(TOKENS)) -> None:
        """Answer every request with its first `tokens` tokens."""
        some = np.array(TOKENS[:tokens], np.int32)
        one = SampledSequence(some, -some.astype(np.float32), "length")
        self.journal.results.finish(
            [
                request.done(encode_sample(SampleResult(request.id, (one,))), "proto")
                for request in self.requests.values()
            ]
        )


@pytest.fixture
def decoder(journal: Journal) -> Decoder:
    return Decoder(journal)


class Reader(threading.Thread):
    """Reads one stream. heard: its tokens so far."""

    def __init__(self, server: Running, pause: float = 0.0) -> None:
        super().__init__()
        self.server, self.pause = server, pause
        self.heard: list[int] = []
        self.last = ""
        self.left = threading.Event()

    def run(self) -> None:
        body = {"model": BASE, "prompt": "a", "max_tokens": len(TOKENS), "stream": True, "return_token_ids": True}
        headers = {"Authorization": f"Bearer {KEY}"}
        with self.server.http.stream("POST", f"{self.server.url}/v1/completions", json=body, headers=headers) as answer:
            for line in answer.iter_lines():
                if self.left.is_set():
                    return
                self.last = line or self.last
                if line.startswith("data: {"):
                    for choice in json.loads(line.removeprefix("data: ")).get("choices", ()):
                        self.heard += choice["token_ids"]
                time.sleep(self.pause)


def listening(server: Running, count: int, **more: Any) -> list[Reader]:
    readers = [Reader(server, **more) for _ in range(count)]
    for reader in readers:
        reader.start()
    return readers


def hear(readers: list[Reader], decoder: Decoder, ends: Iterable[int], start: int = 0) -> None:
    """Decode from `start` up to each of the ends, and wait until all readers have the tokens."""
    for end in ends:
        decoder.decode(start, end)
        wait_for(lambda end=end: all(len(reader.heard) >= end for reader in readers))
        start = end


def hear_all(readers: list[Reader], decoder: Decoder) -> None:
    """Answer all requests, and assert that each reader has received each token once."""
    decoder.answer()
    for reader in readers:
        reader.join(60)
        assert reader.heard == TOKENS


def test_stream_sends_tokens_before_the_result_and_none_twice_after_a_crash(server: Running, decoder: Decoder) -> None:
    (reader,) = listening(server, 1)
    decoder.take(1)
    hear([reader], decoder, (8, 16))
    decoder.decode(0, 6)  # a worker was killed: the next worker starts again, with other chunks
    hear([reader], decoder, (18,), start=6)
    decoder.decode(20, 24)  # the row with tokens 18 and 19 was lost
    hear_all([reader], decoder)
    assert reader.last == "data: [DONE]"


def test_64_streams_on_two_servers_lose_nothing(start: Callable[..., Running], decoder: Decoder) -> None:
    readers = [reader for server in (start(), start()) for reader in listening(server, 32)]
    decoder.take(64)
    hear(readers, decoder, range(4, len(TOKENS) + 1, 4))
    hear_all(readers, decoder)


def test_a_request_that_fails_after_its_beginning_ends_with_an_event(server: Running, decoder: Decoder) -> None:
    (reader,) = listening(server, 1)
    decoder.take(1)
    hear([reader], decoder, (4,))
    (request,) = decoder.requests.values()
    decoder.journal.results.finish([request.failed("the weights have diverged", "user")])
    reader.join(60)
    assert json.loads(reader.last.removeprefix("data: "))["error"]["message"] == "the weights have diverged"


def test_streaming_keeps_a_session_alive(server: Running, decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    samplers, beaten = server.app.state.services.samplers, []
    monkeypatch.setattr(samplers, "beat", lambda session, beat=samplers.beat: beaten.append(session) or beat(session))
    (reader,) = listening(server, 1)
    decoder.take(1)
    for begin in range(0, 12, 4):
        hear([reader], decoder, (begin + 4,), start=begin)
        assert len(beaten) == begin // 4, "one heartbeat for each time that one is due"
        server.clock.advance(samplers.beat_seconds)
    hear_all([reader], decoder)


def test_disconnected_streams_are_cancelled(server: Running, decoder: Decoder) -> None:
    gone, stays = listening(server, 1), listening(server, 1)
    decoder.take(2)
    hear([*gone, *stays], decoder, (4,))
    gone[0].left.set()
    decoder.decode(4, 8)  # the reader gets this line and disconnects
    wait_for(lambda: decoder.journal.results.finished(list(decoder.requests)))
    hear_all(stays, decoder)


def test_slow_reader_does_not_slow_other_streams(server: Running, decoder: Decoder) -> None:
    """The slow reader never reads, so the buffers of its socket fill up."""
    body = json.dumps({"model": BASE, "prompt": "a", "max_tokens": 40, "stream": True}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nx-api-key: {KEY}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    port = int(server.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as slow:
        slow.sendall(head.encode() + body)
        readers = listening(server, 4)
        decoder.take(5)
        hear(readers, decoder, range(4, len(TOKENS) + 1, 4))
        hear_all(readers, decoder)

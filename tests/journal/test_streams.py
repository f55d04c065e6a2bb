"""Streams: rows of new tokens on both databases. Listeners get each token once, even if it is written twice."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st
from tests.manual_clock import ManualClock

from tinkerflow.backend.core.errors import FencedError, JournalBusyError
from tinkerflow.backend.journal import Journal
from tinkerflow.backend.journal.streams import KEPT_SECONDS, Listener, StreamedTokens, TokenSubscriptions, stream_name
from tinkerflow.backend.spec.commands import Candidates, NewTokens


def new(start: int, end: int, *, index: int = 0, top: int = 0, last: int = 10**9) -> NewTokens:
    """Tokens [start, end) of a sample in which token n is n and has the logprob -n."""
    tokens = np.arange(start, end, dtype=np.int32)
    listed = np.repeat(tokens[:, None], top, 1)
    candidates = Candidates(listed, -listed.astype(np.float32)) if top else None
    return NewTokens(
        "req", index, start, tokens, -tokens.astype(np.float32), candidates, "stop" if end == last else None
    )


def test_stream_rows_are_read_once_and_in_order(journal: Journal, clock: ManualClock) -> None:
    streams = journal.streams
    assert streams.last() == 0
    first = [StreamedTokens("a", new(0, 3, top=2))]
    second = [StreamedTokens("b", new(0, 0)), StreamedTokens("a", new(3, 5))]
    streams.write(first)
    seen = streams.last()
    streams.write(second)
    found, newest = streams.after(0)
    assert repr(found) == repr([*first, *second])
    assert newest == streams.last() > seen
    assert repr(streams.after(seen)) == repr((second, newest))
    assert streams.after(newest) == ([], newest)
    clock.advance(KEPT_SECONDS + 1)
    streams.expire()
    assert streams.after(0) == ([], 0)
    streams.write(first)
    assert streams.last() > newest, "no id is used again: a reader would take the row for one it has seen"


def test_fenced_engine_cannot_write_tokens(journal: Journal, url: str, clock: ManualClock) -> None:
    journal.leases.acquire("old")
    other = Journal.open(url, clock=clock)
    clock.advance(1000)
    other.leases.acquire("new")
    with pytest.raises(FencedError):
        journal.streams.write([StreamedTokens("a", new(0, 1))])
    other.close()


def test_listener_gets_tokens_written_after_it_joined(journal: Journal) -> None:
    async def scene() -> None:
        async with journal.result_subscriptions() as subscriptions:
            journal.streams.write([StreamedTokens("mine", new(0, 3))])  # written before the listener joined
            listener = await subscriptions.tokens.listen("mine")
            other = await subscriptions.tokens.listen("other")
            journal.streams.write([StreamedTokens("mine", new(0, 2)), StreamedTokens("none", new(0, 9))])
            assert await listener.wait(20)
            assert [one.tokens_T.tolist() for one in listener.take()] == [[0, 1]]
            journal.streams.write([StreamedTokens("mine", new(2, 4, last=4)), StreamedTokens("other", new(0, 1))])
            assert await listener.wait(20) and await other.wait(20)
            (rest,) = listener.take()
            assert (rest.tokens_T.tolist(), rest.stop_reason) == ([2, 3], "stop")
            assert not listener.answered
            assert len(subscriptions.tokens._listeners) == 2
            del listener, other
            gc.collect()
            assert len(subscriptions.tokens._listeners) == 0

    asyncio.run(scene())


@given(
    length=st.integers(1, 40),
    lives=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=20), min_size=1, max_size=4),
    takes=st.sets(st.integers(0, 60)),
    top=st.booleans(),
)
def test_restarted_engine_repeats_no_token_to_a_listener(
    length: int, lives: list[list[int]], takes: set[int], top: bool
) -> None:
    """Each engine writes the same tokens from the start, in different chunks, and stops anywhere."""
    listener, heard, written, number = Listener(), [], 0, 0
    for life in lives:
        at = 0
        for chunk in life:
            end = min(at + chunk, length)
            listener.put(new(at, end, top=2 * top, last=length))
            at, number = end, number + 1
            if number in takes:
                heard += listener.take()
            if end == length:
                break
        written = max(written, at)
    heard += listener.take()
    assert [token for one in heard for token in one.tokens_T.tolist()] == list(range(written))
    assert [value for one in heard for value in one.logprobs_T.tolist()] == [-float(token) for token in range(written)]
    assert [one.stop_reason for one in heard if one.stop_reason] == ["stop"] * (written == length)
    for one in heard:
        assert one.top is None or one.top.tokens_Nk[:, 0].tolist() == one.tokens_T.tolist()


def test_listener_drops_tokens_after_a_gap_and_holds_a_bounded_number() -> None:
    listener = Listener()
    listener.put(new(0, 2))
    listener.put(new(4, 6))  # the tokens between them were lost
    assert [one.tokens_T.tolist() for one in listener.take()] == [[0, 1]]
    slow = Listener()
    for start in range(0, 100_000, 10):
        slow.put(new(start, start + 10))
    held = slow.take()
    assert sum(len(one.tokens_T) for one in held) < 10_000
    assert [one.start for one in held] == list(range(0, 10 * len(held), 10)), "from the beginning, without a gap"
    slow.put(new(99_990, 100_000))
    assert slow.take() == []


def test_two_processes_get_the_same_tokens(journal: Journal, url: str) -> None:
    other = Journal.open(url)

    async def scene() -> None:
        async with journal.result_subscriptions() as one, other.result_subscriptions() as two:
            listeners = [await each.tokens.listen("s") for each in (one, two)]
            journal.streams.write([StreamedTokens("s", new(0, 4))])
            for listener in listeners:
                assert await listener.wait(20)
                assert [got.tokens_T.tolist() for got in listener.take()] == [[0, 1, 2, 3]]

    asyncio.run(scene())
    other.close()  # after all threads are idle, because a connection in use would stay open


@pytest.mark.parametrize(
    "error", [sa.exc.OperationalError("", None, Exception("away")), JournalBusyError("a transaction was ended")]
)
def test_stream_reader_retries_after_a_database_outage(error: Exception) -> None:
    answers: list[Any] = []

    def after(seen: int) -> tuple[list[StreamedTokens], int]:
        answers.append(seen)
        if len(answers) == 1:
            raise error
        return ([StreamedTokens("s", new(0, 1))], 1) if seen == 0 else ([], 1)

    async def scene() -> None:
        tokens = TokenSubscriptions(lambda: 0, after)
        running = asyncio.create_task(tokens.run())
        listener = await tokens.listen("s")
        tokens.wake()
        async with asyncio.timeout(20):
            while not await listener.wait(0.01):
                tokens.wake()
        assert len(answers) >= 2
        running.cancel()

    asyncio.run(scene())


def test_stream_name_is_formed_from_sampler_and_sequence_number() -> None:
    assert stream_name("sess-1:sample:0", 7) == "sess-1:sample:0#7"

"""The heartbeat monitor, which measures silence by counting its own beats."""

from __future__ import annotations

import asyncio
import itertools
import time

from tinkerflow.backend.supervise import BEATS, HeartbeatMonitor

PAUSE = 0.01


async def test_silence_is_noticed_after_the_timeout() -> None:
    beats = 0

    async def beat() -> None:
        nonlocal beats
        beats += 1

    monitor = HeartbeatMonitor(BEATS * PAUSE, lambda: 7, beat)
    assert await monitor.silence() == BEATS * PAUSE
    assert beats == BEATS + 1  # the first beat sees the initial sign of life


async def test_heartbeats_keep_the_peer_alive() -> None:
    signs = itertools.chain(range(3 * BEATS), itertools.repeat(0))
    asked = 0

    async def beat() -> None:
        nonlocal asked
        asked += 1

    await HeartbeatMonitor(BEATS * PAUSE, lambda: next(signs), beat).silence()
    assert asked == 3 * BEATS + 1 + BEATS


async def test_stall_of_this_process_is_not_counted_as_silence() -> None:
    beats = 0

    async def beat() -> None:
        nonlocal beats
        beats += 1
        if beats == 2:
            time.sleep(3 * BEATS * PAUSE)  # noqa: ASYNC251  (the stall)

    assert await HeartbeatMonitor(BEATS * PAUSE, lambda: 0, beat).silence() == BEATS * PAUSE
    assert beats == BEATS + 1


async def test_a_starting_process_may_be_silent_for_longer() -> None:
    beats, starting = 0, True

    async def beat() -> None:
        nonlocal beats, starting
        beats += 1
        starting = beats < 5 * BEATS

    seconds = await HeartbeatMonitor(BEATS * PAUSE, lambda: 0, beat, lambda: starting).silence()
    assert beats == 5 * BEATS
    assert seconds > BEATS * PAUSE


async def test_slow_beat_replaces_the_pause() -> None:
    ask = asyncio.Event()

    async def beat() -> None:
        ask.set()
        await asyncio.sleep(PAUSE)

    await HeartbeatMonitor(BEATS * PAUSE, lambda: 0, beat).silence()
    assert ask.is_set()

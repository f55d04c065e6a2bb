"""More base models than worker groups: whose turn it is, and an engine with real worker processes that follows."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinkerflow.backend.journal import Journal, Kind
from tinkerflow.backend.settings import Settings
from tinkerflow.backend.wire import tinker_pb2 as pb
from tinkerflow.deployments.tiny_model import make_tiny
from tinkerflow.flows.engine import run_engine
from tinkerflow.flows.turns import Turns

HERE = Path(__file__).parent
ALL = {"a", "b", "c", "d", "e"}


def test_the_group_that_was_unused_longest_makes_room() -> None:
    turns = Turns(2, idle=5.0, turn=100.0)
    assert turns.look(["b", "a"], set(), 0.0) == (["b", "a"], [], [])
    assert turns.look(["a"], ALL, 3.0) == ([], [], [])
    assert turns.look(["c"], ALL, 4.0) == ([], [], [])  # b is unused for 4 s, a for 1 s
    assert turns.look(["c"], ALL, 6.0) == ([], ["b"], [])
    assert turns.look(["c"], ALL, 9.0) == ([], [], [])  # b is ending, and that is enough
    del turns.held["b"]
    assert turns.look(["c"], ALL, 9.5) == (["c"], [], [])
    assert turns.line == []


def test_a_busy_group_is_left_until_its_turn_is_over_and_the_line_is_in_order() -> None:
    turns = Turns(2, idle=5.0, turn=100.0)
    turns.look(["a"], ALL, 0.0)
    turns.look(["a", "b"], ALL, 10.0)
    assert turns.look(["a", "b", "c"], ALL, 20.0) == ([], [], [])
    assert turns.look(["d", "a", "b", "c"], ALL, 99.0) == ([], [], [])
    assert turns.line == ["c", "d"]  # also when the requests of d waited longer
    assert turns.look(["a", "b", "c", "d"], ALL, 100.0) == ([], [], ["a"])
    assert turns.look(["a", "b", "c", "d"], ALL, 111.0) == ([], [], ["b"])
    del turns.held["a"]
    assert turns.look(["a", "b", "c", "d"], ALL, 112.0) == (["c"], [], [])
    assert turns.line == ["d", "a"]


def test_a_group_that_is_being_started_stays_and_who_asks_no_more_leaves_the_line() -> None:
    turns = Turns(1, idle=5.0, turn=10.0)
    turns.look(["a"], set(), 0.0)
    assert turns.look(["b"], set(), 50.0) == ([], [], [])
    assert turns.look([], {"a"}, 60.0) == ([], [], [])
    assert turns.line == []


def test_an_unused_group_ends_by_itself_when_that_is_asked_for() -> None:
    turns = Turns(3, release=60.0)
    turns.look(["a", "b"], ALL, 0.0)
    assert turns.look(["b"], ALL, 59.0) == ([], [], [])
    assert turns.look(["b"], ALL, 60.0) == ([], ["a"], [])
    assert Turns(3).look([], ALL, 1e9) == ([], [], [])


def workers() -> list[int]:
    """Pids of the worker processes below this one."""
    found = []
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread or process that has just ended
            for pid in path.read_text().split():
                if b"tinkerflow.backend.pool.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(int(pid))
    return found


async def test_five_base_models_share_two_groups(
    tmp_path: Path, connect: Any, running: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    monkeypatch.setattr("tinkerflow.flows.dispatcher.Turns", partial(Turns, idle=0.05, turn=1.0))
    monkeypatch.setattr("tinkerflow.flows.turns.LOOK_SECONDS", 0.05)
    first = make_tiny(tmp_path / "0")
    names = [str(first), *(str(shutil.copytree(first, tmp_path / str(number))) for number in range(1, 5))]
    ready = asyncio.Event()
    settings = Settings(data_dir=tmp_path, base_models=tuple(names), prefect="off", max_groups=2)
    engine = run_engine(settings, on_ready=ready.set, on_progress=print, executor="numpy_executor:Unigram")
    async with running(engine) as task:
        await until(lambda: ready.is_set() or task.done())
        journal = Journal.open(settings.journal_url)
        clients = [await connect(journal, name) for name in names]
        assert workers() == []
        idle = await clients[0].create()
        assert len(workers()) == 1
        assert (await clients[0].result(clients[0].forward_backward(idle, [5]))).error is None

        told: set[str] = set()

        def was_told(start: str) -> bool:
            return any(text.startswith(start) for text in told)

        async def train(client: Any, model: str) -> int:
            """Have something to do all the time until only the end of a turn has made room; how many steps that is."""
            waiting = [client.forward_backward(model, [7]), client.optim_step(model)]
            steps = 1
            while steps < 13 or not was_told("its worker group takes nothing new: "):
                waiting += [client.forward_backward(model, [7]), client.optim_step(model)]
                steps += 1
                assert [(await client.result(waiting.pop(0))).error for _ in range(2)] == [None, None]
            assert [result.error for result in await client.results(*waiting)] == [None, None]
            return steps

        async def listen() -> None:
            while True:
                told.update((journal.recovery.health().waits or {}).values())
                assert len(workers()) <= 2
                await asyncio.sleep(0.02)

        async with running(listen()) as listening:
            models = await asyncio.gather(*(client.create() for client in clients[1:]))
            rounds = [train(client, model) for client, model in zip(clients[1:], models, strict=True)]
            training = asyncio.gather(*rounds)
            await asyncio.sleep(0.5)
            for pid in workers():
                os.kill(pid, signal.SIGKILL)
            steps = await asyncio.wait_for(training, 300)
            assert not listening.done()
        assert was_told("waiting for one of 2 worker group(s), with "), told
        assert [journal.models.get(model, None).step for model in models] == steps
        # the gradient that was there before others had their turns is in this step
        client = clients[0]
        client.optim_step(idle)
        saved = client.submit(idle, Kind.SAVE_FOR_SAMPLER, {"sampling_session_seq_id": 3})
        assert (await client.result(saved)).error is None
        sample = await client.result(client.sample(f"{client.session}:sample:3"))
        tokens = pb.SampleResponse.FromString(sample.result).sequences[0].tokens
        assert set(np.frombuffer(tokens, np.int32)) == {5}
        journal.close()
    assert workers() == []

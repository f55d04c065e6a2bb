"""More base models than worker groups: the order of turns, and an engine with real worker processes."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.flows.test_engine import workers
from tests.manual_clock import ManualClock

from tinkerflow.backend.core import errors
from tinkerflow.backend.journal import Journal, Kind, ModelLive, ModelState
from tinkerflow.backend.settings import Settings
from tinkerflow.backend.wire import tinker_pb2 as pb
from tinkerflow.deployments.tiny_model import make_tiny
from tinkerflow.flows.engine import run_engine
from tinkerflow.flows.turns import GroupTurns, Turns, fail_waiting

HERE = Path(__file__).parent
ALL = {"a", "b", "c", "d", "e"}


def test_least_recently_used_group_makes_room() -> None:
    turns = Turns(2, idle=5.0, turn=100.0)
    assert turns.look(["b", "a"], set(), 0.0) == (["b", "a"], [], [])
    assert turns.look(["a"], ALL, 3.0) == ([], [], [])
    assert turns.look(["c"], ALL, 4.0) == ([], [], [])  # b is unused for 4 s, a for 1 s
    assert turns.look(["c"], ALL, 6.0) == ([], ["b"], [])
    assert turns.look(["c"], ALL, 9.0) == ([], [], [])  # b is ending, and that is enough
    del turns.held["b"]
    assert turns.look(["c"], ALL, 9.5) == (["c"], [], [])
    assert turns.line == []


def test_busy_group_keeps_its_turn_and_the_line_stays_in_order() -> None:
    turns = Turns(2, idle=5.0, turn=100.0)
    turns.look(["a"], ALL, 0.0)
    turns.look(["a", "b"], ALL, 10.0)
    assert turns.look(["a", "b", "c"], ALL, 20.0) == ([], [], [])
    assert turns.look(["d", "a", "b", "c"], ALL, 99.0) == ([], [], [])
    assert turns.line == ["c", "d"]  # even though the requests of d waited longer
    assert turns.look(["a", "b", "c", "d"], ALL, 100.0) == ([], [], ["a"])
    assert turns.look(["a", "b", "c", "d"], ALL, 111.0) == ([], [], ["b"])
    del turns.held["a"]
    assert turns.look(["a", "b", "c", "d"], ALL, 112.0) == (["c"], [], [])
    assert turns.line == ["d", "a"]


def test_starting_group_is_kept_and_idle_base_models_leave_the_line() -> None:
    turns = Turns(1, idle=5.0, turn=10.0)
    turns.look(["a"], set(), 0.0)
    assert turns.look(["b"], set(), 50.0) == ([], [], [])
    assert turns.look([], {"a"}, 60.0) == ([], [], [])
    assert turns.line == []


def test_unused_group_is_released_after_the_set_time() -> None:
    turns = Turns(3, release=60.0)
    turns.look(["a", "b"], ALL, 0.0)
    assert turns.look(["b"], ALL, 59.0) == ([], [], [])
    assert turns.look(["b"], ALL, 60.0) == ([], ["a"], [])
    assert Turns(3).look([], ALL, 1e9) == ([], [], [])


def test_idle_group_yields_to_a_base_model_with_a_lost_host() -> None:
    turns = Turns(2, idle=5.0, turn=100.0)
    turns.look(["a", "b"], set(), 0.0)
    assert turns.look(["b"], {"a"}, 9.0, {"b"}) == ([], ["a"], [])
    assert turns.look(["b"], {"a"}, 9.5, {"b"}) == ([], [], [])  # one released group is enough
    turns = Turns(2, idle=5.0, turn=100.0)
    turns.look(["a", "b"], set(), 0.0)
    assert turns.look(["a"], {"a"}, 200.0, {"b"}) == ([], [], [])  # b has no requests now
    assert turns.look(["a", "b"], {"a"}, 201.0, {"b"}) == ([], [], ["a"])


@dataclass
class FakePool:
    """A group that serves from the second update after its start, and ends at the update after its release."""

    broken: bool = False
    ready: bool = False
    resting: bool = True
    draining: bool = False
    pausing: bool = False
    lacks_capacity: bool = False
    trouble: str = ""
    began: list[float] = field(default_factory=list)
    now: float = 0.0
    ending: bool = False

    def begin(self) -> None:
        self.resting = False
        self.began.append(self.now)

    def release(self, cause: str) -> None:
        self.draining = self.ending = True

    def drain(self) -> None:
        self.draining = True

    def go_on(self, now: float) -> None:
        self.now = now
        if self.ending:
            self.ready, self.resting, self.draining, self.ending = False, True, False, False
        elif not self.resting and not self.ready and now > self.began[-1]:
            self.ready, self.resting = not self.broken, self.broken
            self.trouble = "there is no folder" if self.broken else ""
            self.pausing = self.broken
        elif self.pausing and now > self.began[-1] + 30:
            self.pausing = False


class Bench:
    """Base models with fake groups that are updated every second."""

    def __init__(self, names: str, places: int) -> None:
        self.pools = {name: FakePool() for name in names}
        self.wants: list[str] = []
        self.told: dict[str, str | None] = {}
        self.clock = ManualClock()
        self.turns = Turns(places, idle=5.0, turn=60.0)
        served: Any = [SimpleNamespace(card=SimpleNamespace(name=name), pool=pool) for name, pool in self.pools.items()]
        journal: Any = SimpleNamespace(
            queue=SimpleNamespace(wanted=lambda: list(self.wants)),
            base_models=SimpleNamespace(note_progress=self.told.__setitem__),
        )
        self.sharing = GroupTurns(journal, served, self.turns, lambda name: False, self.clock, 120.0)

    async def seconds(self, count: int) -> AsyncIterator[float]:
        for _ in range(count):
            self.clock.advance(1.0)
            for pool in self.pools.values():
                pool.go_on(self.clock.monotonic())
            await self.sharing.update()
            assert sum(not pool.resting for pool in self.pools.values()) <= self.turns.places
            yield self.clock.monotonic()


async def test_ten_base_models_share_three_groups() -> None:
    bench = Bench("abcdefghij", 3)
    bench.wants = ["a", "b"]
    async for _ in bench.seconds(3):
        pass
    assert {name for name, pool in bench.pools.items() if pool.ready} == {"a", "b"}

    # A base model without a group shows the reason from the first update on. Base models that serve show none.
    bench.wants = ["a", "b", "c"]
    texts = []
    async for _ in bench.seconds(3):
        texts.append(bench.told["c"])
        assert bench.told["a"] is None and bench.told["b"] is None
    assert texts == ["its worker group is being started", None, None]

    # All ten always have work. Each gets its turn in order, and shows the number before it.
    bench.wants = list(bench.pools)
    served: dict[str, int] = dict.fromkeys(bench.pools, 0)
    async for now in bench.seconds(600):
        for place, name in enumerate(bench.turns.line):
            said = bench.told[name]
            assert said == f"waiting for one of 3 worker group(s), with {place} base model(s) before it", now
        for name, pool in bench.pools.items():
            served[name] += pool.ready
    assert all(seconds >= 60 for seconds in served.values()), served
    first = sorted(bench.pools, key=lambda name: bench.pools[name].began[0])
    assert first == list("abcdefghij")


async def test_failing_group_start_is_retried_later_and_blocks_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench("abcd", 2)
    failed: list[tuple[float, str, str]] = []

    def note(journal: Journal, name: str, error: errors.ServerError) -> int:
        failed.append((bench.clock.monotonic(), name, error.message))
        return 1

    monkeypatch.setattr("tinkerflow.flows.turns.fail_waiting", note)
    bench.pools["c"].broken = True
    bench.wants = ["c", "a", "b"]
    texts = set()
    async for now in bench.seconds(300):
        texts.add(bench.told["c"])
        if now > 3:
            assert bench.pools["a"].ready or now > 60
    began = bench.pools["c"].began
    assert all(later - earlier >= 30 for earlier, later in pairwise(began)) and 2 <= len(began) <= 10
    assert (
        "its worker group could not be started, and is started again after a pause; the last start failed: "
        "there is no folder" in texts
    )
    noticed = [began[0] + 120 <= at for at, _, _ in failed]
    assert noticed and all(noticed) and len(failed) < len(began)
    text = "base model 'c' cannot be served: its worker group does not start: there is no folder"
    assert {(name, said) for _, name, said in failed} == {("c", text)}

    bench.pools["c"].broken = False
    count = len(failed)
    async for _ in bench.seconds(100):
        pass
    bench.pools["c"].broken = True
    async for _ in bench.seconds(100):
        pass
    assert len(failed) == count  # a successful start ends the series of failures


async def test_requests_for_a_group_that_cannot_start_fail_with_the_reason(journal: Journal, client: Any) -> None:
    live, paused, new = (client.submit_create(number)[0] for number in range(3))
    (creation,) = journal.requests.ready(live)
    journal.results.finish([creation.done(b"{}", "json", ModelLive(live))])
    journal.models.pause(paused, "somebody looks at it")
    training = [client.forward_backward(live, [5]), client.optim_step(live)]
    sample = client.sample(client.sampler(1))
    reason = errors.ServerError("it does not start")
    assert fail_waiting(journal, "another base model", reason) == 0
    assert fail_waiting(journal, client.base_model, reason) == 4
    for request in (*training, sample):
        assert (await client.result(request)).error == "it does not start"
    states = [journal.models.get(model, None).state for model in (live, new, paused)]
    assert states == [ModelState.LIVE, ModelState.FAILED, ModelState.CREATING]
    assert journal.queue.pending_models() == [paused]


async def test_five_base_models_share_two_groups(
    tmp_path: Path, connect: Any, running: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    monkeypatch.setattr("tinkerflow.flows.dispatcher.Turns", partial(Turns, idle=0.05, turn=1.0))
    monkeypatch.setattr("tinkerflow.flows.turns.UPDATE_SECONDS", 0.05)
    told: set[str] = set()
    tell = GroupTurns._tell

    async def note(self: GroupTurns, name: str, text: str | None) -> None:
        await tell(self, name, text)
        said = await asyncio.to_thread(self._journal.recovery.health)
        told.update((said.waits or {}).values())

    monkeypatch.setattr(GroupTurns, "_tell", note)
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

        def was_reported(start: str) -> bool:
            return any(text.startswith(start) for text in told)

        async def train(client: Any, model: str) -> int:
            """Submit steps without a pause until another base model has had a turn. Returns the number of steps."""
            waiting = [client.forward_backward(model, [7]), client.optim_step(model)]
            steps = 1
            while steps < 13 or not was_reported("its worker group accepts no new operations: "):
                waiting += [client.forward_backward(model, [7]), client.optim_step(model)]
                steps += 1
                assert [(await client.result(waiting.pop(0))).error for _ in range(2)] == [None, None]
            assert [result.error for result in await client.results(*waiting)] == [None, None]
            return steps

        async def listen() -> None:
            while True:
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
        assert was_reported("waiting for one of 2 worker group(s), with "), told
        assert [journal.models.get(model, None).step for model in models] == steps
        # This step includes the gradient from before the turns of the other base models.
        client = clients[0]
        client.optim_step(idle)
        saved = client.submit(idle, Kind.SAVE_FOR_SAMPLER, {"sampling_session_seq_id": 3})
        assert (await client.result(saved)).error is None
        sample = await client.result(client.sample(f"{client.session}:sample:3"))
        tokens = pb.SampleResponse.FromString(sample.result).sequences[0].tokens
        assert set(np.frombuffer(tokens, np.int32)) == {5}
        journal.close()
    assert workers() == []

"""Projects share training equally, and training takes turns with sampling."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkerflow.backend.compute.training.packing import pack
from tinkerflow.backend.core.errors import GroupFailedError
from tinkerflow.backend.pool.scheduler import CommandScheduler, QueuedCommand, TrainingQueue, in_parts
from tinkerflow.backend.spec.commands import (
    AdapterState,
    Command,
    Done,
    Example,
    Forward,
    GroupInfo,
    LoadSnapshot,
    LoraSpec,
    NextMicroBatch,
    OptimStep,
    Reply,
    SampleProgress,
    SampleStep,
)
from tinkerflow.backend.spec.losses import LOSSES
from tinkerflow.backend.spec.optimizers.adamw import AdamParams
from tinkerflow.backend.spec.traced_work import STEP_OPERATIONS, STEP_SECONDS

MICROBATCH = 64
INFO = GroupInfo(("cpu:0", "cpu:1"), 1000, MICROBATCH, 1, 64, 128, "", 1)


def forward(adapter: str = "a", tokens: int = MICROBATCH) -> Forward:
    zeros = np.zeros(tokens, np.int32)
    return Forward(adapter, (Example(zeros, zeros[:, None], np.ones((tokens, 1), np.float32)),), "cross_entropy")


class Devices:
    """A worker group that executes the commands in order, when the test calls its methods."""

    def __init__(self, chunks: float = 1.0) -> None:
        self.scheduler = CommandScheduler(chunks, MICROBATCH)
        self.sent: list[str] = []
        self.executing: deque[tuple[str, Reply, asyncio.Future[Reply]]] = deque()

    def submit(self, name: str, command: Command, reply: Reply | None = None, owner: str = "") -> asyncio.Future[Reply]:
        def send() -> asyncio.Future[Reply]:
            self.sent.append(name)
            self.executing.append((name, reply or Done(), asyncio.get_running_loop().create_future()))
            return self.executing[-1][2]

        return self.scheduler.submit(command, send, owner)

    async def sample(self, steps: int) -> None:
        """Submit `steps` sample steps, each in its own task, as the engine does."""
        for left in reversed(range(steps)):
            progress = SampleProgress((), active=left, waiting=0)
            await asyncio.create_task(wait_for(self.submit("S", SampleStep(), progress)))

    async def execute(self) -> str:
        """Execute one command, let other tasks run, and return the command's name."""
        name, reply, answered = self.executing.popleft()
        answered.set_result(reply)
        for _ in range(8):
            await asyncio.sleep(0)
        return name

    async def run(self) -> list[str]:
        """Execute all commands, and return their names in order."""
        executed = []
        while self.executing:
            executed.append(await self.execute())
        return executed


async def wait_for(reply: asyncio.Future[Reply]) -> Reply:
    return await reply


async def test_commands_of_an_adapter_keep_their_order_and_two_are_sent() -> None:
    devices = Devices()
    for number in range(4):
        devices.submit(f"f{number}", forward())
        devices.submit(f"o{number}", OptimStep("a", AdamParams()))
    assert devices.sent == ["f0", "o0"]
    assert await devices.run() == ["f0", "o0", "f1", "o1", "f2", "o2", "f3", "o3"]


async def test_adapters_take_turns() -> None:
    devices = Devices()
    for number in range(4):
        devices.submit(f"a{number}", forward("a"))
    devices.submit("b0", forward("b"))
    devices.submit("b1", forward("b"))
    devices.submit("c0", forward("c", tokens=1))
    assert await devices.run() == ["a0", "a1", "b0", "c0", "a2", "b1", "a3"]


async def test_the_small_commands_of_a_step_stay_together() -> None:
    devices = Devices()
    for number in range(3):
        devices.submit(f"x{number}", forward("x"))
    for adapter in "ab":
        for number in range(2):
            devices.submit(f"{adapter}{number}", forward(adapter, tokens=MICROBATCH // 2))
            devices.submit(f"{adapter}{number}o", OptimStep(adapter, AdamParams()))
    assert await devices.run() == ["x0", "x1", "a0", "a0o", "b0", "b0o", "a1", "a1o", "b1", "b1o", "x2"]


async def test_small_commands_are_sent_together() -> None:
    devices = Devices()
    for number in range(6):
        devices.submit(f"t{number}", forward(f"model {number}", tokens=MICROBATCH // 4))
    assert len(devices.sent) == 5, "a micro-batch's worth, and one that is there when they end"
    assert await devices.run() == [f"t{number}" for number in range(6)]


@given(
    st.dictionaries(st.sampled_from("abc"), st.integers(1, 10), min_size=2),
    st.lists(st.floats(1 / 16, 1), min_size=1, max_size=30),
    st.integers(1, 200),
)
def test_projects_get_equal_shares_with_any_number_of_adapters(
    adapters: dict[str, int], sizes: list[float], sent: int
) -> None:
    """Every adapter always has commands. The adapters of one project also get equal shares."""
    queue, sizes_left = TrainingQueue(), itertools.cycle(sizes)
    by_project, by_adapter = Counter[str](), Counter[str]()

    def add(owner: str, adapter: str) -> None:
        queue.push(queued(owner, adapter, next(sizes_left)))

    for owner, count in adapters.items():
        for number in range(count):
            by_adapter[f"{owner}{number}"] = by_project[owner] = 0
            add(owner, f"{owner}{number}")
            add(owner, f"{owner}{number}")
    for _ in range(sent):
        first = queue.peek()
        assert first is not None and queue.pop() is first
        by_project[first.owner] += first.size
        by_adapter[first.adapter] += first.size
        add(first.owner, first.adapter)
        assert max(by_project.values()) - min(by_project.values()) <= 2
        own = [share for adapter, share in by_adapter.items() if adapter[0] == first.owner]
        assert max(own) - min(own) <= 2


async def test_a_project_with_ten_adapters_gets_the_share_of_a_project_with_one() -> None:
    """Each adapter's client has two steps in flight, and sends the next step when it gets a reply."""
    devices, replied = Devices(), Counter[str]()

    def train(owner: str, adapter: str) -> None:
        devices.submit(owner, forward(adapter, tokens=MICROBATCH - 4), owner=owner)
        step = devices.submit(owner, OptimStep(adapter, AdamParams()), owner=owner)
        step.add_done_callback(lambda _: (replied.update([owner]), train(owner, adapter)))

    for _ in range(2):
        for number in range(10):
            train("many", f"many {number}")
        train("one", "one")
    for _ in range(202):
        await devices.execute()
    assert replied.total() >= 100 and abs(replied["many"] - replied["one"]) <= 2


async def test_a_project_pays_for_the_work_of_its_custom_losses() -> None:
    """A step of the loss takes as long as four micro-batches, so other projects get four micro-batches meanwhile."""
    devices = Devices()
    devices.scheduler.microbatch_work = STEP_OPERATIONS / 4
    for _ in range(80):
        devices.submit("dear", NextMicroBatch("a", of_loss=True), owner="dear")
        devices.submit("cheap", forward("b"), owner="cheap")
    executed = [await devices.execute() for _ in range(80)]
    assert executed.count("dear") == pytest.approx(16, abs=2)


def queued(owner: str, adapter: str, size: float) -> QueuedCommand:
    return QueuedCommand(owner, adapter, size, False, asyncio.Future, None)  # type: ignore[arg-type]


def test_new_adapters_do_not_increase_the_share_of_their_project() -> None:
    queue, sent = TrainingQueue(), list[str]()
    for number in range(20):
        queue.push(queued("steady", "steady", 1.0))
        queue.push(queued("churning", f"adapter {number}", 1.0))
    while queue.peek() is not None:
        sent.append(queue.pop().owner)
    assert abs(sent[:20].count("steady") - 10) <= 1
    assert len(queue) == 0


async def test_fairness_debts_end_when_the_group_is_idle() -> None:
    devices = Devices()
    for number in range(20):
        devices.submit("away", forward(f"adapter {number}"), owner="away")
    await devices.run()
    devices.submit("here", forward("b"), owner="here")
    for _ in range(3):
        devices.submit("away", forward("a"), owner="away")
        devices.submit("here", forward("b"), owner="here")
    assert await devices.run() == ["here", "away", "here", "away", "here", "away", "here"]


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        (1.0, "S T S T S T S T T"),
        (2.0, "S T S S T S T T T"),
        (0.5, "S T T S T T S T S"),
    ],
)
async def test_chunks_follow_micro_batches(chunks: float, expected: str) -> None:
    devices = Devices(chunks)
    sampling = asyncio.create_task(devices.sample(4))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    for adapter in ("a", "b", "a", "b", "a"):
        devices.submit("T", forward(adapter))
    assert " ".join(await devices.run()) == expected
    await sampling


async def test_a_sample_waits_for_one_micro_batch_between_two_of_its_steps() -> None:
    devices = Devices()
    devices.submit("T", forward())
    devices.submit("S", SampleStep(), SampleProgress((), active=1, waiting=0))
    devices.submit("T", forward())
    devices.submit("T", forward())
    assert devices.sent == ["T", "S"]
    assert [await devices.execute(), await devices.execute()] == ["T", "S"]
    assert devices.sent == ["T", "S", "T"], "the third one would be before the next step"
    devices.submit("S", SampleStep(), SampleProgress((), active=0, waiting=0))
    assert await devices.run() == ["T", "S", "T"]


async def test_scheduler_is_idle_without_training_and_steps() -> None:
    devices, found = Devices(), []
    for name, command in (("T", forward()), ("S", SampleStep())):
        found.append(devices.scheduler.idle)
        devices.submit(name, command, SampleProgress((), active=0, waiting=0))
        found.append(devices.scheduler.idle)
        await devices.run()
    assert [*found, devices.scheduler.idle] == [True, False, True, False, True]


async def test_scheduler_does_not_wait_for_absent_work() -> None:
    devices = Devices(chunks=0.25)
    sampling = asyncio.create_task(devices.sample(3))
    for _ in range(3):
        await asyncio.sleep(0)
    assert await devices.run() == ["S", "S", "S"]
    await sampling
    devices.submit("load", LoadSnapshot("s", AdapterState(LoraSpec(1), 0, {})))
    devices.submit("T", forward())
    devices.submit("load", LoadSnapshot("t", AdapterState(LoraSpec(1), 0, {})))
    assert await devices.run() == ["load", "T", "load"]


async def test_training_continues_if_the_next_sample_step_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    late: list[Callable[[], None]] = []  # called by the test instead of a timer

    def call_later(seconds: float, callback: Callable[[], None]) -> Any:
        late.append(callback)
        return Mock()

    monkeypatch.setattr(asyncio.get_running_loop(), "call_later", call_later)
    devices = Devices()
    devices.submit("S", SampleStep(), SampleProgress((), active=1, waiting=0))
    devices.submit("T", forward())
    last = devices.submit("T", forward())
    assert await devices.run() == ["S", "T"]
    assert devices.sent == ["S", "T"]
    (no_step_came,) = late
    no_step_came()
    assert await devices.run() == ["T"]
    assert last.result() == Done()


async def test_cancelled_command_is_still_sent() -> None:
    devices = Devices()
    replies = [devices.submit(f"f{number}", forward()) for number in range(4)]
    replies[0].cancel()
    replies[2].cancel()
    assert await devices.run() == ["f0", "f1", "f2", "f3"]
    assert [reply.cancelled() for reply in replies] == [True, False, True, False]


async def test_unsendable_commands_do_not_block_others() -> None:
    devices = Devices()

    def no_group() -> asyncio.Future[Reply]:
        raise GroupFailedError("worker group 1 no longer serves")

    failed = [devices.scheduler.submit(command, no_group) for command in (forward(), SampleStep(), forward())]
    devices.submit("T", forward())
    assert await devices.run() == []
    for reply in failed:
        with pytest.raises(GroupFailedError, match="no longer serves"):
            await reply
    assert await devices.run() == ["T"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 100), st.integers(0, 3)), max_size=40), st.integers())
def test_commands_of_an_adapter_are_sent_in_submission_order(commands: list[tuple[str, int, int]], seed: int) -> None:
    """The order holds for all arrival times and all orders of answers."""
    chance = random.Random(seed)

    async def case() -> list[str]:
        devices = Devices()
        for number, (adapter, tokens, answered) in enumerate(commands):
            devices.submit(f"{adapter}{number}", forward(adapter, tokens))
            for _ in range(answered):
                if devices.executing and chance.random() < 0.5:
                    _, reply, executed = devices.executing.popleft()
                    executed.set_result(reply)
                if chance.random() < 0.5:
                    await asyncio.sleep(0)
        await asyncio.sleep(0)
        await devices.run()
        return devices.sent

    sent = asyncio.run(case())
    for adapter in "abc":
        theirs = [f"{adapter}{number}" for number, command in enumerate(commands) if command[0] == adapter]
        assert [name for name in sent if name.startswith(adapter)] == theirs


def sizes() -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(1, 200), min_size=1, max_size=20)


@given(
    sizes(),
    st.sampled_from([*LOSSES]),
    st.booleans(),
    st.sampled_from([(1, 1), (2, 1), (4, 4)]),
    st.sampled_from([0, 1, 32]),
    st.booleans(),
)
def test_a_forward_has_a_part_for_each_micro_batch(
    lengths: list[int], loss: str, backward: bool, devices: tuple[int, int], shared: int, few: bool
) -> None:
    fsdp, most = devices
    examples = tuple(next(iter(forward(tokens=length).examples)) for length in lengths)
    command = forward().copy_with(examples=examples, loss=loss, backward=backward)
    shared *= LOSSES[loss].of_pass.name == "cross_entropy"  # the examples have no other inputs
    how = {"branch_tokens": shared, "context_parallel": most, "few_shapes": few}
    first, *others = in_parts(command, MICROBATCH, fsdp, **how)
    passes = 2 if backward and LOSSES[loss].per_token is None else 1
    count = passes * len(pack(examples, microbatch_tokens=MICROBATCH, row_multiple=fsdp, **how))
    assert first == (command if count == 1 else command.copy_with(by_micro_batch=True))
    assert others == [NextMicroBatch("a")] * (count - 1)


def test_custom_loss_has_its_own_parts_between_the_passes() -> None:
    seconds = (0.3 * STEP_SECONDS, 2.5 * STEP_SECONDS)
    command = forward().copy_with(examples=2 * forward().examples, loss="custom", loss_seconds=seconds)
    first, *others = in_parts(command, MICROBATCH, 1)
    plain, loss = NextMicroBatch("a"), NextMicroBatch("a", of_loss=True)
    assert [first, *others] == [command.copy_with(by_micro_batch=True), plain, *[loss] * 3, plain, plain]


def test_other_commands_are_one_part() -> None:
    for command in (SampleStep(), OptimStep("a", AdamParams()), forward().copy_with(examples=())):
        assert in_parts(command, MICROBATCH, 1) == (command,)

"""Training and sampling take turns, and so do adapters."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.commands import (
    LOSSES,
    TOKEN_LOSSES,
    AdamParams,
    AdapterState,
    Command,
    Example,
    Forward,
    LoadSnapshot,
    LoraSpec,
    NextMicroBatch,
    OptimStep,
    Reply,
    SampleProgress,
    SampleStep,
)
from backend.compute.packing import pack
from backend.pool.sharing import Sharing, in_parts

MICROBATCH = 64


def forward(adapter: str = "a", tokens: int = MICROBATCH) -> Forward:
    zeros = np.zeros(tokens, np.int32)
    return Forward(adapter, (Example(zeros, zeros[:, None], np.ones((tokens, 1), np.float32)),), "cross_entropy")


class Devices:
    """A worker group that executes what it was sent when it is told to, in that order."""

    def __init__(self, chunks: float = 1.0) -> None:
        self.sharing = Sharing(chunks, MICROBATCH)
        self.sent: list[str] = []
        self.executing: deque[tuple[str, asyncio.Future[None]]] = deque()
        self.tasks: list[asyncio.Task[None]] = []

    def submit(self, name: str, command: Command, reply: Reply | None = None) -> asyncio.Task[None]:
        place = self.sharing.enter(command)

        async def execute() -> None:
            async with place:
                self.sent.append(name)
                answered = asyncio.get_running_loop().create_future()
                self.executing.append((name, answered))
                await answered
                place.reply = reply

        self.tasks.append(asyncio.create_task(execute()))
        return self.tasks[-1]

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def execute(self) -> str:
        """Execute one command, and let the others go on; its name."""
        name, answered = self.executing.popleft()
        answered.set_result(None)
        await self.settle()
        return name

    async def run(self) -> list[str]:
        """Execute everything: the names, in order."""
        await self.settle()
        executed = []
        while self.executing:
            executed.append(await self.execute())
        await asyncio.gather(*self.tasks)
        return executed


def sampling(devices: Devices, steps: int) -> None:
    """So many steps, each sent when the one before was answered."""

    async def step(left: int) -> None:
        place = devices.sharing.enter(SampleStep())
        async with place:
            answered = asyncio.get_running_loop().create_future()
            devices.sent.append("S")
            devices.executing.append(("S", answered))
            await answered
            place.reply = SampleProgress((), active=left, waiting=0)
        if left:
            await step(left - 1)

    devices.tasks.append(asyncio.create_task(step(steps - 1)))


async def test_an_adapters_commands_keep_their_order_and_two_are_there() -> None:
    devices = Devices()
    for number in range(4):
        devices.submit(f"f{number}", forward())
        devices.submit(f"o{number}", OptimStep("a", AdamParams()))
    await devices.settle()
    assert devices.sent == ["f0", "o0"]
    assert await devices.run() == ["f0", "o0", "f1", "o1", "f2", "o2", "f3", "o3"]


async def test_adapters_take_turns() -> None:
    devices = Devices()
    for number in range(4):
        devices.submit(f"a{number}", forward("a"))
    devices.submit("b0", forward("b"))
    devices.submit("b1", forward("b"))
    devices.submit("c0", forward("c", tokens=1))
    assert await devices.run() == ["a0", "a1", "a2", "b0", "c0", "a3", "b1"]


async def test_what_is_small_goes_together() -> None:
    devices = Devices()
    for number in range(6):
        devices.submit(f"t{number}", forward(f"model {number}", tokens=MICROBATCH // 4))
    await devices.settle()
    assert len(devices.sent) == 5, "a micro-batch's worth, and one that is there when they end"
    assert await devices.run() == [f"t{number}" for number in range(6)]


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
    sampling(devices, 4)
    await devices.settle()
    for adapter in ("a", "b", "a", "b", "a"):
        devices.submit("T", forward(adapter))
    executed = await devices.run()
    assert sorted(executed) == sorted(expected.split())
    assert " ".join(executed) == expected


async def test_a_sample_waits_for_one_micro_batch_between_two_of_its_steps() -> None:
    devices = Devices()
    devices.submit("T", forward())
    step = devices.submit("S", SampleStep(), SampleProgress((), active=1, waiting=0))
    devices.submit("T", forward())
    devices.submit("T", forward())
    await devices.settle()
    assert devices.sent == ["T", "S"]
    assert [await devices.execute(), await devices.execute()] == ["T", "S"]
    await step
    assert devices.sent == ["T", "S", "T"], "the third one would be before the next step"
    devices.submit("S", SampleStep(), SampleProgress((), active=0, waiting=0))
    assert await devices.run() == ["T", "S", "T"]


async def test_nobody_waits_for_who_is_not_there() -> None:
    devices = Devices(chunks=0.25)
    sampling(devices, 3)
    assert await devices.run() == ["S", "S", "S"]
    devices.submit("load", LoadSnapshot("s", AdapterState(LoraSpec(1), 0, {})))
    devices.submit("T", forward())
    devices.submit("load", LoadSnapshot("t", AdapterState(LoraSpec(1), 0, {})))
    assert await devices.run() == ["load", "T", "load"]


async def test_who_gives_up_holds_up_nobody() -> None:
    devices = Devices()
    waiting = [devices.submit(f"f{number}", forward()) for number in range(4)]
    steps = [devices.submit("S", SampleStep()) for _ in range(2)]
    await devices.settle()
    for task in (waiting[2], steps[1]):
        task.cancel()
    await devices.settle()
    devices.tasks = [task for task in devices.tasks if not task.cancelled()]
    assert await devices.run() == ["f0", "f1", "S", "f3"]
    devices.submit("again", forward())
    assert await devices.run() == ["again"]


def sizes() -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(1, 200), min_size=1, max_size=20)


@given(sizes(), st.sampled_from(LOSSES), st.booleans(), st.sampled_from([1, 2]))
def test_a_forward_has_a_part_for_each_micro_batch(lengths: list[int], loss: str, backward: bool, fsdp: int) -> None:
    examples = tuple(next(iter(forward(tokens=length).examples)) for length in lengths)
    command = replace(forward(), examples=examples, loss=loss, backward=backward)
    first, *others = in_parts(command, MICROBATCH, fsdp)
    passes = 2 if backward and loss not in TOKEN_LOSSES else 1
    count = passes * len(pack(examples, microbatch_tokens=MICROBATCH, row_multiple=fsdp))
    assert first == (command if count == 1 else replace(command, by_micro_batch=True))
    assert others == [NextMicroBatch("a")] * (count - 1)


def test_other_commands_are_one_part() -> None:
    for command in (SampleStep(), OptimStep("a", AdamParams()), replace(forward(), examples=())):
        assert in_parts(command, MICROBATCH, 1) == (command,)

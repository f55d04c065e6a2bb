"""The queue of full-parameter models: few models at a time, shared fairly by owners."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from tinkerflow.tasks.execution.full_model_queue import FullModelQueue


class Line:
    """Requests that run until the test ends them."""

    def __init__(self, turns: FullModelQueue) -> None:
        self.turns, self.begun = turns, list[str]()
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.ends: dict[str, asyncio.Event] = {}

    async def ask(self, *names: str, owner: str = "a") -> None:
        """Submit requests. A name consists of a letter for the weights and a number."""
        for name in names:
            self.ends[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._run(name, owner))
        await settle()

    async def _run(self, name: str, owner: str) -> None:
        async with self.turns.reserve(owner, name[0]):
            self.begun.append(name)
            await self.ends[name].wait()

    async def end(self, *names: str) -> list[str]:
        """End requests, and return the requests that begin as a result."""
        before = len(self.begun)
        for name in names:
            self.ends[name].set()
        await settle()
        return self.begun[before:]


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_models_are_sampled_while_they_fit_and_none_starves() -> None:
    line = Line(FullModelQueue(host_bytes=25))
    await line.ask("x1", "x2", "y1", "x3", "z1")
    assert line.begun == ["x1", "x2"], "one model until its size is known; later ones wait behind it"
    line.turns.loaded(10)
    await settle()
    assert line.turns.most == 3 and line.begun == ["x1", "x2", "y1", "x3", "z1"]
    await line.ask("u1", "x4")
    assert await line.end("x1", "x2") == []
    assert await line.end("x3") == ["u1"]
    assert await line.end("z1") == ["x4"]


async def test_owners_take_turns() -> None:
    line = Line(FullModelQueue())
    await line.ask(*(f"{weights}1" for weights in "uvwxy"))
    await line.ask("m1", "n1", owner="b")
    order = ["u1"]
    while len(order) < 7:
        (following,) = await line.end(order[-1])
        order.append(following)
    assert order == ["u1", "m1", "v1", "n1", "w1", "x1", "y1"]


async def test_cancelled_or_failed_waiter_does_not_block_the_queue() -> None:
    line = Line(FullModelQueue())
    await line.ask("x1", "y1", "z1")
    for name in ("y1", "x1"):
        line.tasks[name].cancel()
        with suppress(asyncio.CancelledError):
            await line.tasks[name]
    await settle()
    assert line.begun == ["x1", "z1"]
    assert await line.end("z1") == []
    await line.ask("x2")
    assert line.begun[-1] == "x2"


async def test_requests_that_are_cancelled_together_leave_the_queue() -> None:
    line = Line(FullModelQueue())
    await line.ask("x1", "y1", "z1", "u1")
    for name in ("x1", "y1", "z1"):
        line.tasks[name].cancel()
    ended = await asyncio.gather(*(line.tasks[name] for name in ("x1", "y1", "z1")), return_exceptions=True)
    assert [type(error) for error in ended] == [asyncio.CancelledError] * 3
    await settle()
    assert line.begun == ["x1", "u1"]
    assert await line.end("u1") == []

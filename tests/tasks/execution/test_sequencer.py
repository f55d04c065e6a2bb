from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinkerflow.backend.core.errors import GroupFailedError
from tinkerflow.tasks.execution.sequencer import MOST_DETACHED, Saves, SaveState, Sequencer, Slot


@settings(max_examples=50)
@given(st.lists(st.sampled_from(["works", "fails early", "fails sending", "slow answer"]), max_size=12), st.integers())
def test_operations_are_sent_and_answered_in_order(fates: list[str], seed: int) -> None:
    sent: list[int] = []
    answered: list[int] = []
    shuffled = random.Random(seed)

    async def operate(number: int, fate: str, slot: Slot) -> None:
        try:
            for _ in range(shuffled.randrange(4)):
                await asyncio.sleep(0)
            if fate == "fails early":
                raise RuntimeError
            async with slot:
                sent.append(number)
                if fate == "fails sending":
                    raise RuntimeError
            for _ in range(20 if fate == "slow answer" else shuffled.randrange(3)):
                await asyncio.sleep(0)
        except RuntimeError:
            pass
        finally:
            await slot.predecessors()
            answered.append(number)
            await slot.end()

    async def main() -> None:
        sequencer = Sequencer("model", Saves())
        operations = [operate(number, fate, sequencer.slot()) for number, fate in enumerate(fates)]
        shuffled.shuffle(operations)
        async with asyncio.timeout(60):
            await asyncio.gather(*operations)

    asyncio.run(main())
    assert sent == sorted(sent)
    assert answered == list(range(len(fates)))


@settings(max_examples=50)
@given(st.lists(st.booleans(), max_size=12), st.integers())
def test_detached_saves_settle_in_order_and_do_not_block_others(saves: list[bool], seed: int) -> None:
    answered: list[int] = []
    settled: list[int] = []
    shuffled = random.Random(seed)

    async def operate(number: int, save: bool, slot: Slot, stored: asyncio.Event) -> None:
        async with slot:
            pass
        for _ in range(shuffled.randrange(3)):
            await asyncio.sleep(0)
        if save:
            await slot.detach()
            await slot.earlier_saves()
            await stored.wait()
            settled.append(number)
        else:
            await slot.predecessors()
            answered.append(number)
        if slot.save is not None:
            slot.sequencer.saves.end(slot.save, SaveState.STORED, answered=True)
        await slot.end()

    async def main() -> None:
        sequencer, stored = Sequencer("model", Saves()), asyncio.Event()
        operations = []
        for number, save in enumerate(saves):
            slot = sequencer.slot(f"save {number}" if save else None)
            operations.append(asyncio.create_task(operate(number, save, slot, stored)))
        detached = [number for number, save in enumerate(saves) if save]
        waits = detached[MOST_DETACHED] if len(detached) > MOST_DETACHED else len(saves)
        free = [number for number, save in enumerate(saves) if not save and number < waits]
        async with asyncio.timeout(60):
            while len(answered) < len(free) or len(sequencer.saves.detached("model")) < min(  # noqa: ASYNC110
                MOST_DETACHED, len(detached)
            ):
                await asyncio.sleep(0)
            assert answered == free
            assert settled == []
            stored.set()
            await asyncio.gather(*operations)
            await sequencer.slot().earlier_saves()
        assert settled == detached
        assert answered == [number for number, save in enumerate(saves) if not save]
        assert sequencer.saves.detached("model") == []

    asyncio.run(main())


async def test_interruption_leaves_detached_saves_running_and_the_next_line_waits_for_them() -> None:
    saves = Saves()
    sequencer = Sequencer("model", saves)
    first = sequencer.slot("save")
    async with first:
        pass
    await first.detach()
    second, third = sequencer.slot(), sequencer.slot()
    second.interrupt()
    await first.predecessors()
    await first.earlier_saves()
    await second.end()
    with pytest.raises(GroupFailedError, match="an earlier operation was interrupted"):
        await third.predecessors()
    await third.end()
    sequencer.restart()
    after = sequencer.slot()
    await after.predecessors()
    waiting = asyncio.create_task(after.earlier_saves())
    for _ in range(3):
        await asyncio.sleep(0)
    assert not waiting.done()
    assert first.save is not None
    saves.end(first.save, SaveState.STORED, answered=True)
    await first.end()
    await asyncio.wait_for(waiting, 60)

from __future__ import annotations

import asyncio
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tinkerflow.tasks.execution.sequencer import MOST_ASIDE, Line, Slot


@settings(max_examples=50)
@given(st.lists(st.sampled_from(["works", "fails early", "fails sending", "slow answer"]), max_size=12), st.integers())
def test_whatever_happens_sending_and_answering_stay_in_order(fates: list[str], seed: int) -> None:
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
            await slot.to_answer()
            answered.append(number)
            await slot.end()

    async def main() -> None:
        slot: Slot | None = None
        operations = []
        for number, fate in enumerate(fates):
            slot = Slot(slot)
            operations.append(operate(number, fate, slot))
        shuffled.shuffle(operations)
        async with asyncio.timeout(60):
            await asyncio.gather(*operations)

    asyncio.run(main())
    assert sent == sorted(sent)
    assert answered == list(range(len(fates)))


@settings(max_examples=50)
@given(st.lists(st.booleans(), max_size=12), st.integers())
def test_those_who_step_aside_are_settled_in_order_and_hold_up_nobody_else(saves: list[bool], seed: int) -> None:
    answered: list[int] = []
    settled: list[int] = []
    shuffled = random.Random(seed)

    async def operate(number: int, save: bool, slot: Slot, stored: asyncio.Event) -> None:
        async with slot:
            pass
        for _ in range(shuffled.randrange(3)):
            await asyncio.sleep(0)
        if save:
            await slot.step_aside()
            await slot.settled()
            await stored.wait()
            settled.append(number)
        else:
            await slot.to_answer()
            answered.append(number)
        await slot.end()

    async def main() -> None:
        slot, stored = Slot(), asyncio.Event()
        await slot.end()
        line = slot.line
        operations = []
        for number, save in enumerate(saves):
            slot = Slot(slot)
            operations.append(asyncio.create_task(operate(number, save, slot, stored)))
        aside = [number for number, save in enumerate(saves) if save]
        waits = aside[MOST_ASIDE] if len(aside) > MOST_ASIDE else len(saves)
        free = [number for number, save in enumerate(saves) if not save and number < waits]
        async with asyncio.timeout(60):
            while len(answered) < len(free) or len(line.aside) < min(MOST_ASIDE, len(aside)):  # noqa: ASYNC110
                await asyncio.sleep(0)
            assert answered == free
            assert settled == []
            stored.set()
            await asyncio.gather(*operations)
            await Slot(slot).settled()
        assert settled == aside
        assert answered == [number for number, save in enumerate(saves) if not save]
        assert line.aside == {}

    asyncio.run(main())


async def test_a_broken_line_leaves_those_aside_alone_and_the_next_one_waits_for_them() -> None:
    first = Slot()
    async with first:
        pass
    await first.step_aside()
    second = Slot(first)
    second.line.broken = True
    await first.to_answer()
    await first.settled()
    after = Slot(second.anew())
    assert after.line == Line(broken=False, aside=first.line.aside)
    await after.to_answer()
    waiting = asyncio.create_task(after.settled())
    for _ in range(3):
        await asyncio.sleep(0)
    assert not waiting.done()
    await first.end()
    await asyncio.wait_for(waiting, 60)

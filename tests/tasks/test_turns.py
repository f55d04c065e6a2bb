from __future__ import annotations

import asyncio
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.turns import Turn


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from(["works", "fails early", "fails sending", "slow answer"]), max_size=12), st.integers())
def test_whatever_happens_sending_and_answering_stay_in_order(fates: list[str], seed: int) -> None:
    sent: list[int] = []
    answered: list[int] = []
    shuffled = random.Random(seed)

    async def operate(number: int, fate: str, turn: Turn) -> None:
        try:
            for _ in range(shuffled.randrange(4)):
                await asyncio.sleep(0)
            if fate == "fails early":
                raise RuntimeError
            async with turn:
                sent.append(number)
                if fate == "fails sending":
                    raise RuntimeError
            for _ in range(20 if fate == "slow answer" else shuffled.randrange(3)):
                await asyncio.sleep(0)
        except RuntimeError:
            pass
        finally:
            await turn.to_answer()
            answered.append(number)
            await turn.end()

    async def main() -> None:
        turn: Turn | None = None
        operations = []
        for number, fate in enumerate(fates):
            turn = Turn(turn)
            operations.append(operate(number, fate, turn))
        shuffled.shuffle(operations)
        async with asyncio.timeout(60):
            await asyncio.gather(*operations)

    asyncio.run(main())
    assert sent == sorted(sent)
    assert answered == list(range(len(fates)))

"""The real parts of the engine's tests: an SQLite journal, a store, and a unigram model as the worker group."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tinkerflow.backend.journal import Outcome
from tinkerflow.tasks.execution.operation import Execution, begin
from tinkerflow.tasks.execution.sequencer import Sequencer
from tinkerflow.tasks.operations import OPERATIONS, SAVES

sys.path.insert(0, str(Path(__file__).parents[2] / "flows"))

from engine_parts import *  # noqa: F403


@pytest.fixture
def execute(context: Any) -> Callable[..., Awaitable[list[Outcome | None]]]:
    """`await execute(model)` executes the model's ready requests in order, and returns their outcomes."""

    async def execute(model: str, generation: int | None = None) -> list[Outcome | None]:
        bound = context if generation is None else context.bound_to(generation)
        sequencer = Sequencer(model, context.saves)
        async with asyncio.TaskGroup() as group:
            operations = []
            for row in context.journal.requests.ready(model, 64):
                slot = sequencer.slot(row.id if row.kind in SAVES else None)
                operations.append(begin(OPERATIONS.execute[row.kind], Execution(bound, row, slot), group))
        return [operation.answered.result() for operation in operations]

    return execute

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from tinkerflow.backend.commands import Command, Done, DropAdapter, ExportAdapter, OptimStep, SnapshotHeld
from tinkerflow.backend.errors import GroupFailedError
from tinkerflow.backend.journal import Kind
from tinkerflow.backend.spec.optimizers.adamw import AdamParams
from tinkerflow.tasks.execution.operation import INLINE_BYTES, Execution
from tinkerflow.tasks.execution.sequencer import Sequencer


async def test_a_journal_that_is_away_is_read_again(context: Any) -> None:
    away = 2

    def ask(name: str) -> str:
        nonlocal away
        away -= 1
        if away >= 0:
            raise OperationalError("SELECT", {}, Exception("the server closed the connection"))
        return f"hello {name}"

    assert await context.read(ask, "there") == "hello there"


async def test_large_payloads_are_decoded_in_a_thread(context: Any) -> None:
    here = threading.get_ident()
    assert await context.decode(INLINE_BYTES, threading.get_ident) == here
    assert await context.decode(INLINE_BYTES + 1, threading.get_ident) != here


async def test_a_reply_of_another_type_is_a_defect(context: Any, pool: Any) -> None:
    with pytest.raises(TypeError, match="DropAdapter was answered by Done, not SnapshotHeld"):
        await context.send(DropAdapter("model"), SnapshotHeld)


async def test_a_bound_context_commands_its_own_worker_group_alone(context: Any, pool: Any) -> None:
    bound = context.bound_to(pool.generation)
    await bound.send(DropAdapter("model"), Done)
    pool.die()
    with pytest.raises(GroupFailedError):
        await bound.send(DropAdapter("model"), Done)
    await context.send(DropAdapter("model"), Done)


async def test_a_bound_context_says_how_long_a_sequence_its_worker_group_takes(context: Any, pool: Any) -> None:
    pool.info = replace(pool.info, context=7, context_rule="what fits")
    card = context.bound_to(pool.generation).card
    assert (card.max_context, card.context_rule) == (7, "what fits")
    assert context.card.max_context > 7, "the next group may have other devices"


@pytest.mark.parametrize(
    ("command", "changes"), [(OptimStep("model", AdamParams()), True), (ExportAdapter("model", optimizer=True), False)]
)
async def test_an_execution_knows_when_it_began_and_whether_it_changes_the_model(
    context: Any, client: Any, command: Command, changes: bool
) -> None:
    model, _ = client.submit_create()
    (request,) = context.journal.requests.ready(model, 1)
    assert request.kind is Kind.CREATE_MODEL
    execution = Execution(context, request, Sequencer(model, context.saves).slot())
    assert (execution.model_id, execution.started_at, execution.changed) == (model, None, False)
    before = context.clock.now()
    sent = execution.send(command, Done)
    first = execution.started_at
    assert first is not None and first >= before and execution.changed is changes
    other = execution.send(DropAdapter("model"), Done)
    assert execution.started_at == first
    await asyncio.gather(sent, other, return_exceptions=True)

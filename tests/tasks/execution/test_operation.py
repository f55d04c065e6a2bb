"""One operation from its pending request to its answer, with a real journal and the unigram model."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from sqlalchemy.exc import OperationalError
from tests.logged import logged_by

from tinkerflow.backend.core import tracing
from tinkerflow.backend.core.errors import (
    DeadlineError,
    GroupFailedError,
    JournalBusyError,
    StateLostError,
    StoreError,
    SuspectError,
    UserError,
)
from tinkerflow.backend.journal import Kind, ModelEnded, ModelState, Outcome
from tinkerflow.backend.spec.commands import Command, Done, DropAdapter, ExportAdapter, OptimStep, SnapshotHeld
from tinkerflow.backend.spec.optimizers.adamw import AdamParams
from tinkerflow.tasks.execution import operation
from tinkerflow.tasks.execution.operation import (
    INLINE_BYTES,
    MOST_CRASHES,
    MOST_DEATHS,
    AnswerWriter,
    Execution,
    attribute_crash,
    failure,
)
from tinkerflow.tasks.execution.sequencer import Sequencer
from tinkerflow.tasks.operations import OPERATIONS, SAVES


def test_every_kind_of_a_model_has_an_operation() -> None:
    answered_elsewhere = {Kind.SAMPLE, Kind.CREATE_CUSTOM_LOSS}  # by the sampling runner, and by the API
    assert set(OPERATIONS.execute) == set(Kind) - answered_elsewhere
    assert set(OPERATIONS.execute) > SAVES


async def test_operations_are_answered_and_model_changes_are_replayed(
    context: Any, client: Any, pool: Any, execute: Any
) -> None:
    model, created = client.submit_create()
    bad = client.forward_backward(model, [99])
    forward = client.forward_backward(model, [1], forward_only=True)
    step = client.optim_step(model)
    outcomes = await execute(model)
    assert [outcome.request_id for outcome in outcomes] == [created, bad, forward, step]
    assert [outcome.error is None for outcome in outcomes] == [True, False, True, True]
    assert "data[0]" in client.journal.results.get(bad, "local").error
    assert client.journal.models.get(model, None).step == 1
    replayed = [row.request.id for row in client.journal.recovery.executed(model, -1, 10)]
    assert replayed == [created, step]


async def test_commands_are_sent_inside_the_trace_of_their_request(
    client: Any, pool: Any, execute: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, str | None] = {}
    submit = pool.submit

    async def noting(command: Any, *args: Any, **kwargs: Any) -> Any:
        seen[type(command).__name__] = tracing.current.get()
        return await submit(command, *args, **kwargs)

    monkeypatch.setattr(pool, "submit", noting)
    tracing.use(TracerProvider())
    try:
        with tracing.span("POST", None, "SERVER"):
            model, _ = client.submit_create()
            context = tracing.current.get()
        client.optim_step(model)  # outside any span
        assert context is not None
        await execute(model)
    finally:
        tracing.use(None)
    created = seen["CreateAdapter"]
    assert created is not None and created.split("-")[1] == context.split("-")[1] and created != context
    assert seen["OptimStep"] is None


async def test_operations_of_a_lost_group_are_not_answered(client: Any, pool: Any, execute: Any) -> None:
    model, _ = client.submit_create()
    await execute(model)
    waiting = [client.optim_step(model), client.forward_backward(model, [1])]
    pool.poison = lambda command: isinstance(command, OptimStep)
    assert await execute(model, pool.generation) == [None, None]
    assert [client.journal.results.get(request, "local") for request in waiting] == [None, None]


async def test_a_published_save_is_stored_after_its_answer(context: Any, client: Any, execute: Any) -> None:
    model, _ = client.submit_create()
    saved = client.submit(model, Kind.SAVE_FOR_SAMPLER, {"sampling_session_seq_id": 1})
    await execute(model)
    assert client.journal.recovery.unstored(model) == []
    assert client.journal.recovery.sampler_snapshot(saved) is not None
    assert not context.saves.is_unstored(saved) and saved in context.snapshots.droppable


@pytest.mark.parametrize("at_once", [False, True])
async def test_a_used_number_never_names_an_older_sampler(client: Any, pool: Any, execute: Any, at_once: bool) -> None:
    model, _ = client.submit_create()
    await execute(model)
    saves = []
    for kind in ("snapshot", "inflight"):
        saves.append(client.submit(model, Kind.SAVE_FOR_SAMPLER, {"sampling_session_seq_id": 1, "kind": kind}))
        if not at_once:
            await execute(model)
            client.optim_step(model)
    if at_once:
        await execute(model)
    first, second = (client.journal.results.get(save, "local") for save in saves)
    assert first.error is None
    assert second.category == "user" and "sampling_session_seq_id must be a number" in second.error


@pytest.mark.parametrize(
    ("error", "category", "effects", "level"),
    [
        (UserError("rank is 0: at least 1"), "user", 0, "INFO"),
        (StateLostError("adapter gone"), "server", 1, "ERROR"),
        (StoreError("runs/x: no space"), "server", 0, "ERROR"),
        (RuntimeError("no such thing"), "server", 0, "ERROR"),
    ],
)
def test_failure_has_the_category_and_effects_of_its_error(
    context: Any, client: Any, caplog: Any, error: Exception, category: str, effects: int, level: str
) -> None:
    model, _ = client.submit_create()
    (request,) = context.journal.requests.ready(model, 1)
    with caplog.at_level(logging.INFO):
        outcome = failure(request, error)
    assert [record.levelname for record in logged_by(caplog, operation)] == [level]
    assert outcome.category == category and str(error) in str(outcome.error)
    assert len(outcome.effects) == effects
    if effects:
        assert outcome.effects[0] == ModelEnded(model, ModelState.LOST, "adapter gone")


# ------------------------------------------------------------------ the context of operations
async def test_journal_reads_are_retried_after_an_outage(context: Any) -> None:
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
    assert await context.decode("ann", INLINE_BYTES, threading.get_ident) == here
    assert await context.decode("ann", INLINE_BYTES + 1, threading.get_ident) != here


async def test_reply_of_the_wrong_type_is_a_defect(context: Any, pool: Any) -> None:
    with pytest.raises(TypeError, match="DropAdapter was answered by Done, not SnapshotHeld"):
        await context.send(DropAdapter("model"), SnapshotHeld)


async def test_a_bound_context_commands_its_own_worker_group_alone(context: Any, pool: Any) -> None:
    bound = context.bound_to(pool.generation)
    await bound.send(DropAdapter("model"), Done)
    pool.die()
    with pytest.raises(GroupFailedError):
        await bound.send(DropAdapter("model"), Done)
    await context.send(DropAdapter("model"), Done)


async def test_bound_context_has_the_maximum_length_of_its_worker_group(context: Any, pool: Any) -> None:
    pool.info = replace(pool.info, context=7, context_rule="what fits")
    card = context.bound_to(pool.generation).card
    assert (card.max_context, card.context_rule) == (7, "what fits")
    assert context.card.max_context > 7, "the next group may have other devices"


@pytest.mark.parametrize(
    ("command", "changes"), [(OptimStep("model", AdamParams()), True), (ExportAdapter("model", optimizer=True), False)]
)
async def test_execution_records_its_start_and_whether_it_changes_the_model(
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


# ------------------------------------------------------------------ blame for the end of a worker group
@pytest.fixture
def request_(context: Any, client: Any) -> Any:
    """A request that was being executed."""
    model, _ = client.submit_create()
    (request,) = context.journal.requests.ready(model, 1)
    return request


@pytest.mark.parametrize(
    ("error", "times"),
    [
        (SuspectError("it crashed", crashed=True), MOST_CRASHES),
        (DeadlineError("it hung"), MOST_CRASHES),
        (SuspectError("it was killed", crashed=False), MOST_DEATHS),
        (SuspectError("rank 0 ended itself: RESOURCE_EXHAUSTED: out of memory"), 1),
    ],
)
async def test_request_that_ended_too_many_groups_fails(
    context: Any, request_: Any, error: GroupFailedError, times: int
) -> None:
    for _ in range(times - 1):
        assert await attribute_crash(context, [request_], error) == {}
    blamed = await attribute_crash(context, [request_], error)
    outcome = blamed[request_.id]
    assert outcome.category == "server" and "is not retried" in str(outcome.error)
    assert f"{times} times" in str(outcome.error) and error.message in str(outcome.error)


async def test_crash_is_counted_once_if_its_record_is_not_acknowledged(
    context: Any, request_: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recovery, record, lost = context.journal.recovery, context.journal.recovery.suspect, [True]

    def suspect(*args: Any, **kwargs: Any) -> Any:
        stored = record(*args, **kwargs)
        if lost.pop() if lost else False:
            raise JournalBusyError("the last commit is not on disk yet")
        return stored

    monkeypatch.setattr(recovery, "suspect", suspect)
    error = SuspectError("it crashed", crashed=True)
    assert await attribute_crash(context, [request_], error) == {} and not lost
    assert recovery.suspects([request_.id]) == {request_.id: (1, 1)}


async def test_group_that_ended_beside_a_request_blames_no_request(context: Any, request_: Any) -> None:
    for _ in range(MOST_DEATHS + 1):
        assert await attribute_crash(context, [request_], GroupFailedError("it was stopped")) == {}
        assert await attribute_crash(context, [], SuspectError("it crashed", crashed=True)) == {}


# ------------------------------------------------------------------ answers on their way into the journal
def outcome(name: str) -> Outcome:
    return Outcome(name, result=b"{}")


async def test_answers_that_arrive_during_a_write_share_the_next_transaction() -> None:
    go = threading.Event()
    written: list[list[str]] = []

    def finish(outcomes: Sequence[Outcome]) -> None:
        go.wait(5)
        written.append([one.request_id for one in outcomes])

    line = AnswerWriter(finish)
    first = asyncio.create_task(line.put(outcome("a")))
    await asyncio.sleep(0.05)
    others = [asyncio.create_task(line.put(outcome(name))) for name in "bcd"]
    await asyncio.sleep(0.05)
    assert not first.done()
    go.set()
    await asyncio.gather(first, *others)
    await line.close()
    assert written == [["a"], ["b", "c", "d"]]


async def test_unstorable_answer_becomes_a_failure_and_affects_no_other() -> None:
    stored: dict[str, Outcome] = {}

    def finish(outcomes: Sequence[Outcome]) -> None:
        if any(one.request_id == "bad" and one.error is None for one in outcomes):
            raise ValueError("too big")
        stored.update({one.request_id: one for one in outcomes})

    line = AnswerWriter(finish)
    await asyncio.gather(*(line.put(outcome(name)) for name in ("good", "bad", "fine")))
    await line.close()
    assert stored["good"].error is None and stored["fine"].error is None
    assert stored["bad"].error == "the answer cannot be stored (ValueError: too big)"
    assert stored["bad"].category == "server"


@pytest.mark.parametrize("error", [OperationalError("finish", {}, Exception("locked")), JournalBusyError("no slot")])
async def test_short_database_outage_is_waited_for(error: Exception) -> None:
    tries = []

    def finish(outcomes: Sequence[Outcome]) -> None:
        tries.append(len(outcomes))
        if len(tries) < 3:
            raise error

    line = AnswerWriter(finish)
    await line.put(outcome("a"))
    await line.close()
    assert tries == [1, 1, 1]


async def test_long_database_outage_is_an_error() -> None:
    def finish(outcomes: Sequence[Outcome]) -> None:
        raise OperationalError("finish", {}, Exception("gone"))

    line = AnswerWriter(finish, pauses=(0.01,))
    with pytest.raises(OperationalError):
        await line.put(outcome("a"))
    await line.close()


async def test_store_calls_of_one_project_leave_threads_to_other_projects(context: Any) -> None:
    release = threading.Event()
    flood = [asyncio.create_task(replace(context, owner="ann").in_store(release.wait, 60)) for _ in range(100)]
    await asyncio.sleep(0)  # all of them are queued now
    try:
        assert await asyncio.wait_for(replace(context, owner="bob").in_store("b".upper), 60) == "B"
    finally:
        release.set()
    assert all(await asyncio.gather(*flood))

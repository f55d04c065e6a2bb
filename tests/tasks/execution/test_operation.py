"""One operation from its pending request to its answer, with a real journal and the unigram model."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider

from tinkerflow.backend import tracing
from tinkerflow.backend.commands import OptimStep
from tinkerflow.backend.errors import StateLostError, UserError
from tinkerflow.backend.journal import Kind, ModelEnded, ModelState
from tinkerflow.tasks.execution.operation import failure
from tinkerflow.tasks.operations import EXECUTE, SAVES


def test_every_kind_of_a_model_has_an_operation() -> None:
    answered_elsewhere = {Kind.SAMPLE, Kind.CREATE_CUSTOM_LOSS}  # by the sampling runner, and by the API
    assert set(EXECUTE) == set(Kind) - answered_elsewhere
    assert set(EXECUTE) > SAVES


async def test_operations_are_answered_and_what_changes_the_model_is_replayed(
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
        seen[type(command).__name__] = tracing.current()
        return await submit(command, *args, **kwargs)

    monkeypatch.setattr(pool, "submit", noting)
    tracing.use(TracerProvider())
    try:
        with tracing.span("POST", None, "SERVER"):
            model, _ = client.submit_create()
            context = tracing.current()
        client.optim_step(model)  # in no span
        assert context is not None
        await execute(model)
    finally:
        tracing.use(None)
    created = seen["CreateAdapter"]
    assert created is not None and created.split("-")[1] == context.split("-")[1] and created != context
    assert seen["OptimStep"] is None


async def test_an_operation_whose_group_ends_is_not_answered_and_neither_are_later_ones(
    client: Any, pool: Any, execute: Any
) -> None:
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


@pytest.mark.parametrize(
    ("error", "category", "effects"),
    [
        (UserError("rank is 0: at least 1"), "user", 0),
        (StateLostError("adapter gone"), "server", 1),
        (RuntimeError("no such thing"), "server", 0),
    ],
)
def test_a_failure_names_what_happened(
    context: Any, client: Any, error: Exception, category: str, effects: int
) -> None:
    model, _ = client.submit_create()
    (request,) = context.journal.requests.ready(model, 1)
    outcome = failure(request, error)
    assert outcome.category == category and str(error) in str(outcome.error)
    assert len(outcome.effects) == effects
    if effects:
        assert outcome.effects[0] == ModelEnded(model, ModelState.LOST, "adapter gone")

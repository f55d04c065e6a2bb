"""Who is blamed for the end of a worker group, with a real journal that counts."""

from __future__ import annotations

from typing import Any

import pytest

from tinkerflow.backend.errors import DeadlineError, GroupFailedError, SuspectError
from tinkerflow.tasks.execution.operation import MOST_CRASHES, MOST_DEATHS, attribute_crash


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
async def test_a_request_is_failed_by_name_when_it_ended_too_many_groups(
    context: Any, request_: Any, error: GroupFailedError, times: int
) -> None:
    for _ in range(times - 1):
        assert await attribute_crash(context, [request_], error) == {}
    blamed = await attribute_crash(context, [request_], error)
    outcome = blamed[request_.id]
    assert outcome.category == "server" and "it is not tried again" in str(outcome.error)
    assert f"{times} times" in str(outcome.error) and error.message in str(outcome.error)


async def test_a_group_that_ended_beside_a_request_blames_nobody(context: Any, request_: Any) -> None:
    for _ in range(MOST_DEATHS + 1):
        assert await attribute_crash(context, [request_], GroupFailedError("it was stopped")) == {}
        assert await attribute_crash(context, [], SuspectError("it crashed", crashed=True)) == {}

"""Answer the approval form of `nightly` as a person would, through Prefect's API or on its page."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from uuid import UUID

from prefect import get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import StateType
from prefect.flow_runs import resume_flow_run
from tests.e2e.browser import Page
from tests.waiting import wait_for


async def answer(
    name: str,
    *,
    approve: bool,
    reason: str,
    still_running: Callable[[], None] = lambda: None,
    by_mouse: Callable[[UUID], None] | None = None,
) -> Any:
    """Answer the form of the run `nightly NAME` as soon as it exists, and return its question.

    still_running: raises if the run that asks has ended. by_mouse: answers on the page of this flow run, instead of
    through the API.
    """
    asked = FlowRunFilter.model_validate(
        {"name": {"any_": [f"approval of nightly {name}"]}, "state": {"type": {"any_": ["PAUSED"]}}}
    )
    asker = FlowRunFilter.model_validate({"name": {"any_": [f"nightly {name}"]}})
    async with get_client() as client, asyncio.timeout(600):
        while not (found := await client.read_flow_runs(flow_run_filter=asked)):
            still_running()
            await asyncio.sleep(0.5)
        state = found[0].state
        assert state is not None and state.state_details.run_input_keyset is not None
        form = state.state_details.run_input_keyset["description"]
        while not (inputs := await client.filter_flow_run_input(found[0].id, form, 1, set())):
            still_running()
            await asyncio.sleep(0.1)  # Prefect writes the form after it pauses the run
        (waiting,) = await client.read_flow_runs(flow_run_filter=asker)
        assert waiting.state_type is StateType.RUNNING, "a paused run loses its place within concurrency_limit"
    if by_mouse is not None:
        await asyncio.to_thread(by_mouse, found[0].id)
    else:
        await resume_flow_run(found[0].id, run_input={"approve": approve, "reason": reason})
    return inputs[0].value


def answer_by_mouse(page: Page, url: str, question: str, reason: str) -> None:
    """Approve in the form on the page of the run that asks."""
    with page.at(url):
        page.press("Resume")
        page.shows(question)
        page.click(".p-modal [role=switch]")
        page.fill(".p-modal textarea", reason)
        page.picture("approval")
        page.press("Submit")
        wait_for(lambda: not page.run("return document.querySelector('.p-modal')"))

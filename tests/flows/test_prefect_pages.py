"""Prefect's pages in a browser: the form of an approval, and Retry. tests/e2e covers the other buttons."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect_server import prefect_http
from tests.e2e.approving import answer_by_mouse
from tests.e2e.browser import Page, open_page
from tests.flows import test_prefect
from tests.flows.test_prefect import dispatcher_of, in_state, shown
from tests.waiting import wait_for

from tinkerflow.backend.core.clock import SystemClock
from tinkerflow.backend.journal import ModelState
from tinkerflow.flows.prefect.connection import PrefectConnection
from tinkerflow.flows.prefect.controls import CANCELLED
from tinkerflow.flows.prefect.mirror import Mirror
from tinkerflow.flows.prefect.pacing import Pacing
from tinkerflow.flows.prefect.server import PrefectServer
from tinkerflow.tasks.pipelines.approval import approval

pytestmark = [
    pytest.mark.usefixtures("collected_connections"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore:Exception ignored in. <:pytest.PytestUnraisableExceptionWarning"),
]

connection = test_prefect.connection


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with open_page(tmp_path_factory.mktemp("chromium")) as page:
        yield page


def page_of(server: PrefectServer, run: dict[str, Any]) -> str:
    return server.access.link(f"/runs/flow-run/{run['id']}", time.time())


@flow(name="asks")
async def asks() -> str:
    answer = await approval("Promote **it**?", 1.0)
    return "nobody" if answer is None else f"{answer.approve}: {answer.reason}"


async def test_person_approves_in_the_browser(connection: PrefectConnection, server: PrefectServer, page: Page) -> None:
    asking = asyncio.create_task(asks.with_options(flow_run_name="mouse")())
    async with prefect_http(connection.api_url) as http:
        run = await shown(http, name="approval of mouse")
        await in_state(http, run, "Paused")
    await asyncio.to_thread(answer_by_mouse, page, page_of(server, run), "Promote it?", "short answers")
    assert await asking == "True: short answers"


@pytest.mark.thorough
async def test_retry_resumes_a_failed_run_and_changes_nothing_else(
    connection: PrefectConnection,
    server: PrefectServer,
    page: Page,
    context: Any,
    client: Any,
    pool: Any,
    tmp_path: Path,
    running: Any,
) -> None:
    dispatcher = dispatcher_of(context, client, pool, Mirror(connection, Pacing(1000.0, SystemClock())), tmp_path)

    def retry() -> None:
        with page.at(url):
            page.press("Retry", "Retry")
            wait_for(lambda: not page.run("return document.querySelector('.p-modal')"))

    async with running(dispatcher.serve(lambda: None)), prefect_http(connection.api_url) as http:
        model = await client.create()
        run = await shown(http, model)
        url = page_of(server, run)
        client.journal.models.end(model, ModelState.FAILED, "the store was away")
        dispatcher.wake(model)
        await in_state(http, run, "Failed")
        await asyncio.to_thread(retry)
        await in_state(http, run, "Running")
        assert (await client.result(client.optim_step(model))).error is None

        await dispatcher.cancel(model, CANCELLED)
        await in_state(http, run, "Cancelled")
        await asyncio.to_thread(retry)

        state: dict[str, Any] = {}
        async with asyncio.timeout(120):
            while "Retry changed nothing" not in state.get("message", ""):
                state = await in_state(http, run, "Cancelled")
        assert "nothing to continue from" in state["message"]
        assert "Retry" in await asyncio.to_thread(buttons, page, url, "Cancelled")


async def test_a_run_that_cannot_be_retried_has_no_retry(
    connection: PrefectConnection, server: PrefectServer, page: Page
) -> None:
    (samples,) = Mirror(connection, Pacing(1000.0, SystemClock())).observe_sampling("folder/other")
    samples.ended("Completed", "the engine has ended")
    async with prefect_http(connection.api_url) as http:
        run = await shown(http, name="other sampling")
        await in_state(http, run, "Completed")
    assert "Retry" not in await asyncio.to_thread(buttons, page, page_of(server, run), "Completed")


def buttons(page: Page, url: str, state: str) -> list[str]:
    """The names of a page's buttons, after it shows the state of its run."""
    with page.at(url):
        page.shows(state)
        names: list[str] = page.run("return [...document.querySelectorAll('button')].map(one => one.innerText.trim())")
    return names

"""Prefect shows a training run as a flow run and each batch as a readable task run, and its buttons work.

The tests query Prefect's API, and use its page in a real browser.
"""

from __future__ import annotations

import asyncio
import base64
import threading
import time

import pytest
import tinker
from prefect import get_client
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
from tests.waiting import wait_for
from tinker import types
from tinker.lib.queue_state_logger import QueueStateLogger

from tinkerflow.deployments.automations import automations, ensure_automations
from tinkerflow.flows.prefect.mirror import short_name

pytestmark = pytest.mark.thorough


def flow_run(server, model_id: str) -> dict:
    """The flow run that mirrors a model's training run, once Prefect has it."""
    body = {"flow_runs": {"tags": {"all_": [model_id]}}}
    return wait_for(lambda: server.ask_prefect("/flow_runs/filter", body))[0]


def page_of(server, run: dict) -> str:
    return server.prefect_page(f"/runs/flow-run/{run['id']}")


def task_runs(server, run: dict) -> list[str]:
    body = {"flow_runs": {"id": {"any_": [run["id"]]}}, "sort": "EXPECTED_START_TIME_ASC"}
    return [t["name"] for t in server.ask_prefect("/task_runs/filter", body)]


@pytest.fixture(scope="module")
def trained(server, make_datum) -> str:
    """Make three steps with pauses, and return the model's id."""
    time.sleep(6)  # after many requests, batches share task runs for a while
    service = server.client()
    client = service.create_lora_training_client(base_model=server.base_model, rank=4).result()
    for _ in range(3):
        client.forward_backward([make_datum([3, 1, 4, 1, 5, 9])], "cross_entropy").result()
        time.sleep(0.4)
        client.optim_step(types.AdamParams()).result()
        time.sleep(0.4)
    client.save_state(name="seen").result()
    return client.model_id


def test_each_batch_has_one_readable_task_run(server, trained):
    run = flow_run(server, trained)
    assert run["state_type"] == "RUNNING"
    assert run["name"].startswith(f"{short_name(trained)} tiny 20")
    names = wait_for(lambda: len(found := task_runs(server, run)) >= 8 and found)
    operations = [name.rsplit("/", 1)[-1] for name in names]
    assert operations == ["create_model", *["forward_backward", "optim_step"] * 3, "save_weights"]
    assert len(set(names)) == 8
    assert all("step-00000" in name for name in names[1:])


def test_only_the_prefect_link_signs_in_a_browser(server, trained, page):
    run = flow_run(server, trained)
    stored = "return localStorage.getItem('prefect-password')"
    page.open(f"{server.prefect_url}/")
    page.run("localStorage.clear()")
    with page.at(f"{server.prefect_url}/runs/flow-run/{run['id']}"):
        page.shows("Authentication failed")
        assert trained not in page.text() and page.run(stored) is None
    with page.at(server.prefect_page("/")[:-1] + "x"):  # an invalid ticket
        page.shows("`tinkerflow prefect` prints a new one")
        assert page.run(stored) is None
    with page.at(page_of(server, run)):
        page.shows(trained)
        assert page.run("return location.pathname + location.hash") == f"/runs/flow-run/{run['id']}"
        assert base64.b64decode(page.run(stored)).decode() == server.prefect.credential
    with page.at(f"{server.prefect_url}/runs"):  # the browser stays signed in
        page.shows(run["name"])


def test_run_page_shows_its_batches(server, trained, page):
    with page.at(page_of(server, flow_run(server, trained))):
        text = page.shows("forward_backward", "optim_step", tab="task-runs")
    assert trained in text


def test_run_page_shows_its_steps_and_its_curves(server, trained, page):
    run = flow_run(server, trained)
    mine = {"artifacts": {"flow_run_id": {"any_": [run["id"]]}}}

    def current() -> dict[str, str]:
        found = server.ask_prefect("/artifacts/filter", mine)
        return {one["key"].rsplit("-", 1)[-1]: one["data"] for one in found}

    wait_for(lambda: "/weights/seen`" in current().get("run", ""))
    assert "**3** optimizer steps" in current()["run"]
    assert f"/training_runs/{trained})" in current()["run"]
    assert current()["curves"].startswith("data:image/svg+xml")
    url = page_of(server, run)
    with page.at(url):
        page.shows("step 1: loss", "gradient norm", "learning rate", "/weights/seen", tab="logs")
        page.picture("training-run-logs")
        page.shows("curves over steps", tab="artifacts")
        page.picture("training-run-artifacts")
    with page.at(f"{server.api_url}/training_runs/{trained}"):  # and its link back
        page.click("dl.facts a[href*='/runs/flow-run/']")
        page.shows(trained)
        assert page.run("return location.href") == f"{server.prefect_url}/runs/flow-run/{run['id']}"
    deployment = server.ask_prefect(f"/deployments/{run['deployment_id']}")
    assert deployment["name"].startswith("training runs of ")


async def test_automation_suspends_a_run_with_a_nan_loss(server, make_datum):
    (wanted,) = [one for one in automations() if "not a number" in one.name]
    wanted = wanted.model_copy(update={"name": "tinkerflow: test of nan", "enabled": True})
    access = server.prefect
    with temporary_settings({PREFECT_API_URL: access.api_url, PREFECT_API_AUTH_STRING: access.credential}):
        assert await ensure_automations([wanted]) == [wanted.name]
        try:
            await asyncio.to_thread(_diverge, server, make_datum([3, 1, 4, 1, 5, 9]))
        finally:
            async with get_client() as client:
                (made,) = await client.read_automations_by_name(wanted.name)
                await client.delete_automation(made.id)


def _diverge(server, datum: tinker.Datum) -> None:
    """Train with a learning rate that no model survives, and return once the run is suspended."""
    with server.client() as service:
        client = service.create_lora_training_client(base_model=server.base_model, rank=4).result()
        client.forward_backward([datum], "cross_entropy").result()
        client.optim_step(types.AdamParams(learning_rate=1e30)).result()
        client.forward_backward([datum], "cross_entropy").result()
        wait_for(lambda: flow_run(server, client.model_id)["state_type"] == "PAUSED")


class Stepping:
    """A user's program, which makes one step after the other until one fails."""

    def __init__(self, client: tinker.TrainingClient, datum: tinker.Datum) -> None:
        self.client, self.datum = client, datum
        self.made = 0
        self.last = 0.0  # the time of the last step, or of the error
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while True:
            try:
                self.client.forward_backward([self.datum], "cross_entropy").result()
                self.client.optim_step(types.AdamParams()).result()
            except Exception as error:  # noqa: BLE001  the test checks it
                self.error, self.last = error, time.monotonic()
                return
            self.made, self.last = self.made + 1, time.monotonic()
            time.sleep(0.1)

    def goes_on(self) -> None:
        wait_for(lambda before=self.made: self.made > before + 2 or self.error is not None)
        assert self.error is None, self.error

    def wait_until_idle(self) -> None:
        """Return once no step was made for ten seconds."""
        wait_for(lambda: time.monotonic() - self.last > 10)


def test_buttons_hold_resume_and_end_a_training_run(server, make_datum, page, monkeypatch):
    told: list[str | None] = []  # the SDK logs these reasons after a pause of 15 minutes
    monkeypatch.setattr(QueueStateLogger, "on_queue_state_change", lambda _, state, reason: told.append(reason))
    with server.client() as service:
        client = service.create_lora_training_client(base_model=server.base_model, rank=4).result()
        program = Stepping(client, make_datum([3, 1, 4, 1, 5, 9]))
        program.goes_on()
        url = page_of(server, flow_run(server, client.model_id))
        with page.at(url):
            clicked = page.press("Suspend", "Submit")
            wait_for(lambda: flow_run(server, client.model_id)["state_type"] == "PAUSED")
        program.wait_until_idle()
        print(f"\nSuspend: the last step was made {max(0.0, program.last - clicked):.1f} s after the click")
        assert program.error is None
        wait_for(lambda: any("Resume continues it" in str(reason) for reason in told))

        made = program.made
        with page.at(url):
            page.shows("Suspended")
            page.picture("training-run-suspended")
            clicked = page.press("Resume", "Submit")
            wait_for(lambda: flow_run(server, client.model_id)["state_type"] != "PAUSED")
        wait_for(lambda: program.made > made or program.error is not None)
        print(f"Resume: the next step was made {program.last - clicked:.1f} s after the click")
        program.goes_on()

        with page.at(url):
            clicked = page.press("Cancel", "Confirm")
            wait_for(lambda: program.error is not None)
        print(f"Cancel: the program had its error {program.last - clicked:.1f} s after the click")
        assert "was unloaded: the run was cancelled in Prefect" in str(program.error)
        wait_for(lambda: flow_run(server, client.model_id)["state_type"] == "CANCELLED")
        with page.at(url):
            page.shows("Cancelled")
            page.picture("training-run-cancelled")

"""Metrics and outcomes of runs over HTTP: stored once, shown on the run's page, and refused with a reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.api.conftest import KEY

from tinkerflow.backend.journal import ModelState
from tinkerflow.flows.pipelines.fine_tuning import _live_progress
from tinkerflow.tasks.pipelines.artifacts import RunArtifacts
from tinkerflow.tasks.pipelines.connection import ServerClients
from tinkerflow.tasks.pipelines.progress import SegmentRecord, StepMetrics
from tinkerflow.tasks.pipelines.reported import ReportedMetrics

pytestmark = pytest.mark.usefixtures("engine")


def steps(**values: Any) -> dict[str, Any]:
    return {"steps": [{"step": 1, "values": values}]}


def test_the_outcome_of_a_program_is_on_the_page_of_its_run(server: Any) -> None:
    run = server.model()
    path, failed = f"training_runs/{run}/outcome", {"outcome": "failed", "reason": "reward a:b: KeyError"}
    assert server.post(path, {"outcome": "gone"}).status_code == 400
    assert [server.post(path, failed).json() for _ in range(2)] == [failed] * 2
    server.journal.models.end(run, ModelState.UNLOADED, "the session ended")
    page = server.http.get(f"{server.url}/training_runs/{run}").text
    assert page.count("failed: reward a:b: KeyError") == 1, "an event, once"
    assert "<dt>reason</dt><dd>reward a:b: KeyError</dd>" in page and '<span class="state failed">failed</span>' in page
    found = server.http.get(f"{server.url}/training_runs", params={"q": "outcome=failed"}).text
    assert run in found and '<span class="state failed">failed</span>' in found
    assert server.post(path, {"outcome": "completed"}).status_code == 200
    page = server.http.get(f"{server.url}/training_runs/{run}").text
    assert "<dt>reason</dt>" not in page and '<span class="state completed">' in page


def test_metrics_are_stored_once_and_shown_on_the_page_of_the_run(server: Any) -> None:
    run = server.model()
    path = f"training_runs/{run}/metrics"
    seen = server.http.get(f"{server.url}/training_runs/{run}").text.split('data-seen="')[1].split('"')[0]
    assert server.post(path, steps(reward=0.5, **{"env/<b>": 1})).status_code == 400
    sent = {"steps": [{"step": step, "values": {"reward": step / 4, "answer_tokens": 12}} for step in (1, 2)]}
    assert [server.post(path, sent).json() for _ in range(2)] == [{"recorded": 4}, {"recorded": 0}]
    page = server.http.get(f"{server.url}/curves", params={"run": run, "seen": seen})
    assert page.status_code == 200
    titles = [part.split(" ")[0] for part in page.text.split("<figcaption>")[1:]]
    assert titles == ["reward", "Loss", "answer_tokens", "Gradient"]
    assert "reward by step: value ends at 0.5" in page.text
    other = server.model()
    server.post(f"training_runs/{other}/metrics", steps(reward=1.0))
    compared = server.http.get(f"{server.url}/compare", params={"run": [run, other]}).text
    assert f"{run} ends at 0.5, {other} ends at 1" in compared
    assert f"<th>First step that differs from {run}</th>" in compared and "<td>none of 0</td>" in compared


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "steps"),
        ({"steps": []}, "steps"),
        (steps(**{"": 1.0}), "must be a string that matches"),
        (steps(**{"a" * 65: 1.0}), "must be a string that matches"),
        (steps(reward="much"), "steps[0].values['reward'] is 'much': must be a number"),
        (steps(reward=-1e31), "steps[0].values['reward'] is -1e+31: must be greater than or equal to"),
        ({"steps": [{"step": -1, "values": {"a": 1.0}}]}, "steps[0].step is -1: must be a whole number >= 0"),
        ({"steps": [{"step": 1, "values": {"a": 1.0}, "at": 1}]}, "at"),
        ({"steps": [{"step": 1, "values": {}}] * 2}, "steps: step 1 is given twice"),
        ({"steps": [{"step": n, "values": {f"n{k}": 1 for k in range(100)}} for n in range(101)]}, "10100 values"),
    ],
)
def test_invalid_metrics_are_refused(body: Any, words: str, server: Any) -> None:
    refused = server.post(f"training_runs/{server.model()}/metrics", body)
    assert (refused.status_code, words in refused.text) == (400, True), refused.text


def test_values_that_are_not_finite_are_refused(server: Any) -> None:
    url = f"{server.url}/api/v1/training_runs/{server.model()}/metrics"
    body = b'{"steps": [{"step": 1, "values": {"reward": NaN}}]}'
    assert server.http.post(url, content=body, headers={"X-API-Key": "tml-test"}).status_code == 400


def test_a_project_keeps_a_limited_number_of_values(start: Any) -> None:
    server = start(max_metrics=1)
    path = f"training_runs/{server.model()}/metrics"
    assert server.post(path, steps(reward=0.5)).status_code == 200
    refused = server.post(path, {"steps": [{"step": 2, "values": {"a": 1, "b": 2}}]})
    assert refused.status_code == 400 and "keeps 1 metrics, and this adds 2" in refused.text


def clients(url: str) -> ServerClients:
    return ServerClients(None, None, url, KEY)  # type: ignore[arg-type]


async def test_pipeline_sends_its_values_and_those_of_the_run_it_continues(server: Any, journal: Any) -> None:
    def made(step: int) -> StepMetrics:
        return StepMetrics(step=step, values={"loss": 1.0, "grad_norm": 2.0, "reward": step / 4, "kl": float("nan")})

    steps = [made(step) for step in (1, 2)]
    segment = SegmentRecord(first_step=1, last_step=2, state="s", steps=steps, held_out={"held_out_reward": 0.5})
    run = server.model()
    trainer: Any = SimpleNamespace(
        run_id=run,
        training=SimpleNamespace(steps=4),
        run=SimpleNamespace(artifacts=RunArtifacts("rl-a"), server=clients(server.url)),
    )
    segments = [segment]
    async with _live_progress(trainer, segments) as show_step:
        show_step(made(3))
        show_step(made(4))
        more = {"first_step": 3, "last_step": 4, "steps": [made(3), made(4)]}
        segments.append(segment.model_copy(update=more))
    held_out, loss, reward = journal.run_metrics.of_run(run, "local")
    assert held_out.points == ((2, 0.5), (4, 0.5))
    assert loss.points == ((1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0))
    assert reward.points == ((1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0))


async def test_unsent_values_are_sent_later(server: Any, journal: Any, caplog: pytest.LogCaptureFixture) -> None:
    run, reported = server.model(), ReportedMetrics(clients(server.url))
    reported._http.base_url = "http://127.0.0.1:1"
    for step in (1, 2):
        await reported.send(run, {step: {"reward": 0.5}})
    reported._http.base_url = server.url
    assert caplog.text.count("does not show the values of its steps") == 1
    await reported.send(run, {})
    assert journal.run_metrics.number(run) == 2
    await reported.send("nobody", {1: {"reward": 0.5}})
    assert not any(reported._waiting.values()), "a refused request is not repeated"
    await reported.close()

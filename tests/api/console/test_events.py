"""The page of a run: its events, its next checkpoint and its lineage."""

from __future__ import annotations

import logging
import re
from datetime import UTC, datetime, timedelta
from html import unescape
from typing import Any
from urllib.parse import quote

import sqlalchemy as sa

from tinkerflow.api.console.upcoming import upcoming
from tinkerflow.backend.journal import Curve, ModelState, RunEvent, StepFigures
from tinkerflow.backend.journal.tables import RecoverySnapshot

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def test_events_are_newest_first_and_resent_only_after_new_ones(browser: Any, server: Any, engine: Any) -> None:
    run = server.model()
    server.journal.models.pause(run, "a person <paused> it")
    server.journal.run_events.add(run, [RunEvent(NOW, logging.WARNING, "its worker group ended")])
    page = browser.get(f"/training_runs/{run}").text
    part = page.split('aria-label="Events"')[1].split("</section>")[0]
    rows = [unescape(re.sub("<.*?>", "", row)) for row in re.findall(r'<td class="text">(.*?)</td>', part)]
    assert rows == ["warning its worker group ended", "paused: a person <paused> it", "created on tiny/bigram"]
    (live,), (seen,) = re.findall(r'data-live="(.*?)"', part), re.findall(r'data-seen="(.*?)"', part)
    assert browser.get(live, params={"seen": seen}).status_code == 204
    server.journal.models.pause(run, None)
    news = browser.get(live, params={"seen": seen})
    assert news.status_code == 200 and "resumed" in news.text and "<html" not in news.text
    assert browser.get("/training_runs/none/events").status_code == 404


def test_page_of_an_ended_run_stops_polling_for_events(browser: Any, server: Any, furnish: Any) -> None:
    things = furnish()
    server.journal.models.end(things.run, ModelState.UNLOADED, "its session is finished")
    page = browser.get(f"/training_runs/{things.run}").text
    assert "unloaded: its session is finished" in page and "/events" not in page


def test_a_fork_names_its_origin_and_both_runs_have_their_lineage(browser: Any, server: Any, furnish: Any) -> None:
    things = furnish()
    body = {"session_id": things.session, "model_seq_id": 1, "path": things.weights, "optimizer": True}
    began = server.post("load_weights", body).json()["model_id"]
    with server.journal.models._write() as connection:
        copied = connection.exec_driver_sql("SELECT origin, origin_run FROM model WHERE id = ?", (began,)).one()
        assert tuple(copied) == (things.weights, things.run)
    page = unescape(browser.get(f"/training_runs/{began}").text)
    assert f">{things.weights}</a></p>" in page and "<small>this run, began with weights/state" in page
    assert f'<small>run</small><a class="mono" href="/training_runs/{things.run}">' in page
    with server.journal.models._write() as connection:
        path = f"tinker://{things.run}/weights/@3"
        connection.exec_driver_sql("UPDATE model SET origin = ? WHERE id = ?", (path, began))
    text = re.sub("<.*?>", "", unescape(browser.get(f"/training_runs/{began}").text))
    assert f"fork of {things.run} @3" in text
    parent = unescape(browser.get(f"/training_runs/{things.run}").text)
    assert f'href="/training_runs/{began}">{began}</a> <span class="soft">(@3)' in parent


def test_a_run_that_was_not_created_shows_the_reason(browser: Any, server: Any) -> None:
    body = {
        "session_id": server.session(),
        "model_seq_id": 0,
        "path": "tinker://nope:train:0/weights/a",
        "optimizer": True,
    }
    refused = server.post("load_weights", body).json()["model_id"]
    page = unescape(browser.get(f"/training_runs/{refused}").text)
    assert re.search(r"not created: .*nope:train:0", page)
    assert "created on" not in page


def test_rerun_links_to_the_run_that_it_repeats(browser: Any, server: Any, engine: Any) -> None:
    first = server.model()
    again = server.model(rerun_of=first)
    page = browser.get(f"/training_runs/{again}").text
    assert f'rerun of <a class="mono" href="/training_runs/{quote(first, safe="")}">' in page
    assert "<dt>rerun_of</dt>" not in page


def test_run_page_shows_neither_empty_facts_nor_its_opening_step(browser: Any, server: Any) -> None:
    run = server.model(data="capitals.csv 6f1b", parent="", step="0", planned_steps="60")
    page = browser.get(f"/training_runs/{run}").text
    assert "<dt>data</dt><dd>capitals.csv 6f1b</dd>" in page and "<dt>planned_steps</dt>" in page
    assert "<dt>step</dt>" not in page and "<dt>parent</dt>" not in page


def points(*steps: int) -> Curve:
    found = (StepFigures(n, NOW + timedelta(minutes=n), 1, *[None] * 10) for n in steps)
    return Curve(tuple(found), len(steps))


def test_the_next_checkpoint_of_a_pipeline_and_of_recovery(server: Any, journal: Any, engine: Any) -> None:
    plan = {"planned_steps": "50", "save_every": "20", "step": "20"}
    told = {}
    for name, metadata in {
        "plan": plan,
        "rerun": {**plan, "rerun_of": "x"},
        "client": {},
        "text": {**plan, "save_every": "often"},
    }.items():
        run = journal.models.get(server.model(**metadata), None)
        told[name] = upcoming(journal, run, points(2, 4), NOW, 50)
    assert told == {
        "plan": "the next checkpoint is due at step 40, in about 40 min; the last of 50 steps, in about 50 min",
        "rerun": "",
        "client": "",
        "text": "",
    }
    row = {"path": f"tinker://{run.id}/recovery/seq-1", "model_id": run.id, "seq_id": 1, "step": 120}
    with journal.models._write() as connection:
        connection.execute(sa.insert(RecoverySnapshot), [row | {"size_bytes": 10, "created_at": NOW}])
    line = upcoming(journal, run, points(), NOW + timedelta(seconds=20), 50)
    assert line == "the newest recovery snapshot is from step 120 (20 s ago), the next one is due by step 170"

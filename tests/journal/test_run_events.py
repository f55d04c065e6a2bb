"""The events of a run: pauses and ends are written with the change itself, and a run keeps its newest events."""

from __future__ import annotations

import logging

from tinkerflow.backend.journal import ModelState, RunEvent
from tinkerflow.backend.journal.run_events import MOST_EVENTS


def texts(journal, run):
    return [(one.level, one.text) for one in journal.run_events.newest(run)]


def test_pause_resume_and_end_are_events_of_their_run_only(scene, journal, clock):
    run, other = scene.model(), scene.model()
    for why in ("a person did it", "a person did it", None, None):
        clock.advance(1.0)
        journal.models.pause(run, why)
    assert texts(journal, run) == [(logging.INFO, "resumed"), (logging.INFO, "paused: a person did it")]
    resumed, paused = journal.run_events.newest(run)
    assert resumed.at > paused.at
    journal.models.end(run, ModelState.FAILED, "no memory")
    journal.models.end(run, ModelState.FAILED, "again")
    journal.models.end(other, ModelState.UNLOADED, "the session is finished")
    assert texts(journal, run)[0] == (logging.ERROR, "failed: no memory")
    assert texts(journal, other) == [(logging.INFO, "unloaded: the session is finished")]


def test_run_keeps_its_newest_events_with_rising_numbers(scene, journal, clock):
    run, other = scene.model(), scene.model()
    assert (journal.run_events.newest(run), journal.run_events.last(run)) == ([], 0)
    journal.run_events.add(other, [RunEvent(clock.now(), logging.INFO, "mine")])
    before = 0
    for first in range(0, MOST_EVENTS + 50, 50):
        news = [RunEvent(clock.now(), logging.INFO, f"event {n}") for n in range(first, first + 50)]
        journal.run_events.add(run, news)
        before, last = journal.run_events.last(run), before
        assert before > last
    kept = [one.text for one in journal.run_events.newest(run)]
    assert kept == [f"event {n}" for n in reversed(range(50, MOST_EVENTS + 50))]
    assert texts(journal, other) == [(logging.INFO, "mine")]

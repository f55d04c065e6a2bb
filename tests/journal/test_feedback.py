"""Feedback is kept as it was given, and read in pages that fit into memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from threading import Barrier
from typing import Any

import pytest

from tinkerflow.backend.core.errors import TooManyError
from tinkerflow.backend.journal import Limits, feedback
from tinkerflow.backend.journal.feedback import NewFeedback


def give(scene: Any, answer: str, *limits: Limits, owner: str = "local") -> int:
    prompt = [{"role": "user", "content": "x\0"}]
    new = NewFeedback(owner, "", "req-a-0", 0.5, None, None, "base", None, prompt, answer, b"\1", b"")
    return int(scene.journal.feedback.add(new, *limits))


def test_pages_of_long_rows_are_shorter_and_continue(scene: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feedback, "_MOST_CHARACTERS", 100)
    ids = [give(scene, str(n) * 60) for n in range(20)]
    found, after = [], 0
    while page := scene.journal.feedback.page("local", after=after):
        assert len(page) <= 2
        found += page
        after = page[-1].id
    assert [(one.id, one.answer) for one in found] == [(ids[n], str(n) * 60) for n in range(20)]
    assert found[0].prompt == [{"role": "user", "content": "x\0"}]


def test_since_may_be_any_time(scene: Any) -> None:
    give(scene, "a")
    for zone in (timezone(timedelta(hours=14)), timezone(timedelta(hours=-14))):
        assert len(scene.journal.feedback.page("local", since=datetime(1, 1, 1, tzinfo=zone))) == 1
        assert scene.journal.feedback.page("local", since=datetime(9999, 12, 31, 23, 59, tzinfo=zone)) == []


def test_project_has_a_daily_limit_of_feedback(scene: Any, clock: Any) -> None:
    limits = Limits(feedback_per_day=2)
    give(scene, "a", limits)
    clock.advance(3600)
    give(scene, "b", limits)
    with pytest.raises(TooManyError, match="rated 2 answers in 24 hours"):
        give(scene, "c", limits)
    give(scene, "c", limits, owner="them")
    clock.advance(23 * 3600)
    give(scene, "c", limits)  # the first one is a day old
    with pytest.raises(TooManyError):
        give(scene, "d", limits)


def test_feedback_from_a_clock_that_was_ahead_does_not_use_up_the_daily_limit(scene: Any, clock: Any) -> None:
    limits = Limits(feedback_per_day=2)
    give(scene, "a", limits)
    give(scene, "b", limits)
    clock.advance(-90 * 24 * 3600)
    give(scene, "c", limits)
    give(scene, "d", limits)
    with pytest.raises(TooManyError):
        give(scene, "e", limits)


def test_simultaneous_feedback_does_not_exceed_the_daily_limit(scene: Any) -> None:
    together = Barrier(4)

    def try_to_give(n: int) -> bool:
        together.wait()
        try:
            return give(scene, str(n), Limits(feedback_per_day=1)) > 0
        except TooManyError:
            return False

    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(try_to_give, range(4))) == 1

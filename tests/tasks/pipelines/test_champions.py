"""Champions and their promotion."""

from __future__ import annotations

import pytest
from tests.manual_clock import ManualClock

from tinkerflow.backend.core.errors import ConflictError, UserError
from tinkerflow.tasks.pipelines.champions import Champion, champion, promote
from tinkerflow.tasks.pipelines.scoring import Scores


def one(number: int, weights: str) -> Champion:
    scores = Scores(rows=2, loss=1.0, exact_match=0.5, samples=[])
    now = ManualClock().now()
    return Champion(number=number, weights=weights, state="s", run="r", data="d", scores=scores, promoted_at=now)


def test_the_last_promoted_is_the_champion(work: str) -> None:
    assert champion(work, "colours") is None
    for number in range(1, 12):
        promote.fn(work, "colours", one(number, f"tinker://{number}"))
    found = champion(work, "colours")
    assert found is not None
    assert found.weights == "tinker://11"
    assert champion(work, "other") is None


def test_one_of_two_challengers_of_a_champion_is_promoted(work: str) -> None:
    promote.fn(work, "colours", one(1, "tinker://a"))
    promote.fn(work, "colours", one(1, "tinker://a"))  # a retry
    with pytest.raises(ConflictError, match="champion 'colours': run r was promoted meanwhile"):
        promote.fn(work, "colours", one(1, "tinker://b"))
    found = champion(work, "colours")
    assert found is not None
    assert found.weights == "tinker://a"
    with pytest.raises(UserError, match=r"champion '\.\./x'"):
        champion(work, "../x")


def test_champion_is_beaten_only_beyond_the_margin_of_loss_or_matches() -> None:
    old = Scores(rows=2, loss=1.0, exact_match=0.5, samples=[])
    new = Scores(rows=2, loss=0.8, exact_match=0.5, samples=[])
    assert new.beats(old, "loss", 0.1)
    assert not new.beats(old, "loss", 0.3)
    assert not new.beats(old, "exact_match", 0.0)
    assert not old.beats(new, "loss", 0.0)

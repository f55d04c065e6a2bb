"""Stored rollouts of steps and evaluations: written once, within size limits, and thinned as a run continues."""

from __future__ import annotations

import pytest
from tests.manual_clock import ManualClock

from tinkerflow.backend.catalog.rollouts import (
    EVERY,
    FULL,
    MOST_BYTES,
    MOST_DROPPED,
    DroppedRollout,
    EvaluationFacts,
    RolloutGroup,
    RolloutMessage,
    RolloutSample,
    StepRollouts,
    numbers_of,
    read_rollouts,
    write_evaluation,
    write_rollouts,
)
from tinkerflow.backend.core.errors import ServerError, UserError
from tinkerflow.backend.store.blobs import open_blobs

RUN = "sess-1:train:0"


def step_of(step: int, *groups: RolloutGroup, dropped: int = 0) -> StepRollouts:
    lost = [DroppedRollout(prompt="p", fate="left out", reason="r")] * dropped
    return StepRollouts(step=step, staleness=0, groups=list(groups), dropped=lost)


def group_of(text: str, tokens: int = 0) -> RolloutGroup:
    answer = RolloutMessage(role="assistant", text=text, tokens=[7] * tokens, logprobs=[-0.5] * tokens)
    sample = RolloutSample(reward=1.0, advantage=0.5, length=tokens, messages=[answer])
    return RolloutGroup(prompt=[RolloutMessage(role="user", text="Why?")], samples=[sample])


def test_a_step_is_written_once_and_read_back(tmp_path):
    work = open_blobs(tmp_path.as_uri())
    first = step_of(3, group_of("because", 2))
    write_rollouts(work, RUN, first)
    write_rollouts(work, RUN, step_of(3, group_of("another")))
    assert numbers_of(work, "rollouts", RUN) == [3] and numbers_of(work, "rollouts", "sess-1:train:1") == []
    assert read_rollouts(work, "rollouts", RUN, 3) == first
    with pytest.raises(FileNotFoundError):
        read_rollouts(work, "rollouts", RUN, 4)
    with pytest.raises(UserError, match="run "):
        write_rollouts(work, "../other", first)
    work.create("rollouts/sess-1.train.0/00000009.json", b'{"step": "x"}')
    with pytest.raises(ServerError, match=r"00000009.json: it is damaged"):
        read_rollouts(work, "rollouts", RUN, 9)


def test_evaluations_are_numbered_and_apart_from_steps(tmp_path):
    work = open_blobs(tmp_path.as_uri())
    facts = EvaluationFacts(
        name="a",
        weights=f"tinker://{RUN}/sampler_weights/final",
        judge="reward a:b",
        data="rows.jsonl 1",
        reward=0.5,
        rows=2,
        answers=4,
        evaluated_at=ManualClock().now(),
    )
    found = StepRollouts(step=0, groups=[group_of("because", 2)], evaluation=facts)
    write_rollouts(work, RUN, step_of(7))
    assert [write_evaluation(work, RUN, found) for _ in range(FULL + 2)] == [*range(1, FULL + 3)]
    assert numbers_of(work, "evaluations", RUN) == [*range(3, FULL + 3)]
    assert numbers_of(work, "rollouts", RUN) == [7]
    last = read_rollouts(work, "evaluations", RUN, FULL + 2)
    assert (last.groups, last.evaluation, last.step) == (found.groups, facts, FULL + 2)


def test_older_steps_are_thinned(tmp_path):
    work = open_blobs(tmp_path.as_uri())
    last = FULL + 3 * EVERY
    for step in range(1, last + 1):
        write_rollouts(work, RUN, step_of(step))
    assert numbers_of(work, "rollouts", RUN) == [EVERY, 2 * EVERY, *range(last - FULL, last + 1)]


def test_oversized_step_drops_probabilities_first_and_then_groups(tmp_path):
    work = open_blobs(tmp_path.as_uri())
    most = MOST_BYTES // 2
    write_rollouts(work, RUN, step_of(1, group_of("a" * most), group_of("b", most), group_of("c" * most), dropped=1000))
    found = read_rollouts(work, "rollouts", RUN, 1)
    first, second = (group.samples[0].messages[0] for group in found.groups)
    assert (first.text, second.text, second.tokens, second.logprobs) == ("a" * most, "b", [], [])
    assert (found.left_off, len(found.dropped), found.more_dropped) == (1, MOST_DROPPED, 1000 - MOST_DROPPED)
    assert work.size("rollouts/sess-1.train.0/00000001.json") < 1.1 * MOST_BYTES


def test_letters_count_as_their_stored_bytes(tmp_path):
    work = open_blobs(tmp_path.as_uri())
    write_rollouts(work, RUN, step_of(1, *[group_of("思" * (MOST_BYTES // 8))] * 8))
    found = read_rollouts(work, "rollouts", RUN, 1)
    assert (len(found.groups), found.left_off) == (2, 6), "each letter takes three bytes"
    assert work.size("rollouts/sess-1.train.0/00000001.json") < 1.1 * MOST_BYTES

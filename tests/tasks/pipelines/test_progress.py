"""The record of a segmented training: no duplicate or missing segments, and none of another run."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tinkerflow.backend.core.errors import ServerError, UserError
from tinkerflow.tasks.pipelines import progress as progress_module
from tinkerflow.tasks.pipelines.progress import RunProgress, SegmentRecord, StepMetrics
from tinkerflow.tasks.pipelines.work import create_json, open_work


def segment(first: int, last: int, loss: float = 1.0) -> SegmentRecord:
    steps = [StepMetrics(step=step, values={"loss": loss}) for step in range(first, last + 1)]
    return SegmentRecord(first_step=first, last_step=last, state=f"tinker://m/weights/step-{last}", steps=steps)


def test_segments_are_read_in_order_by_the_next_process(work: str, monkeypatch: pytest.MonkeyPatch) -> None:
    progress = RunProgress(work, "run", "plan")
    with monkeypatch.context() as context:
        context.setattr(progress, "segments", lambda: pytest.fail("reads all segments to add one"))
        for one in (segment(1, 9), segment(10, 10), segment(11, 110)):
            progress.add(one)
    assert RunProgress(work, "run", "plan").segments() == [segment(1, 9), segment(10, 10), segment(11, 110)]
    assert RunProgress(work, "other", "plan").segments() == []


def test_run_whose_values_are_not_finite_can_be_resumed(work: str) -> None:
    values = {"loss": math.inf, "reward": -math.inf, "grad_norm": 0.5}
    last = segment(1, 1).model_copy(
        update={"steps": [StepMetrics(step=1, values=values)], "held_out": {"held_out_loss": math.nan}}
    )
    RunProgress(work, "run", "plan").add(last)
    (found,) = RunProgress(work, "run", "plan").segments()
    assert found.steps[0].values == pytest.approx({"loss": math.nan, "reward": math.nan, "grad_norm": 0.5}, nan_ok=True)
    assert math.isnan(found.held_out["held_out_loss"])


def test_one_of_two_processes_continues_a_run(work: str) -> None:
    RunProgress(work, "run", "plan").add(segment(1, 5))
    for late in (segment(1, 5, loss=2.0), segment(1, 3)):
        with pytest.raises(UserError, match="step 1 was made by another process"):
            RunProgress(work, "run", "plan").add(late)


@pytest.mark.parametrize("last", [3, 5, 7])
def test_two_processes_that_add_a_segment_at_the_same_time_do_not_both_succeed(
    work: str, monkeypatch: pytest.MonkeyPatch, last: int
) -> None:
    """Their segments may have different lengths, because a process may be asked to stop."""
    first, second = RunProgress(work, "run", "plan"), RunProgress(work, "run", "plan")
    first.add(segment(1, 2))
    create = progress_module.create_json

    def later(*args: Any) -> None:
        monkeypatch.setattr(progress_module, "create_json", create)
        second.add(segment(3, 5))
        create(*args)

    monkeypatch.setattr(progress_module, "create_json", later)
    with pytest.raises(UserError, match="step 3 was made by another process"):
        first.add(segment(3, last, loss=2.0))
    assert RunProgress(work, "run", "plan").segments() == [segment(1, 2), segment(3, 5)]


def test_segments_of_earlier_releases_are_continued(work: str) -> None:
    """Their names are the numbers of their last steps."""
    progress = RunProgress(work, "run", "plan")
    for one in (segment(1, 5), segment(6, 9)):
        create_json(open_work(work), f"progress/run/segments/{one.last_step:08d}.json", one.model_dump(mode="json"))
    progress.add(segment(10, 12))
    with pytest.raises(UserError, match="step 10 was made by another process"):
        progress.add(segment(10, 11))
    assert [one.first_step for one in progress.segments()] == [1, 6, 10]


def test_different_plan_or_invalid_name_is_refused(work: str) -> None:
    RunProgress(work, "run", "plan")
    with pytest.raises(UserError, match="resume 'run': this run was started with different parameters or data"):
        RunProgress(work, "run", "other plan")
    RunProgress(work, "told", "plan", {"training.steps": 40, "reward": "m:f"})
    fact = r"different parameters or data \(reward was 'm:f' and is None, training.steps was 40 and is 12\); give it"
    with pytest.raises(UserError, match=fact):
        RunProgress(work, "told", "other plan", {"training.steps": 12})
    with pytest.raises(UserError, match=r"run '\.\./x': must be 1 to 128 of"):
        RunProgress(work, "../x", "plan")


def test_missing_piece_is_detected(work: str) -> None:
    progress = RunProgress(work, "run", "plan")
    for one in (segment(1, 5), segment(6, 9)):
        progress.add(one)
    open_work(work).remove("progress/run/segments/00000001.json")
    with pytest.raises(ServerError, match="the segment that begins with step 1 is missing"):
        progress.segments()


def test_first_kept_value_wins(work: str) -> None:
    progress = RunProgress(work, "run", "plan")
    assert progress.kept("reference") is None
    assert progress.keep("reference", b"one") == b"one"
    assert RunProgress(work, "run", "plan").keep("reference", b"two") == b"one"
    assert progress.kept("reference") == b"one"
    assert RunProgress(work, "other", "plan").kept("reference") is None

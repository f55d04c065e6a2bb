"""Artifacts of a run: Markdown that data cannot break, and a limited number of updates."""

from __future__ import annotations

from typing import Any

import pytest
from tests.manual_clock import ManualClock

from tinkerflow.tasks.pipelines import artifacts as module
from tinkerflow.tasks.pipelines.artifacts import LINE_SECONDS, LIVE_SECONDS, RunArtifacts, cell, data_page, follower
from tinkerflow.tasks.pipelines.data import BadRow, DataReport
from tinkerflow.tasks.pipelines.progress import Sample, SegmentRecord, StepMetrics


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """The artifacts that would be sent to Prefect: the kind and content of each."""
    written: list[tuple[str, Any]] = []

    async def keep(self: RunArtifacts, kind: str, create: Any, data: object, title: str, name: str) -> None:
        written.append((kind, data))

    monkeypatch.setattr(RunArtifacts, "put", keep)
    return written


async def test_progress_is_written_at_most_every_two_seconds_and_at_the_end(put: list[tuple[str, Any]]) -> None:
    clock, followed = ManualClock(), []
    artifacts = RunArtifacts("sft-mine", clock)
    token = follower.set(lambda *step: followed.append(step[0]))
    for step in range(1, 7):
        await artifacts.progress(step, 6, {"loss": 1.0})
        clock.advance(0.4 * LIVE_SECONDS)
    follower.reset(token)
    assert [data for _, data in put] == [pytest.approx(100 * step / 6) for step in (1, 4, 6)]
    assert followed == [1, 2, 3, 4, 5, 6]


async def test_a_line_every_ten_seconds_has_the_step_its_values_and_the_time_left(
    put: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, lines = ManualClock(), list[str]()
    monkeypatch.setattr(module, "log_line", lines.append)
    artifacts = RunArtifacts("sft-mine", clock)
    for step in range(4, 9):  # an earlier process made three steps
        await artifacts.progress(step, 8, {"loss": 1 / step, "reward": 0.5})
        clock.advance(0.6 * LINE_SECONDS)
    assert lines == [
        "step 4 of 8: loss 0.25, reward 0.5",
        "step 6 of 8: loss 0.1667, reward 0.5; about 0:00:12 left",
        "step 8 of 8: loss 0.125, reward 0.5",
    ]


async def test_long_runs_have_every_few_steps_in_their_table(put: list[tuple[str, Any]]) -> None:
    steps = [StepMetrics(step=i, values={"loss": 1.0 / i}) for i in range(1, 502)]
    await RunArtifacts("x").curves(steps, {"held_out_loss": [(100.0, 0.5)]})
    (picture, table) = put
    assert picture[0] == "curves" and picture[1].startswith("data:image/svg+xml;base64,")
    assert [row["step"] for row in table[1]] == [*range(1, 502, 3), 501]  # the last step is always there


async def test_pictures_of_long_runs_have_means(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []

    async def keep(self: RunArtifacts, kind: str, panels: Any, title: str) -> None:
        drawn.append(panels)

    monkeypatch.setattr(RunArtifacts, "pictures", keep)
    monkeypatch.setattr(module, "MOST_POINTS", 3)
    for last in (3, 7):
        steps = [StepMetrics(step=i, values={"loss": float(i)}) for i in range(1, last + 1)]
        await RunArtifacts("x").curves(steps, {"held_out_loss": [(2.0, 0.5)]})
    few, many = ([*one["loss"].values()] for one in drawn)
    assert few == [[(1, 1.0), (2, 2.0), (3, 3.0)], [(2.0, 0.5)]]
    assert many == [[(3, 2.0), (6, 5.0), (7, 7.0)], [(2.0, 0.5)]]


async def test_answers_of_first_and_last_segments_are_compared(put: list[tuple[str, Any]]) -> None:
    segments = [
        SegmentRecord(first_step=i, last_step=i, state="s", steps=[], samples=[Sample(prompt="p", answer=f"a{i}")])
        for i in range(1, 8)
    ]
    await RunArtifacts("x").samples([*segments, SegmentRecord(first_step=8, last_step=8, state="s", steps=[])])
    assert put[0][1] == [{"prompt": "p"} | {f"after step {i}": f"a{i}" for i in (1, 4, 5, 6, 7)}]
    await RunArtifacts("x").samples([])
    assert len(put) == 1


async def test_answers_of_a_run_that_was_resumed_with_other_prompts_stay_with_their_prompts(
    put: list[tuple[str, Any]],
) -> None:
    def segment(step: int, prompts: str) -> SegmentRecord:
        samples = [Sample(prompt=prompt, answer=f"{prompt}{step}{i}") for i, prompt in enumerate(prompts)]
        return SegmentRecord(first_step=step, last_step=step, state="s", steps=[], samples=samples)

    await RunArtifacts("x").samples([segment(1, "ppq"), segment(2, "qp")])
    assert put[0][1] == [
        {"prompt": "p", "after step 1": "p10", "after step 2": "p21"},
        {"prompt": "p", "after step 1": "p11", "after step 2": ""},
        {"prompt": "q", "after step 1": "q12", "after step 2": "q20"},
    ]


async def test_artifacts_are_not_written_outside_a_flow_run() -> None:
    def create(**_: Any) -> Any:
        raise AssertionError("an artifact was made")

    await RunArtifacts("x").put("report", create, "# text", "title", "markdown")


def test_note_goes_to_the_code_behind_the_run_or_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    shown: list[str] = []
    token = module.notes.set(shown.append)
    module.show_note("data a.csv: 2 row(s): empty")
    module.notes.reset(token)
    assert (shown, caplog.text) == (["data a.csv: 2 row(s): empty"], "")
    module.show_note("data a.csv: 2 row(s): empty")
    assert "data a.csv" in caplog.text and len(shown) == 1


def test_cell_content_cannot_break_a_table() -> None:
    assert cell("a|b\n<i>\\") == "a\\|b &lt;i>\\\\"
    report = DataReport(
        url="rows.jsonl",
        schema_name="chat",
        digest="d",
        rows=3,
        bad_rows=1,
        duplicates=0,
        characters=9,
        first_errors=[BadRow(where="rows.jsonl:2", error="bad | worse")],
        quarantine="quarantine/q.jsonl",
    )
    page = data_page("held_out", report)
    assert page.startswith("## held_out: `rows.jsonl`") and "| good rows | 3 |" in page
    assert page.endswith("| rows.jsonl:2 | 1 | bad \\| worse |")

"""A pipeline's steps in a tracker: each once, even in a continued run. A failing tracker never stops training."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.exceptions import Pause
from pydantic import ValidationError
from tests.logged import logged_by

from tinkerflow.backend.tracking.trackers.tensorboard import _summaries
from tinkerflow.tasks.pipelines import tracked as module
from tinkerflow.tasks.pipelines.control import StoppedError
from tinkerflow.tasks.pipelines.parameters import SftParameters
from tinkerflow.tasks.pipelines.progress import SegmentRecord, StepMetrics
from tinkerflow.tasks.pipelines.tracked import tracked


def made(step: int, loss: float = 0.0) -> StepMetrics:
    return StepMetrics(step=step, values={"loss": loss or step / 4, "kl": float("nan")})


def segment(first: int, last: int) -> SegmentRecord:
    steps = [made(step) for step in range(first, last + 1)]
    return SegmentRecord(first_step=first, last_step=last, state="s", steps=steps, held_out={"held_out_loss": 0.5})


def run(**given: Any) -> Any:
    parameters = SftParameters.model_validate({"data": {"url": "rows.jsonl"}, "name": "lesson", **given})
    return SimpleNamespace(pipeline="sft", parameters=parameters, model=SimpleNamespace(name="tiny"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TINKERFLOW_TRACKING_DIR", str(tmp_path))
    return tmp_path / "tensorboard/sft/night-1"


def shown(files: Sequence[Path]) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for file in files:
        for event in _summaries(file):
            for value in event.summary.value:
                if not value.HasField("tensor"):
                    found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


async def test_continued_run_shows_each_step_once(folder: Path) -> None:
    one = run(tracking="tensorboard", training={"steps": 5})
    with pytest.raises(StoppedError):
        async with tracked(one, "night-1", []) as steps:
            for step in (1, 2):
                steps.add([made(step)])
            steps.add_segment(segment(1, 2))
            steps.add([made(3)])
            raise StoppedError
    async with tracked(one, "night-1", [segment(1, 2)]) as steps:
        steps.add([made(3, loss=9.0)])  # made again, because no segment contains it
        steps.add([made(4)])
    files = sorted(folder.glob("*.tfevents.*"))
    assert len(files) == 2
    assert shown(files) == {"loss": [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)], "held_out_loss": [(2, 0.5)]}
    text = next(iter(_summaries(files[0]))).summary.value[0].tensor.string_val[0].decode()
    assert "| name | lesson night-1 |" in text and "| training.steps | 5 |" in text and "| data.url |" in text


async def test_failing_tracker_is_retried_and_never_stops_training(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.parent.mkdir(parents=True)
    folder.write_text("no folder")
    monkeypatch.setattr(module, "_CLOSE_SECONDS", 0.2)
    async with tracked(run(tracking=["tensorboard"]), "night-1", []) as steps:
        steps.add([made(1)])
    said = [record.getMessage() for record in logged_by(caplog, module)]
    assert len(said) == 2 and "FileExistsError" in said[0] and "has not stored all values" in said[1]
    folder.unlink()
    monkeypatch.setattr(module, "_CLOSE_SECONDS", 60.0)
    steps.close("finished")  # the tracker's thread continues meanwhile
    assert shown(sorted(folder.glob("*.tfevents.*"))) == {"loss": [(1, 0.25)]}


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (StoppedError("stopped"), "unfinished"),
        (Pause("suspended"), "unfinished"),
        (asyncio.CancelledError(), "unfinished"),
        (KeyError("broken"), "failed"),
    ],
)
async def test_only_an_error_is_shown_as_a_failure(
    error: BaseException, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    monkeypatch.setattr(module.TrackedSteps, "close", lambda self, outcome: shown.append(outcome))
    with pytest.raises(type(error)):
        async with tracked(run(), "night-1", []):
            raise error
    assert shown == [outcome]


async def test_run_without_trackers_writes_nothing(folder: Path) -> None:
    async with tracked(run(), "night-1", []) as steps:
        steps.add([made(1)])
    assert not folder.exists()


def test_a_tracker_is_checked_with_the_other_parameters() -> None:
    assert run(tracking="tensorboard").parameters.tracking == ["tensorboard"]
    with pytest.raises(ValidationError, match=r"'tensorbord': must be one of .*did you mean 'tensorboard'"):
        run(tracking=["tensorbord"])

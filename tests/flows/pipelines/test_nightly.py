"""Decisions of `nightly`, with a fake training and fake scores. tests/e2e/test_nightly.py trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tinkerflow.flows.pipelines import nightly as pipeline
from tinkerflow.flows.pipelines.fine_tuning import TrainingResult
from tinkerflow.flows.pipelines.nightly import NightlyParameters, NightlyResult, nightly
from tinkerflow.tasks.pipelines.artifacts import RunArtifacts
from tinkerflow.tasks.pipelines.champions import champion
from tinkerflow.tasks.pipelines.parameters import EvaluateParameters
from tinkerflow.tasks.pipelines.scoring import Scores


class KilledError(BaseException):
    """The process of the run is killed."""


class Nights:
    """Runs of `nightly`, whose losses are given by the path of the weights."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.rows = {"url": str(folder / "rows.jsonl")}
        (folder / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
        self.exported, self.losses = "", {"": 9.0}
        self.killed, self.asked = False, 0
        self.reports: list[str] = []
        for name, fake in (
            ("fine_tune", self.fine_tune), ("score_all", self.score_all), ("promote", pipeline.promote.fn),
            ("check_readable", self.check_readable), ("_approved", self.approved),
        ):  # fmt: skip
            monkeypatch.setattr(pipeline, name, fake)
        monkeypatch.setattr(RunArtifacts, "text", self.text)

    async def night(self, run: str, exported: str, **changes: Any) -> NightlyResult:
        self.exported = exported
        work = {"work": self.folder.as_uri(), "data": self.rows, "held_out": self.rows}
        values = work | {"champion": "best", "resume": run} | changes
        found = await nightly.fn(NightlyParameters.model_validate(values))
        assert isinstance(found, NightlyResult)
        return found

    async def fine_tune(self, parameters: NightlyParameters) -> TrainingResult:
        return TrainingResult(
            run=parameters.resume, data="d", state="s", weights=self.exported, steps=1, first={}, last={}, held_out={},
            samples=[],
        )  # fmt: skip

    async def score_all(self, wanted: EvaluateParameters, candidates: dict[str, str]) -> dict[str, Scores]:
        return {name: Scores(rows=1, samples=[], loss=self.losses[path]) for name, path in candidates.items()}

    async def check_readable(self, *_: object) -> None:
        pass

    async def approved(self, *_: object) -> tuple[bool, str]:
        self.asked += 1
        return True, ""

    async def text(self, kind: str, markdown: str, title: str) -> None:
        if self.killed:
            raise KilledError
        self.reports.append(markdown)


async def test_run_that_was_killed_after_its_promotion_is_promoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nights = Nights(tmp_path, monkeypatch)
    nights.losses |= {"first": 3.0, "second": 2.0, "second again": 2.0}
    await nights.night("monday", "first")
    nights.killed = True
    with pytest.raises(KilledError):
        await nights.night("tuesday", "second", approval_hours=1)
    nights.killed = False
    found = await nights.night("tuesday", "second again", approval_hours=1)
    assert (found.outcome, found.weights, nights.asked) == ("promoted", "second", 1)
    assert {name: scores.loss for name, scores in found.scores.items()} == {
        "new": 2.0, "champion": 3.0, "base model": 9.0,
    }  # fmt: skip
    assert "promoted: loss 2 against 3" in nights.reports[-1]
    assert "| before | 1 | `first` |" in nights.reports[-1] and "| now | 2 | `second` |" in nights.reports[-1]
    best = champion(tmp_path.as_uri(), "best")
    assert best is not None and (best.number, best.run) == (2, "tuesday")
    nights.losses["third"] = 2.5
    found = await nights.night("wednesday", "third")
    assert (found.outcome, found.weights) == ("kept", "third")

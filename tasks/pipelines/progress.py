"""The record of a training run: the finished segments, and the saved state of each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, TypeAlias

import orjson
from pydantic import BaseModel, BeforeValidator

from tinkerflow.backend.catalog.champions import checked_name
from tinkerflow.backend.core.errors import ServerError, UserError
from tinkerflow.tasks.pipelines.work import create_json, create_once, open_work, read_json

# JSON has no NaN and no infinity, so a record contains null for both. Both are read as NaN.
_Value: TypeAlias = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
RecordedValues: TypeAlias = dict[str, _Value]


class StepMetrics(BaseModel):
    """An optimizer step, counted from 1. values: `loss`, `learning_rate`, `grad_norm` and the pipeline's metrics."""

    step: int
    values: RecordedValues


class Sample(BaseModel):
    """The model's answer to a prompt. wanted: the expected answer; empty if the row has none. reward: if any."""

    prompt: str
    answer: str
    wanted: str = ""
    reward: float | None = None

    @property
    def rated(self) -> str:
        """The answer, with its reward if it has one."""
        return self.answer if self.reward is None else f"{self.answer} (reward {self.reward:.4g})"


class LeftOutRow(BaseModel):
    """A row that spoiled a step (outliers.py). step: the first step without it. row: its index in the data."""

    step: int
    row: int


class SegmentRecord(BaseModel):
    """The finished and saved steps first_step..last_step. state: the training checkpoint after last_step.

    left_out: the rows that the segment and all later ones leave out.
    """

    first_step: int
    last_step: int
    state: str
    steps: list[StepMetrics]
    held_out: RecordedValues = {}
    samples: list[Sample] = []
    left_out: list[LeftOutRow] = []


class RunProgress:
    """The segments of one run of one pipeline, in the work folder.

    A segment is written once, after its state is saved, under the number of its first step, or of its last one by
    earlier releases. If two processes continue the same run, one of them gets a UserError and stops.
    """

    def __init__(self, work_url: str, run: str, plan: str, parameters: Mapping[str, object] | None = None) -> None:
        """Open the record of a run.

        run: the name that retries share. plan: digest of everything that determines the outcome. parameters: the plan's
        parameters by name, for the error if they differ. UserError: the run was begun with another plan, so its steps
        would not fit.
        """
        self._work = open_work(work_url)
        self._folder = f"progress/{checked_name('run', run)}"
        own = orjson.dumps(parameters or {})
        create_once(self._work, f"{self._folder}/parameters.json", own)
        try:
            create_json(self._work, f"{self._folder}/plan.json", {"plan": plan})
        except FileExistsError:
            raise _refusal(run, _changes(_parameters(work_url, run), orjson.loads(own))) from None

    def segments(self) -> list[SegmentRecord]:
        """The finished segments, in order of steps. ServerError: a segment is missing."""
        names = sorted(self._work.children(f"{self._folder}/segments"))
        found = [self._segment(name) for name in names]
        expected = 1
        for segment in found:
            if segment.first_step != expected:
                raise ServerError(f"{self._folder}: the segment that begins with step {expected} is missing")
            expected = segment.last_step + 1
        return found

    def add(self, segment: SegmentRecord) -> None:
        """Record the next segment. UserError: another process has already recorded it."""
        names = sorted(self._work.children(f"{self._folder}/segments"))
        before = self._segment(names[-1]).last_step if names else 0
        made = f"{self._folder}: step {segment.first_step} was made by another process meanwhile"
        if segment.first_step != before + 1:
            raise UserError(made)
        key = f"{self._folder}/segments/{segment.first_step:08d}.json"
        try:
            create_json(self._work, key, segment.model_dump(mode="json"))
        except FileExistsError:
            raise UserError(made) from None

    def _segment(self, name: str) -> SegmentRecord:
        return SegmentRecord.model_validate(read_json(self._work, f"{self._folder}/segments/{name}"))

    def kept(self, name: str) -> bytes | None:
        """The bytes that a process of this run stored under `name`, or None."""
        try:
            return self._work.read(f"{self._folder}/kept/{name}")
        except FileNotFoundError:
            return None

    def keep(self, name: str, data: bytes) -> bytes:
        """Store bytes that all processes of this run use. Returns the bytes of the first process that stored some."""
        create_once(self._work, f"{self._folder}/kept/{name}", data)
        return self._work.read(f"{self._folder}/kept/{name}")


def refuse_changes(work_url: str, run: str, parameters: Mapping[str, object], resume: str) -> None:
    """Raise UserError if a run was begun with another value of one of these parameters.

    resume: the name that people gave the run.
    """
    before = _parameters(work_url, run)
    now = {name: value for name, value in orjson.loads(orjson.dumps(parameters)).items() if name in before}
    if changed := _changes({name: before[name] for name in now}, now):
        raise _refusal(resume, changed)


def _parameters(work_url: str, run: str) -> dict[str, object]:
    """The parameters that a run was begun with."""
    return read_json(open_work(work_url), f"progress/{run}/parameters.json") or {}


def _changes(before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    return [
        f"{name} was {before.get(name)!r} and is {now.get(name)!r}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    ]


def _refusal(run: str, changed: Sequence[str]) -> UserError:
    facts = f" ({', '.join(changed)})" if changed else ""
    return UserError(
        f"resume {run!r}: this run was started with different parameters or data{facts}; give it another name"
    )

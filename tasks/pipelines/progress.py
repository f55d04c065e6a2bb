"""The record of a segmented training: what is done, and the saved state from which it goes on."""

from __future__ import annotations

from pydantic import BaseModel

from tinkerflow.backend.errors import ServerError, UserError
from tinkerflow.tasks.pipelines.work import checked_name, create_json, create_once, open_work, read_json


class StepMetrics(BaseModel):
    """One optimizer step (counted from 1). values: `loss`, `learning_rate`, `grad_norm`, and what the pipeline adds."""

    step: int
    values: dict[str, float]


class Sample(BaseModel):
    """What the model answered."""

    prompt: str
    answer: str
    wanted: str = ""


class SegmentRecord(BaseModel):
    """Steps first_step..last_step, done and saved. state: the training checkpoint after the last of them."""

    first_step: int
    last_step: int
    state: str
    steps: list[StepMetrics]
    held_out: dict[str, float] = {}
    samples: list[Sample] = []


class RunProgress:
    """The segments of one run of one pipeline, in the work folder.

    A segment is written when its state is saved, under the number of its last step, once: of two processes that both
    believe to be this run, one gets a UserError and stops.
    """

    def __init__(self, work_url: str, run: str, plan: str) -> None:
        """`run`: the name that a retry shares. `plan`: digest of all that decides the outcome.

        UserError when the run was begun with another plan: its steps would not fit.
        """
        self._work = open_work(work_url)
        self._folder = f"progress/{checked_name('run', run)}"
        try:
            create_json(self._work, f"{self._folder}/plan.json", {"plan": plan})
        except FileExistsError:
            raise UserError(
                f"resume {run!r}: this run was begun with other parameters or data; give it another name"
            ) from None

    def segments(self) -> list[SegmentRecord]:
        """What is done, in order of steps. ServerError when a piece is missing."""
        names = sorted(self._work.children(f"{self._folder}/segments"))
        found = [
            SegmentRecord.model_validate(read_json(self._work, f"{self._folder}/segments/{name}")) for name in names
        ]
        expected = 1
        for segment in found:
            if segment.first_step != expected:
                raise ServerError(f"{self._folder}: the segment that begins with step {expected} is missing")
            expected = segment.last_step + 1
        return found

    def add(self, segment: SegmentRecord) -> None:
        """Record a segment that follows the last one; UserError when another process has gone on from there, too."""
        done = self.segments()
        if segment.first_step != (done[-1].last_step + 1 if done else 1):
            raise UserError(f"{self._folder}: step {segment.first_step} was made by another process meanwhile")
        try:
            create_json(
                self._work, f"{self._folder}/segments/{segment.last_step:08d}.json", segment.model_dump(mode="json")
            )
        except FileExistsError:
            raise UserError(f"{self._folder}: step {segment.last_step} was made by another process meanwhile") from None

    def kept(self, name: str) -> bytes | None:
        """What a process of this run has kept under `name`, None when none has."""
        try:
            return self._work.read(f"{self._folder}/kept/{name}")
        except FileNotFoundError:
            return None

    def keep(self, name: str, data: bytes) -> bytes:
        """Keep what all processes of this run shall use alike: what is kept now, the first one's when there are two."""
        create_once(self._work, f"{self._folder}/kept/{name}", data)
        return self._work.read(f"{self._folder}/kept/{name}")

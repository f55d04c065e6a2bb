"""Rollouts of training runs, for people: pipelines write them to their work folder, and the console reads them.

    rollouts/<training run>/<step>.json        conversations that a step learned from
    evaluations/<training run>/<number>.json   conversations of an evaluation of the run's weights, numbered from 1

An object is written once. The newest FULL objects of a run are kept, and every EVERY-th older object. An object has at
most MOST_BYTES. If it is too large, token probabilities are left out first, then whole groups.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime
from typing import Literal

from pydantic import BaseModel

from tinkerflow.backend.catalog.champions import checked_name
from tinkerflow.backend.core.errors import ServerError
from tinkerflow.backend.store.blobs import Blobs

FULL, EVERY = 50, 10
MOST_BYTES = 2**20  # of a step
MOST_TEXT = 20_000  # characters of a message
MOST_TOKENS = 4096  # of an answer, whose probabilities are kept
MOST_DROPPED = 200  # conversations of a step
Kind = Literal["rollouts", "evaluations"]


class RolloutMessage(BaseModel):
    """A message. tokens, logprobs: the sampled tokens of a model's answer, and their log probabilities."""

    role: str
    text: str
    name: str = ""
    tokens: list[int] = []
    logprobs: list[float] = []


class RolloutSample(BaseModel):
    """A conversation after its prompt. reward: None without rewards. parts: the reward's parts, by name.

    length: number of sampled tokens. attempt: how many earlier attempts at this conversation were interrupted.
    """

    reward: float | None
    parts: dict[str, float] = {}
    advantage: float
    length: int
    attempt: int = 0
    messages: list[RolloutMessage]

    @property
    def turns(self) -> int:
        """The number of the model's answers."""
        return sum(message.role == "assistant" for message in self.messages)

    @property
    def tools(self) -> list[str]:
        """The tools that answered, in order."""
        return [message.name or "tool" for message in self.messages if message.role == "tool"]


class RolloutGroup(BaseModel):
    """The conversations that begin with the same prompt."""

    prompt: list[RolloutMessage]
    samples: list[RolloutSample]


class DroppedRollout(BaseModel):
    """A conversation or group that the step did not learn from. fate: the outcome. reason: why."""

    prompt: str
    fate: str
    reason: str


class EvaluationFacts(BaseModel):
    """An evaluation of weights by a reward. name: the name of its line of runs. weights: a tinker:// path.

    judge: the reward or environment. reward, reward_error, parts, rows, answers: as in the scores of `evaluate`.
    """

    name: str
    weights: str
    judge: str
    data: str
    reward: float
    reward_error: float | None = None
    parts: dict[str, float] = {}
    rows: int
    answers: int
    evaluated_at: datetime


class StepRollouts(BaseModel):
    """The rollouts of one step or evaluation, counted from 1. staleness: age of the sampled weights in steps.

    left_off: groups that the limit of bytes left out. more_dropped: entries of `dropped` beyond MOST_DROPPED.
    evaluation: None for a step of training.
    """

    step: int
    staleness: int = 0
    evaluation: EvaluationFacts | None = None
    groups: list[RolloutGroup]
    dropped: list[DroppedRollout] = []
    left_off: int = 0
    more_dropped: int = 0


def write_rollouts(work: Blobs, run_id: str, rollouts: StepRollouts) -> None:
    """Write a step unless it exists, and remove an older step that need not be kept. OSError: no access."""
    with suppress(FileExistsError):
        _write(work, "rollouts", run_id, rollouts)


def write_evaluation(work: Blobs, run_id: str, rollouts: StepRollouts) -> int:
    """Write an evaluation of a run's weights under the next number. Returns the number. OSError: no access."""
    while True:
        number = max(numbers_of(work, "evaluations", run_id), default=0) + 1
        with suppress(FileExistsError):  # another evaluation has ended meanwhile
            _write(work, "evaluations", run_id, rollouts.model_copy(update={"step": number}))
            return number


def _write(work: Blobs, kind: Kind, run_id: str, rollouts: StepRollouts) -> None:
    work.create(_key(kind, run_id, rollouts.step), bounded(rollouts).model_dump_json(exclude_defaults=True).encode())
    old = rollouts.step - FULL
    if old > 0 and old % EVERY:
        work.remove(_key(kind, run_id, old))


def numbers_of(work: Blobs, kind: Kind, run_id: str) -> list[int]:
    """The steps of a training run that have rollouts, or the numbers of its evaluations, in order."""
    names = (name.removesuffix(".json") for name in work.children(rollouts_folder(kind, run_id)))
    return sorted(int(name) for name in names if name.isascii() and name.isdecimal())


def read_rollouts(work: Blobs, kind: Kind, run_id: str, number: int) -> StepRollouts:
    """The rollouts of a step or evaluation. FileNotFoundError: there are none. ServerError: the object is damaged."""
    key = _key(kind, run_id, number)
    if (size := work.size(key)) > 2 * MOST_BYTES:
        raise ServerError(f"{key}: it has {size} bytes: must have at most {2 * MOST_BYTES}")
    try:
        return StepRollouts.model_validate_json(work.read(key))
    except ValueError as error:
        raise ServerError(f"{key}: it is damaged: {error}") from error


def bounded(rollouts: StepRollouts) -> StepRollouts:
    """The rollouts within MOST_BYTES. Groups keep their token probabilities, or are kept at all, only if they fit."""
    kept, room = [], MOST_BYTES
    for group in rollouts.groups:
        for one in (group, _without_tokens(group)):
            if (size := len(one.model_dump_json(exclude_defaults=True).encode())) <= room:
                kept.append(one)
                room -= size
                break
    dropped = rollouts.dropped[:MOST_DROPPED]
    left_off, more = len(rollouts.groups) - len(kept), len(rollouts.dropped) - len(dropped)
    return rollouts.model_copy(update={"groups": kept, "dropped": dropped, "left_off": left_off, "more_dropped": more})


def _without_tokens(group: RolloutGroup) -> RolloutGroup:
    def without(sample: RolloutSample) -> RolloutSample:
        messages = [message.model_copy(update={"tokens": [], "logprobs": []}) for message in sample.messages]
        return sample.model_copy(update={"messages": messages})

    return group.model_copy(update={"samples": [without(sample) for sample in group.samples]})


def rollouts_folder(kind: Kind, run_id: str) -> str:
    """The folder of a training run's rollouts or evaluations in the work folder."""
    return f"{kind}/{checked_name('run', run_id.replace(':', '.'))}"


def _key(kind: Kind, run_id: str, number: int) -> str:
    return f"{rollouts_folder(kind, run_id)}/{number:08d}.json"

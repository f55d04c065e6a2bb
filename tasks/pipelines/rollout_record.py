"""The rollouts of a step as people see them on the page of their training run."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from tinkerflow.backend.catalog.rollouts import (
    MOST_TEXT,
    MOST_TOKENS,
    DroppedRollout,
    EvaluationFacts,
    RolloutGroup,
    RolloutMessage,
    RolloutSample,
    StepRollouts,
    write_evaluation,
    write_rollouts,
)
from tinkerflow.tasks.pipelines.rollouts import Episode, Lost, SampledTurn
from tinkerflow.tasks.pipelines.row_errors import shorten
from tinkerflow.tasks.pipelines.rows import Message
from tinkerflow.tasks.pipelines.work import open_work

log = logging.getLogger(__name__)


def record_rollouts(work_url: str, run_id: str, rollouts: StepRollouts) -> None:
    """Write the rollouts of a step. A failure is logged, and training continues without them."""
    try:
        write_rollouts(open_work(work_url), run_id, rollouts)
    except (OSError, ValueError) as error:
        log.warning("the rollouts of step %d were not written: %s: %s", rollouts.step, type(error).__name__, error)


def record_evaluation(work_url: str, rollouts: StepRollouts, facts: EvaluationFacts) -> str:
    """Write the conversations of an evaluation for a page of the run that saved the weights.

    Returns the path of the page below /training_runs, or "" after a failure, which is logged.
    """
    run_id = facts.weights.removeprefix("tinker://").partition("/")[0]
    try:
        number = write_evaluation(open_work(work_url), run_id, rollouts.model_copy(update={"evaluation": facts}))
    except (OSError, ValueError) as error:
        log.warning("the answers of %s were not written: %s: %s", facts.weights, type(error).__name__, error)
        return ""
    return f"{run_id}/evaluations?number={number}"


def group_of(episodes: Sequence[Episode], advantages: npt.NDArray[np.float64], *, rewarded: bool) -> RolloutGroup:
    """A group as people see it. advantages: one for each episode. rewarded: whether episodes have rewards."""
    prompt = [_message(message) for message in episodes[0].messages[: episodes[0].answered[0]]]
    samples = [
        RolloutSample(
            reward=episode.reward if rewarded else None,
            parts=episode.parts,
            advantage=float(advantage),
            length=sum(len(turn.answer) for turn in episode.turns),
            attempt=episode.attempt,
            messages=list(_answered(episode)),
        )
        for episode, advantage in zip(episodes, advantages, strict=True)
    ]
    return RolloutGroup(prompt=prompt, samples=samples)


def dropped_of(lost: Iterable[Lost], replaced: Iterable[Sequence[Episode]]) -> list[DroppedRollout]:
    """The conversations that a step did not learn from. replaced: groups that were replaced by others."""
    found = [
        DroppedRollout(prompt=one.prompt, fate="restarted" if one.repeated else "left out", reason=one.reason)
        for one in lost
    ]
    for group in replaced:
        prompt = shorten(str(group[0].messages[group[0].answered[0] - 1]["content"]))
        reason = f"all {len(group)} rewards are {group[0].reward:g}"
        found.append(DroppedRollout(prompt=prompt, fate="group replaced", reason=reason))
    return found


def _answered(episode: Episode) -> Iterator[RolloutMessage]:
    """The messages after the prompt. Answers contain the tokens of their turns."""
    turns = dict(zip(episode.answered, episode.turns, strict=True))
    for place in range(episode.answered[0], len(episode.messages)):
        yield _message(episode.messages[place], turns.get(place))


def _message(message: Message, turn: SampledTurn | None = None) -> RolloutMessage:
    content = str(message.get("content") or "")
    text = content if len(content) <= MOST_TEXT else f"{content[:MOST_TEXT]}…"
    shown = RolloutMessage(role=message["role"], text=text, name=str(message.get("name") or ""))
    if turn is not None:
        logprobs = np.nan_to_num(turn.logprobs[:MOST_TOKENS], nan=-100.0, neginf=-100.0)
        shown.tokens = [int(token) for token in turn.answer[:MOST_TOKENS]]
        shown.logprobs = np.round(logprobs, 3).tolist()
    return shown

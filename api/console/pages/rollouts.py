"""`/training_runs/{run_id}/rollouts`: the conversations that a step learned from or dropped, by group.

`/training_runs/{run_id}/evaluations`: the conversations from evaluations of the run's weights by a reward.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Literal

from fastapi import Depends, Query
from fastapi.responses import Response

from tinkerflow.api.console.samples import tokenizer_of
from tinkerflow.api.console.visit import Visit, Visiting, page_router, record
from tinkerflow.api.endpoints.targets import work_folder
from tinkerflow.api.text import Detokenizer, Tokenizer
from tinkerflow.backend.catalog.rollouts import (
    Kind,
    RolloutMessage,
    RolloutSample,
    StepRollouts,
    numbers_of,
    read_rollouts,
    rollouts_folder,
)
from tinkerflow.backend.core.errors import NotFoundError, UserError
from tinkerflow.backend.journal import AuditedEvent

_SHADES = (0.05, 0.3, 0.7)  # the highest probability for each shade; the first shade is the strongest
_ORDERS: dict[str, Callable[[RolloutSample], float]] = {
    "best": lambda sample: -(sample.reward or 0.0),
    "worst": lambda sample: sample.reward or 0.0,
    "sampled": lambda sample: 0.0,
}
router = page_router()


@dataclass(frozen=True)
class Wanted:
    """The form's choices: a number (None: the newest), a text to find, bounds of the reward, and the order of samples.

    chances: whether to shade tokens by their probabilities.
    """

    number: int | None
    find: str
    low: float | None
    high: float | None
    order: str
    chances: bool

    def takes(self, prompt: Sequence[RolloutMessage], sample: RolloutSample) -> bool:
        reward = sample.reward or 0.0
        if (self.low is not None and reward < self.low) or (self.high is not None and reward > self.high):
            return False
        find = self.find.casefold()
        return not find or any(find in message.text.casefold() for message in (*prompt, *sample.messages))


def wanted(
    step: str = "",
    number: str = "",
    find: Annotated[str, Query(max_length=1000)] = "",
    low: str = "",
    high: str = "",
    order: Literal["best", "worst", "sampled"] = "best",
    chances: str = "",
) -> Wanted:
    """The choices in a page's URL.

    step, number: the number of a step or of an evaluation; "" is the newest. find: a text in the prompt or the sample.
    low, high: bounds of the reward, or "". order: of the samples in a group. chances: shade tokens by their
    probabilities.
    """
    which = _number("number", number) if number else _number("step", step)
    bounds = _number("low", low), _number("high", high)
    return Wanted(None if which is None else int(which), find, *bounds, order, bool(chances))


AsWanted = Annotated[Wanted, Depends(wanted)]


@router.get("/training_runs/{run_id}/rollouts")
async def rollouts_page(run_id: str, visit: Visiting, wanted: AsWanted) -> Response:
    return await _page("rollouts", run_id, visit, wanted)


@router.get("/training_runs/{run_id}/evaluations")
async def evaluations_page(run_id: str, visit: Visiting, wanted: AsWanted) -> Response:
    """The conversations of an evaluation that uses a reward."""
    return await _page("evaluations", run_id, visit, wanted)


async def _page(kind: Kind, run_id: str, visit: Visit, wanted: Wanted) -> Response:
    run = await asyncio.to_thread(visit.journal.models.get, run_id, visit.owner)
    numbers, found = await asyncio.to_thread(_read, visit, kind, run.id, wanted.number)
    if found is not None and run.owner != visit.identity.owner:
        seen = [f"{run.id}/{kind}/{found.step}"]
        await record(visit.call.services, AuditedEvent.PROJECT_SAMPLE_READ, visit.identity, run.owner, samples=seen)
    tokenizer = await tokenizer_of(visit, run.base_model) if wanted.chances else None
    groups = [] if found is None else await asyncio.to_thread(_groups, found, wanted, tokenizer)
    url = visit.call.services.settings.pipelines_url
    where = {"work": url, "searched": f"{url}/{rollouts_folder(kind, run.id)}"}
    return visit.page("rollouts.html", **where, kind=kind, run=run, numbers=numbers, found=found, wanted=wanted,
                      groups=groups, shaded=tokenizer is not None)  # fmt: skip


def _read(visit: Visit, kind: Kind, run_id: str, number: int | None) -> tuple[list[int], StepRollouts | None]:
    """The available numbers, and the rollouts of one. NotFoundError: `number` is not available."""
    with work_folder(visit.call) as work:
        numbers = numbers_of(work, kind, run_id)
        if number is None and not numbers:
            return numbers, None
        wanted = numbers[-1] if number is None else number
        if wanted in numbers:
            with suppress(FileNotFoundError):  # a pipeline or a person removed them meanwhile
                return numbers, read_rollouts(work, kind, run_id, wanted)
    missing = f"step {wanted:g} of training run {run_id!r} has no rollouts"
    raise NotFoundError(
        missing if kind == "rollouts" else f"training run {run_id!r} has no evaluation number {wanted:g}"
    )


Piece = tuple[str, str, str]  # text, shade and title of some tokens
Shown = tuple[int, RolloutSample, list[tuple[RolloutMessage, list[Piece]]]]


@dataclass(frozen=True)
class RolloutGroupView:
    """A group with its wanted samples. mean, deviation: of all rewards in the group, None if there are none."""

    prompt: Sequence[RolloutMessage]
    samples: Sequence[Shown]
    mean: float | None
    deviation: float | None


def _groups(found: StepRollouts, wanted: Wanted, tokenizer: Tokenizer | None) -> list[RolloutGroupView]:
    """The groups with their wanted samples: each sample's number in its group, and its messages cut into pieces."""
    groups = []
    for group in found.groups:
        numbered = [(n, one) for n, one in enumerate(group.samples, 1) if wanted.takes(group.prompt, one)]
        numbered.sort(key=lambda one: _ORDERS[wanted.order](one[1]))
        if numbered:
            shown = [(n, one, [(m, _pieces(m, tokenizer)) for m in one.messages]) for n, one in numbered]
            rewards = [one.reward for one in group.samples if one.reward is not None]
            of_all = (statistics.fmean(rewards), statistics.pstdev(rewards)) if rewards else (None, None)
            groups.append(RolloutGroupView(group.prompt, shown, *of_all))
    return groups


def _pieces(message: RolloutMessage, tokenizer: Tokenizer | None) -> list[Piece]:
    """The text in pieces of one token, or of several that form one character; [] if probabilities are not shown."""
    if tokenizer is None:
        return []
    reader, pieces, lowest = Detokenizer(tokenizer, special=True), list[Piece](), 1.0

    def piece(text: str) -> Piece:
        shade = next((f"shade-{n}" for n, most in enumerate(_SHADES) if lowest <= most), "")
        return text, shade, f"{100 * lowest:.3g} %"

    for token, logprob in zip(message.tokens, message.logprobs, strict=False):
        chance = min(1.0, math.exp(min(0.0, logprob)))
        lowest = min(lowest, chance)
        if text := reader.feed([token]):
            pieces.append(piece(text))
            lowest = 1.0
    if rest := reader.finish():
        pieces.append(piece(rest))
    return pieces


def _number(field: str, value: str) -> float | None:
    try:
        number = float(value) if value.strip() else None
    except ValueError:
        number = math.nan
    if number is not None and not math.isfinite(number):
        raise UserError(f"{field} {value!r}: must be a number, or empty")
    return number

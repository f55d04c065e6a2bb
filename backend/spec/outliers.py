"""Steps with an unusual gradient norm, and the rows of data that made them so."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median, median_low

_USUAL_STEPS = 50  # whose gradient norms are the usual ones
_FEWEST_STEPS = 10  # before any norm is unusual
_UNUSUAL = 4  # times the median
MOST_ROWS = 20  # of an examined step that are kept, the worst
MOST_REPEATED = 1000  # repetitions of a row that are kept
_SHOWN = 5  # of these
MOST_TOKENS = 5  # of a row that are shown, the least likely


class UsualNorms:
    """The gradient norms of the last usual steps of a run."""

    def __init__(self) -> None:
        """No step was made yet."""
        self._norms: deque[float] = deque(maxlen=_USUAL_STEPS)

    @property
    def median(self) -> float:
        """Of the last 50 usual norms; infinite before there are ten."""
        return median(self._norms) if len(self._norms) >= _FEWEST_STEPS else math.inf

    def unusual(self, norm: float) -> bool:
        """Whether a norm is not finite, or over four times the median."""
        return not math.isfinite(norm) or norm > _UNUSUAL * self.median

    def add(self, norm: float) -> None:
        """Count the norm of a step, unless it is unusual."""
        if not self.unusual(norm):
            self._norms.append(norm)


@dataclass(frozen=True)
class BlamedRow:
    """A row of a step, computed alone, from the state before the step.

    number: its place among the rows of the step. tokens: their number. loss: the sum over the tokens. grad_norm: of the
    row's gradients. loss and grad_norm are None if they are not finite. worst: position, target and logprob of its
    least likely weighted tokens. repeated: the numbers of later rows of the step that are equal to it.
    """

    number: int
    tokens: int
    loss: float | None
    grad_norm: float | None
    worst: tuple[tuple[int, int, float], ...] = ()
    repeated: tuple[int, ...] = ()

    @property
    def loss_per_token(self) -> float | None:
        """The loss as a mean over the tokens."""
        return None if self.loss is None else self.loss / max(self.tokens, 1)

    @property
    def part(self) -> float:
        """The norm of its part in the step: the gradients of equal rows add up."""
        return math.inf if self.grad_norm is None else self.grad_norm * (1 + len(self.repeated))

    @property
    def spoilers(self) -> tuple[int, ...]:
        """Numbers of the rows to leave out: its repetitions, or else the row itself."""
        return self.repeated or (self.number,)


def ranked(rows: Iterable[BlamedRow]) -> list[BlamedRow]:
    """The rows of a step by their part in its gradients, the largest first."""
    return sorted(rows, key=lambda row: (-row.part, row.number))


def for_pages(worst: Sequence[BlamedRow]) -> list[dict[str, object]]:
    """The rows that the pages of a run keep, as JSON for `POST …/blames`. worst: as `ranked`."""
    return [asdict(replace(row, repeated=row.repeated[:MOST_REPEATED])) for row in worst[:MOST_ROWS]]


def stands_out(row: BlamedRow, rows: Iterable[BlamedRow]) -> bool:
    """Whether a row's part is over four times the median of the step's rows, so that it may have spoiled the step."""
    return row.part > _UNUSUAL * median_low([other.part for other in rows])


def least_likely(
    targets: Sequence[int], logprobs: Sequence[float], weights: Sequence[float] | None, most: int = MOST_TOKENS
) -> tuple[tuple[int, int, float], ...]:
    """Position, target and logprob of the tokens with the lowest logprobs, among those with a weight.

    targets, logprobs, weights: one of each for every position; weights None: every token counts.
    """
    places = (place for place in range(len(targets)) if weights is None or weights[place])
    chosen = sorted(places, key=lambda place: (logprobs[place], place))[:most]
    return tuple((place, int(targets[place]), float(logprobs[place])) for place in chosen)


def remedy(run_id: str, step: int, row: BlamedRow) -> str:
    """The command that trains on from `step` without the row, or without its repetitions."""
    without = " ".join(f"--without {step}:{number}" for number in row.spoilers)
    return f"tinkerflow rerun {run_id} --from {step} {without}"


COLUMNS = ("row", "tokens", "loss per token", "gradient norm", "least likely tokens", "repeated")


def cells(row: BlamedRow, text: Callable[[int], str] | None = None) -> tuple[str, ...]:
    """The figures of a row as texts, one for each of COLUMNS. text: of a token; None: tokens are shown as numbers."""
    named = ((place, token if text is None else repr(text(token)), logprob) for place, token, logprob in row.worst)
    worst = ", ".join(f"{token} at {place}: {logprob:.2f}" for place, token, logprob in named)
    more = ", …" if len(row.repeated) > _SHOWN else ""
    repeated = f"{len(row.repeated)} times: " + ", ".join(map(str, row.repeated[:_SHOWN])) + more
    figures = ("not finite" if value is None else f"{value:.4g}" for value in (row.loss_per_token, row.grad_norm))
    return (str(row.number), str(row.tokens), *figures, worst, repeated if row.repeated else "")


def markdown_table(rows: Sequence[BlamedRow]) -> list[str]:
    """The lines of a table of rows."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *map(cells, rows)]
    return [f"| {' | '.join(line)} |" for line in lines]

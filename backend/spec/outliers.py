"""Detects steps outside the usual range of their run, and the rows of data that caused them.

One rule decides both: a figure is far from the others if it is more than 5 robust standard deviations above their
median. The deviation is 1.4826 times the median distance from the median (Rousseeuw and Croux, Alternatives to the
Median Absolute Deviation, 1993). All figures are logarithms, such as the nats of a token or the logarithm of a gradient
norm, and the deviation is at least a fifth of log 4. A far value is therefore also at least four times the median.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from statistics import median, median_low
from typing import Literal

_FAR = 5  # robust standard deviations
_LEAST = math.log(4) / _FAR  # the smallest robust standard deviation of logarithms
_USUAL_STEPS = 50  # most recent steps, which define the usual range
_FEWEST_STEPS = 10  # before any figure is unusual
MOST_ROWS = 20  # worst rows of an examined step that are kept
MOST_REPEATED = 1000  # repetitions of a row that are kept
_SHOWN = 5  # repetitions of a row that are shown
MOST_TOKENS = 5  # least likely tokens of a row that are shown


def _deviation(distances: Sequence[float]) -> float:
    """The robust standard deviation of figures with these distances from their median."""
    return max(1.4826 * median_low([abs(one) for one in distances]), _LEAST)


# ------------------------------------------------------------------ steps
class UsualRange:
    """A figure of the last steps of a run, and its trend."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=_USUAL_STEPS)

    @property
    def median(self) -> float:
        """The median of the last 50 values; infinite if there are fewer than ten."""
        return median(self._values) if len(self._values) >= _FEWEST_STEPS else math.inf

    def exceeded_by(self, value: float) -> bool:
        """Whether a value is far above the median, and above the trend, which may rise."""
        middle = self.median
        if not value > middle + _FAR * _LEAST:  # also true for NaN
            return False
        known = list(enumerate(self._values))
        # the trend is the Theil-Sen line, which is robust to a few outliers
        slope = median((b - a) / (j - i) for (i, a), (j, b) in combinations(known, 2))
        start = median(value - slope * i for i, value in known)
        usual = max(middle, start + slope * len(known))
        return value > usual + _FAR * _deviation([value - start - slope * i for i, value in known])

    def add(self, value: float) -> None:
        """Count the value of a step, if it is finite."""
        if math.isfinite(value):
            self._values.append(value)


class UsualSteps:
    """The gradient norms and the losses of the last steps of a run."""

    def __init__(self) -> None:
        self._norms, self._losses = UsualRange(), UsualRange()

    def unusual(self, norm: float, loss: float) -> str:
        """The reason why a step is unusual, or "" for a usual step.

        norm: the norm of the step's gradients. loss: a token's loss, in nats. The first ten steps are unusual only if
        the norm is not finite.
        """
        if not math.isfinite(norm):
            return f"the gradient norm is {norm:.4g}"
        if self._norms.exceeded_by(_log(norm)):
            usual = math.exp(self._norms.median)
            return f"the gradient norm is {norm:.4g}, and the median of the steps before is {usual:.4g}"
        if self._losses.exceeded_by(loss):
            return f"the loss is {loss:.4g}, and the median of the steps before is {self._losses.median:.4g}"
        return ""

    def add(self, norm: float, loss: float) -> None:
        """Count a step. Unusual steps also count, so that the range follows a lasting change."""
        self._norms.add(_log(norm))
        self._losses.add(loss)


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf if value <= 0 else value


# ------------------------------------------------------------------ rows
Reason = Literal["", "not finite", "repeated", "weight", "tokens", "logprob", "norm"]


@dataclass(frozen=True)
class BlamedRow:
    """A row of a step, computed alone from the state before the step.

    number: its place among the rows of the step. tokens: the number of tokens. loss: the sum over the tokens.
    grad_norm: the norm of the row's gradients. loss and grad_norm are None if they are not finite. worst: position,
    target and logprob of its least likely weighted tokens. repeated: the numbers of later rows of the step that are
    equal to it. surprise: the mean negative logprob of its weighted tokens. weight: the largest absolute weight or
    advantage of a token.
    gap: the largest distance between a token's logprob in the row and the trainer's. These three are None if they are
    unknown.

    `ranked` sets the other fields. share: the part of the row and its repetitions in the sum of the gradient norms of
    all rows. reason: the figure in which the row is farthest above the other rows; "" if it is far in none. score:
    robust standard deviations above the median.
    """

    number: int
    tokens: int
    loss: float | None
    grad_norm: float | None
    worst: tuple[tuple[int, int, float], ...] = ()
    repeated: tuple[int, ...] = ()
    surprise: float | None = None
    weight: float | None = None
    gap: float | None = None
    share: float = 0.0
    reason: Reason = ""
    score: float = 0.0

    @property
    def loss_per_token(self) -> float | None:
        """The mean loss over the tokens."""
        return None if self.loss is None else self.loss / max(self.tokens, 1)

    @property
    def copies(self) -> int:
        """How many times the step contains the row."""
        return 1 + len(self.repeated)

    @property
    def part(self) -> float:
        """The norm of its contribution to the step: the gradients of equal rows add up."""
        return math.inf if self.grad_norm is None else self.grad_norm * self.copies

    @property
    def spoilers(self) -> tuple[int, ...]:
        """Numbers of the rows to leave out: only the repetitions if being repeated is its only fault, else all."""
        return self.repeated if self.repeated and self.reason in ("repeated", "") else (self.number, *self.repeated)

    @property
    def explanation(self) -> str:
        """The reason in words, with the row's share of the step, or "" if the row is like the others."""
        words = {
            "not finite": "not finite",
            "repeated": f"repeated {self.copies} times",
            "weight": f"weight {self.weight or 0:.4g}",
            "tokens": f"unlikely tokens, {self.surprise or 0:.3g} nats each",
            "logprob": f"a logprob {self.gap or 0:.3g} from the trainer's",
            "norm": "large gradient norm",
        }
        part = f", {self.share:.1%} of the step" if self.share else ""
        return f"{words[self.reason]}{part}" if self.reason else ""


def ranked(rows: Iterable[BlamedRow]) -> list[BlamedRow]:
    """The rows of a step with their reasons: first rows unlike the others, then all others by their part in the step.

    Five figures of a row are compared with those of the other rows: the logarithms of its copies, of its largest weight
    and of its part in the step, the nats of its tokens, and the nats between its logprobs and the trainer's. A large
    part is the reason only if no other figure is far, because it is an effect.
    """
    rows = list(rows)
    whole = math.fsum(row.part for row in rows if row.grad_norm is not None)
    figures: dict[Reason, list[float]] = {
        "repeated": _scores([_log(row.copies) for row in rows]),
        "weight": _scores([_log(row.weight or 0) for row in rows]),
        "logprob": _scores([-math.inf if row.gap is None else row.gap for row in rows]),
        "tokens": _scores([-math.inf if row.surprise is None else row.surprise for row in rows]),
        "norm": _scores([-math.inf if row.grad_norm is None else _log(row.part) for row in rows]),
    }
    found = []
    for place, row in enumerate(rows):
        scores = {name: values[place] for name, values in figures.items()}
        far = [name for name, score in scores.items() if score > _FAR]
        causes = [name for name in far if name != "norm"] or far
        reason: Reason = "not finite" if row.grad_norm is None else max(causes, key=scores.__getitem__, default="")
        share = row.part / whole if whole and row.grad_norm is not None else 0.0
        found.append(replace(row, share=share, reason=reason, score=max(scores.values())))
    order = {"not finite": 0, "": 2}
    return sorted(
        found, key=lambda row: (order.get(row.reason, 1), -row.score if row.reason else 0.0, -row.part, row.number)
    )


def _scores(values: Sequence[float]) -> list[float]:
    """How many robust standard deviations each value is above the median; 0 for values that are not finite."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return [0.0] * len(values)
    middle = median_low(known)
    deviation = _deviation([value - middle for value in known])
    return [(value - middle) / deviation if math.isfinite(value) else 0.0 for value in values]


def for_pages(worst: Sequence[BlamedRow]) -> list[dict[str, object]]:
    """The rows that the pages of a run keep, as JSON for `POST …/blames`. worst: from `ranked`."""
    return [asdict(replace(row, repeated=row.repeated[:MOST_REPEATED])) for row in worst[:MOST_ROWS]]


def least_likely(
    targets: Sequence[int], logprobs: Sequence[float], weights: Sequence[float] | None, most: int = MOST_TOKENS
) -> tuple[tuple[int, int, float], ...]:
    """Position, target and logprob of the tokens with the lowest logprobs, among those with a weight.

    targets, logprobs, weights: one for each position; weights None: every token counts.
    """
    counted = (place for place in range(len(targets)) if weights is None or weights[place])
    places = [place for place in counted if math.isfinite(logprobs[place])]
    chosen = sorted(places, key=lambda place: (logprobs[place], place))[:most]
    return tuple((place, int(targets[place]), float(logprobs[place])) for place in chosen)


def examined(
    row: BlamedRow,
    targets: Sequence[int],
    logprobs: Sequence[float],
    weights: Sequence[float] | None = None,
    sampled: Sequence[float] | None = None,
) -> BlamedRow:
    """The row with the figures of its tokens. Each argument has one value for each position.

    targets: tokens. logprobs: the trainer's. weights: in the loss, or advantages; None: every token counts equally.
    sampled: the tokens' logprobs in the row, in reinforcement learning.
    """
    places = [place for place in range(len(targets)) if weights is None or weights[place]]
    nats = math.fsum(-logprobs[place] for place in places) / max(1, len(places))
    return replace(
        row,
        worst=least_likely(targets, logprobs, weights),
        surprise=_finite(nats),
        weight=_finite(max((abs(weights[place]) for place in places), default=0.0)) if weights else None,
        gap=_finite(max((abs(logprobs[p] - sampled[p]) for p in places), default=0.0)) if sampled else None,
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def remedy(run_id: str, step: int, row: BlamedRow) -> str:
    """The command that continues training from `step` without the row, or without its repetitions."""
    without = " ".join(f"--without {step}:{number}" for number in row.spoilers)
    return f"tinkerflow rerun {run_id} --from {step} {without}"


COLUMNS = ("row", "tokens", "loss per token", "gradient norm", "reason", "least likely tokens", "repeated")


def cells(row: BlamedRow, text: Callable[[int], str] | None = None) -> tuple[str, ...]:
    """The figures of a row as texts, one for each of COLUMNS. text: of a token; None: tokens are shown as numbers."""
    named = ((place, token if text is None else repr(text(token)), logprob) for place, token, logprob in row.worst)
    worst = ", ".join(f"{token} at {place}: {logprob:.2f}" for place, token, logprob in named)
    more = ", …" if len(row.repeated) > _SHOWN else ""
    repeated = f"{len(row.repeated)} times: " + ", ".join(map(str, row.repeated[:_SHOWN])) + more
    figures = ("not finite" if value is None else f"{value:.4g}" for value in (row.loss_per_token, row.grad_norm))
    return (
        str(row.number),
        str(row.tokens),
        *figures,
        row.explanation,
        worst,
        repeated if row.repeated else "",
    )


def markdown_table(rows: Sequence[BlamedRow]) -> list[str]:
    """The lines of a table of rows."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *map(cells, rows)]
    return [f"| {' | '.join(line)} |" for line in lines]

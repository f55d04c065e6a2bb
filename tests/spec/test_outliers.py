"""Detection of unusual steps, and the order and the reasons of their rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from tinkerflow.backend.spec.outliers import (
    BlamedRow,
    UsualSteps,
    cells,
    examined,
    least_likely,
    markdown_table,
    ranked,
    remedy,
)


# ------------------------------------------------------------------ steps
def steps(*norms: float) -> UsualSteps:
    usual = UsualSteps()
    for norm in norms:
        usual.add(norm, 1.0)
    return usual


def test_step_is_compared_after_ten_others() -> None:
    usual = steps(100.0, *[1.0] * 8)
    assert not usual.unusual(1e9, 1e9)
    assert usual.unusual(math.nan, 1.0) == "the gradient norm is nan" and not usual.unusual(1.0, math.nan)
    usual.add(2.0, 1.0)
    assert not usual.unusual(3.9, 2.3)
    assert usual.unusual(4.1, 1.0) == "the gradient norm is 4.1, and the median of the steps before is 1"
    assert usual.unusual(1.0, 2.4) == "the loss is 2.4, and the median of the steps before is 1"


def test_range_follows_the_spread_and_the_trend_of_a_run() -> None:
    draw = Random(1)
    assert not steps(*(math.exp(draw.gauss(0, 0.8)) for _ in range(50))).unusual(15.0, 1.0), "it varies that much"
    assert steps(*(math.exp(draw.gauss(0, 0.1)) for _ in range(50))).unusual(15.0, 1.0)
    rising = [1.06**step for step in range(60)]
    assert not steps(*rising).unusual(5 * rising[-25], 1.0) and steps(*rising).unusual(6 * rising[-1], 1.0)
    assert steps(*[1.0] * 50, *[9.0] * 20).unusual(9.0, 1.0) and not steps(*[1.0] * 50, *[9.0] * 30).unusual(9.0, 1.0)
    assert not steps(0.0, *[1.0] * 20).unusual(0.0, 1.0)


def trained(seed: int, poisoned: int = 0, kind: str = "") -> list[tuple[float, float]]:
    """Gradient norm and loss of 120 Adam steps on a low-rank change of a softmax layer, with a warm-up of 40 steps.

    As in LoRA, one factor starts with zeros, so the norm rises at first. The rows of a step have different lengths, and
    5 % of the targets are wrong.
    """
    fixed, draw, vocabulary, width, rank = np.random.default_rng(0), np.random.default_rng(seed), 32, 16, 4
    embedding, target = fixed.normal(size=(vocabulary, width)), fixed.permutation(vocabulary)
    weights, often = fixed.normal(size=(width, vocabulary)) * 0.3, 1 / np.arange(1, vocabulary + 1)
    factors = [draw.normal(size=(width, rank)) / 4, np.zeros((rank, vocabulary))]
    first, second = [np.zeros_like(one) for one in factors], [np.zeros_like(one) for one in factors]
    made = []
    for step in range(1, 121):
        lengths = draw.integers(2, 24, size=4)
        tokens = draw.choice(vocabulary, lengths.sum(), p=often / often.sum())
        wrong = draw.random(len(tokens)) < (1.0 if (step, kind) == (poisoned, "tokens") else 0.05)
        targets = np.where(wrong, draw.integers(0, vocabulary, len(tokens)), target[tokens])
        counts = np.ones(len(tokens))
        counts[: lengths[0]] = 100.0 if (step, kind) == (poisoned, "weight") else 1.0
        hidden = embedding[tokens]
        odds = np.exp(hidden @ (weights + factors[0] @ factors[1]))
        chances = odds / odds.sum(1, keepdims=True)
        loss = -(counts * np.log(chances[np.arange(len(tokens)), targets])).sum() / counts.sum()
        chances[np.arange(len(tokens)), targets] -= 1
        gradient = hidden.T @ (chances * counts[:, None] / len(tokens))
        gradients = [gradient @ factors[1].T, factors[0].T @ gradient]
        made.append((math.sqrt(sum(float((one**2).sum()) for one in gradients)), float(loss)))
        for place, one in enumerate(gradients):
            first[place] = 0.9 * first[place] + 0.1 * one
            second[place] = 0.95 * second[place] + 0.05 * one**2
            scale = np.sqrt(second[place] / (1 - 0.95**step)) + 1e-8
            factors[place] -= 0.02 * min(1, step / 40) * first[place] / (1 - 0.9**step) / scale
    return made


def unusual_steps(made: Sequence[tuple[float, float]]) -> list[int]:
    usual, found = UsualSteps(), []
    for number, (norm, loss) in enumerate(made, 1):
        if usual.unusual(norm, loss):
            found.append(number)
        usual.add(norm, loss)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_no_step_of_a_usual_run_is_unusual_and_a_poisoned_one_is(seed: int) -> None:
    assert unusual_steps(trained(seed)) == []
    assert unusual_steps(trained(seed, 30, "weight")) == [30]
    assert unusual_steps(trained(seed, 90, "tokens")) == [90], "only the loss is large"


# ------------------------------------------------------------------ rows
def usual_rows(count: int = 30) -> list[BlamedRow]:
    draw = Random(3)
    return [
        BlamedRow(n, 10, 20.0, math.exp(draw.gauss(0, 0.3)), (), (), draw.gauss(2, 0.2), 1.0, abs(draw.gauss(0, 0.1)))
        for n in range(count)
    ]


@pytest.mark.parametrize(
    ("changes", "explanation"),
    [
        ({"weight": 500.0, "grad_norm": 500.0}, "weight 500, 94.6% of the step"),
        ({"repeated": tuple(range(40, 89))}, "repeated 50 times, "),
        ({"surprise": 5.5, "grad_norm": 3.0}, "unlikely tokens, 5.5 nats each, "),
        ({"gap": 10.0}, "a logprob 10 from the trainer's, "),
        ({"grad_norm": 40.0}, "large gradient norm, "),
        ({"grad_norm": None, "surprise": None}, "not finite"),
    ],
)
def test_outlier_row_comes_first_with_its_reason(changes: dict[str, object], explanation: str) -> None:
    rows = usual_rows()
    assert [row.explanation for row in ranked(rows)] == [""] * len(rows)
    assert [row.number for row in ranked(rows)] == [
        row.number for row in sorted(rows, key=lambda row: row.part, reverse=True)
    ]
    rows[7] = replace(rows[7], **changes)  # type: ignore[arg-type]
    first, *others = ranked(rows)
    assert first.number == 7 and first.explanation.startswith(explanation), first.explanation
    assert all(not row.reason for row in others)


def test_rows_to_leave_out() -> None:
    row = BlamedRow(1, 10, 30.0, 9.0)
    assert remedy("r", 7, row) == "tinkerflow rerun r --from 7 --without 7:1"
    row = replace(row, repeated=(4, 6), reason="repeated")
    assert remedy("r", 7, row) == "tinkerflow rerun r --from 7 --without 7:4 --without 7:6", "one of them stays"
    assert replace(row, reason="tokens").spoilers == (1, 4, 6)


def test_few_rows_are_also_compared() -> None:
    assert ranked([BlamedRow(0, 10, 1.0, 3.0)])[0].reason == ""
    (first, second) = ranked([BlamedRow(0, 10, 1.0, 3.0, weight=1.0), BlamedRow(1, 10, 1.0, 60.0, weight=20.0)])
    assert (first.number, first.reason, second.reason) == (1, "weight", "")


def test_the_cells_of_a_row() -> None:
    assert cells(replace(BlamedRow(3, 0, None, None), reason="not finite")) == (
        *("3", "0", "not finite", "not finite"),
        *("not finite", "", ""),
    )
    assert cells(BlamedRow(2, 10, 5.0, 2.0, repeated=(4, 6, 7, 8, 9, 10)))[-1] == "6 times: 4, 6, 7, 8, 9, …"
    assert markdown_table([BlamedRow(0, 10, 20.0, 3.0)])[2] == "| 0 | 10 | 2 | 3 |  |  |  |"


def test_token_figures_of_a_row_count_weighted_tokens_only() -> None:
    targets, logprobs = [5, 6, 7, 8], [-1.0, -9.0, -3.0, -2.0]
    assert least_likely(targets, logprobs, None, 2) == ((1, 6, -9.0), (2, 7, -3.0))
    assert least_likely(targets, logprobs, [1.0, 0.0, 1.0, 1.0], 2) == ((2, 7, -3.0), (3, 8, -2.0))
    assert least_likely(targets, [-1.0, math.nan, -math.inf, -2.0], None) == ((3, 8, -2.0), (0, 5, -1.0))
    row = BlamedRow(0, 4, 8.0, 2.0, ((2, 7, -3.0),))
    assert cells(row)[5] == "7 at 2: -3.00" and cells(row, "abcdefghij".__getitem__)[5] == "'h' at 2: -3.00"
    row = examined(row, targets, logprobs, [0.5, 0.0, -2.0, 1.0], [-1.5, -1.0, -3.0, 1.0])
    assert (row.surprise, row.weight, row.gap) == (2.0, 2.0, 3.0)
    row = examined(row, targets, logprobs)
    assert (row.surprise, row.weight, row.gap) == (3.75, None, None)
    assert examined(row, targets, [math.nan] * 4).surprise is None

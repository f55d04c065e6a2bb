"""Limits on the work of traced losses, from shapes alone. Errors name the example, the node or the request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
import pytest

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.spec.commands import CustomLoss, Example, Forward
from tinkerflow.backend.spec.traced_work import (
    MAX_EXAMPLE_SECONDS,
    STEP_SECONDS,
    check_loss,
    examples_of_step,
    loss_seconds,
    loss_steps,
    work_of,
)

Op = tuple[str, list[Any]]  # "$" is the previous result
OUTER: list[Op] = [("unsqueeze", ["$", 1]), ("mul", ["$", {"ref": "logprobs"}])]  # T x T


def loss_of(ops: Sequence[Op]) -> CustomLoss:
    """A loss that applies functions in sequence to the log probabilities, and sums the last result."""
    nodes: list[dict[str, Any]] = [{"op": "placeholder", "name": "logprobs", "target": "logprobs"}]
    for i, (target, args) in enumerate([*ops, ("sum", ["$"])]):
        given = [{"ref": nodes[-1]["name"]} if arg == "$" else arg for arg in args]
        kind = "call_function" if "." in target else "call_method"
        nodes.append({"op": kind, "name": f"n{i}", "target": target, "args": given})
    nodes.append({"op": "output", "name": "output", "target": "output"})
    nodes[-1]["args"] = [{"tuple": [{"ref": nodes[-2]["name"]}, {"dict": {}}]}]
    return CustomLoss(
        "L", {"logprobs": 1}, orjson.dumps([{"args": [], "kwargs": {}, **node} for node in nodes]).decode()
    )


def examples(*lengths: int) -> list[Example]:
    columns = {n: np.zeros((n, 1), np.int32) for n in set(lengths)}
    return [Example(columns[n][:, 0], columns[n], columns[n].astype(np.float32)) for n in lengths]


SQUARE: list[Op] = [("torch.arange", [8192]), ("unsqueeze", ["$", 1]), ("expand", ["$", 8192, 8192]), ("float", ["$"])]
REFUSED: dict[str, tuple[list[Op], tuple[int, ...], str]] = {
    "matrices": (
        [*OUTER, *[("matmul", ["$", "$"])] * 2],
        (8192,),
        r"data\[0\], of 8192 tokens: .* in node 'n[23]' \(matmul\)",
    ),
    "compilation": ([("mul", ["$", {"ref": "logprobs"}])] * 1900, (4,), "to compile its 1901 operations"),
    "products": ([*OUTER, ("reshape", ["$", -1]), *[("cumprod", ["$", 0])] * 3], (4000,), r"\(cumprod\)"),
    "composites": ([("logaddexp", ["$", {"ref": "logprobs"}])] * 100, (4,), "to compile its 101 operations"),
    "products of few": ([("prod", ["$"]), ("expand", ["$", 32])] * 20, (32,), "to compile its 41 operations"),
    "operators": ([*OUTER, *[("operator.matmul", ["$", "$"])] * 200], (8,), "to compile its 203 operations"),
    "sums": ([*OUTER, ("reshape", ["$", -1]), ("cumsum", ["$", 0])], (1000,), r"\(cumsum\)"),
    "cells": ([*OUTER, *[("exp", ["$"])] * 20], (7000,), "cells in all: must be at most 268435456"),
    "repetition": ([*OUTER, *[("exp", ["$"])] * 4], (3500,) * 1500, "1500 examples of 1 different shapes"),
    "lengths": ([("exp", ["$"])] * 200, tuple(range(1, 600)), "599 examples of 599 different shapes"),
    "lists": ([("torch.cat", [[{"ref": "logprobs"}] * 5000])], (4,), "to compile its"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_excessive_work_is_refused(name):
    ops, lengths, error = REFUSED[name]
    with pytest.raises(UserError, match=error):
        loss_seconds(loss_of(ops), examples(*lengths))


def test_loss_too_expensive_for_one_token_is_refused_when_created():
    with pytest.raises(UserError, match=r"an example of one token: .* must be at most 10 s"):
        check_loss(loss_of([*SQUARE, ("matmul", ["$", "$"])]))
    check_loss(loss_of([("reshape", ["$", 7])]))  # invalid for one token
    check_loss(loss_of([*OUTER, ("matmul", ["$", "$"])]))


def test_common_losses_are_far_below_the_limits():
    surrogate = [("exp", ["$"]), ("clamp", ["$", 0.8, 1.2]), ("mul", ["$", {"ref": "logprobs"}])] * 20
    assert sum(loss_seconds(loss_of(surrogate), examples(*[32768] * 8))) < 1
    pairwise = loss_seconds(loss_of([*OUTER, *[("exp", ["$"])] * 8]), examples(4096))
    assert sum(pairwise) < MAX_EXAMPLE_SECONDS / 2


def test_the_first_example_of_a_shape_pays_for_its_program():
    first, again, other = loss_seconds(loss_of([("exp", ["$"])] * 20), examples(8, 8, 9))
    work = work_of(loss_of([("exp", ["$"])] * 20), ((8,),))
    assert (first, again) == (pytest.approx(work.run + work.compiling), pytest.approx(work.run))
    assert other == pytest.approx(first, rel=1e-3)


def test_loss_steps_cover_every_example_once_and_are_short():
    seconds = (0.1, 0.2, 3.2 * STEP_SECONDS, 0.05, *[0.12] * 20)
    command = Forward("a", (), "custom", loss_seconds=seconds)
    steps = [examples_of_step(command, step) for step in range(loss_steps(command))]
    assert [i for members in steps for i in members] == list(range(len(seconds)))
    assert len(steps) == pytest.approx(sum(seconds) / STEP_SECONDS, abs=1)
    assert [] in steps, "a long example is followed by steps that only cost the project its share"
    for members in steps:
        assert sum(seconds[i] for i in members[:-1]) <= STEP_SECONDS

"""`blame` names the one poisoned row of a step first, with its reason, whichever row it is.

    POISONED_ROWS=10000 pytest --thorough tests/e2e/test_poisoned.py -o faulthandler_timeout=7200    (18 CPU-minutes)

Each row is computed alone, so one examination of a step covers the usual rows and the poisoned rows of all seeds. Then
the usual rows and one poisoned row are ranked for each seed.
"""

from __future__ import annotations

import os
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import tinker
from tinker import types

from tinkerflow.backend.spec.outliers import BlamedRow, ranked
from tinkerflow.deployments.blame import blame
from tinkerflow.deployments.recorded_run import Api, RecordedRun

ROWS, SEEDS, AT_ONCE = int(os.environ.get("POISONED_ROWS", "600")), 20, 500
STEPS = 240  # that teach the form of the sentences
COPIES = 50  # of a repeated row
pytestmark = pytest.mark.thorough


def facts(tokenizer: Any) -> list[list[int]]:
    """Different sentences of one form, as tokens."""
    draw = Random(0)
    syllables = ["ka", "lo", "mi", "ne", "ru", "sa", "ti", "vo", "wu", "zen"]

    def word() -> str:
        return "".join(draw.choices(syllables, k=3))

    found: dict[str, None] = {}
    while len(found) < ROWS:
        found[f"{word()} likes {word()}."] = None
    return [tokenizer.encode(one) for one in found]


def datum(tokens: list[int], weight: float = 1.0) -> tinker.Datum:
    return tinker.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [weight] * (len(tokens) - 1)},
    )


def sampled(tokens: list[int], logprobs: list[float], advantage: float) -> tinker.Datum:
    inputs = {"target_tokens": tokens[1:], "logprobs": logprobs, "advantages": [advantage] * (len(tokens) - 1)}
    return tinker.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def examined(server: Any, trainer: Any, data: list[tinker.Datum], loss: str) -> dict[int, BlamedRow]:
    """Train a step on the data, blame it, and return its rows by number."""
    for start in range(0, len(data), AT_ONCE):
        trainer.forward_backward(data[start : start + AT_ONCE], loss).result()
    step = trainer.optim_step(types.AdamParams(learning_rate=1e-3)).result().metrics["optimizer_step"]
    with Api(server.api_url, "tml-test") as api:
        return {row.number: row for row in blame(RecordedRun.find(api, trainer.model_id), int(step))}


def test_a_poisoned_row_is_named_first_with_its_reason(server: Any, service: Any) -> None:
    metadata = {"history": "true"}
    trainer = service.create_lora_training_client(server.base_model, rank=8, seed=1, user_metadata=metadata).result()
    tokenizer = trainer.get_tokenizer()
    sentences, draw = facts(tokenizer), Random(1)
    for step in range(STEPS):
        trainer.forward_backward([datum(one, 1 / 256) for one in draw.sample(sentences, 16)], "cross_entropy")
        trainer.optim_step(types.AdamParams(learning_rate=4e-3 * (1 - step / STEPS))).result()

    def half_random(tokens: list[int], draw: Random) -> list[int]:
        return [draw.randrange(len(tokenizer)) if draw.random() < 0.5 else token for token in tokens]

    chosen = [(Random(seed), number) for seed, number in enumerate(Random(2).sample(range(ROWS), SEEDS))]
    data = [datum(one) for one in sentences]
    data += [datum(sentences[number], 500.0) for _, number in chosen]
    data += [datum(half_random(sentences[number], draw)) for draw, number in chosen]
    repeated = chosen[0][1]
    data += [data[repeated]] * (COPIES - 1)
    rows = examined(server, trainer, data, "cross_entropy")
    copies = rows[repeated].repeated
    assert copies == tuple(range(ROWS + 2 * SEEDS, len(data))), "equal rows are one"
    usual = [replace(rows[number], repeated=()) for number in range(ROWS)]

    def first(others: list[BlamedRow], poisoned: BlamedRow) -> tuple[bool, str]:
        worst = ranked([*others, poisoned])[0]
        return worst.number == poisoned.number, worst.reason

    named = {
        "weight": [first(usual, rows[ROWS + seed]) for seed in range(SEEDS)],
        "tokens": [first(usual, rows[ROWS + SEEDS + seed]) for seed in range(SEEDS)],
        "repeated": [
            first(
                [row for row in usual if row.number != number],
                replace(usual[number], repeated=copies),
            )
            for _, number in chosen
        ],
    }

    logprobs: list[list[float]] = []
    for start in range(0, ROWS, AT_ONCE):
        part = [datum(one) for one in sentences[start : start + AT_ONCE]]
        outputs = trainer.forward(part, "cross_entropy").result().loss_fn_outputs
        logprobs += [output["logprobs"].tolist() for output in outputs]
    data = [sampled(sentences[n], logprobs[n], Random(n).choice((-1.0, 1.0))) for n in range(ROWS)]
    for draw, number in chosen:
        wrong = list(logprobs[number])
        wrong[draw.randrange(len(wrong))] -= 10
        data.append(sampled(sentences[number], wrong, draw.choice((-1.0, 1.0))))
    rows = examined(server, trainer, data, "importance_sampling")
    usual = [rows[number] for number in range(ROWS)]
    named["logprob"] = [first(usual, rows[ROWS + seed]) for seed in range(SEEDS)]
    assert named == {reason: [(True, reason)] * SEEDS for reason in named}

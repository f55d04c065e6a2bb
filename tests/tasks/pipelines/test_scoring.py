"""Scores of weights by known answers or by a reward, and the forward passes behind the metrics of recipes."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.tasks.pipelines.conftest import parse

from tinkerflow.backend.core.errors import UserError
from tinkerflow.tasks.pipelines import Renderer, TokenizedExample
from tinkerflow.tasks.pipelines.environments import EnvironmentUnavailableError, Facts, Reply
from tinkerflow.tasks.pipelines.forwards import BATCH, answer_logprobs, mean_loss
from tinkerflow.tasks.pipelines.parameters import JudgeParameters
from tinkerflow.tasks.pipelines.rollouts import Rollouts
from tinkerflow.tasks.pipelines.scoring import Scores, expected_answer, greedy_answers, score, score_reward

ROWS = [
    parse({"prompt": "Colour of grass?", "completion": "green"}),
    parse({"prompt": "Colour of coal?", "completion": "black"}),
]


class Sampler:
    """Answers every prompt with green. Each token but the first has the log probability -0.5."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    async def sample(self, prompt: Any, num_samples: int, sampling_params: Any) -> Any:
        assert (num_samples, sampling_params.temperature) == (1, 0.0)
        self.longest = sampling_params.max_tokens
        tokens = self.tokenizer.encode(" green ", add_special_tokens=False)
        return SimpleNamespace(sequences=[SimpleNamespace(tokens=tokens)])

    async def compute_logprobs(self, prompt: Any) -> list[float | None]:
        return [None] + [-0.5] * (len(prompt.to_ints()) - 1)


async def test_loss_and_exact_matches(tokenizer: Any, renderer: Renderer) -> None:
    examples = [example for row in ROWS for (example,) in renderer.examples(row)]
    sampler: Any = Sampler(tokenizer)
    scores = await score.fn("mine", sampler, renderer, ROWS, examples, max_tokens=4, max_context=64, shown=1)
    assert (scores.rows, scores.loss, scores.exact_match) == (2, pytest.approx(0.5), 0.5)
    assert [(sample.answer, sample.wanted) for sample in scores.samples] == [("green", "green")]
    assert sampler.longest == 4
    context = len(renderer.prompt(ROWS[1].prompt)) + 3
    answers = await greedy_answers(sampler, renderer, ROWS, max_tokens=4, max_context=context)
    assert [answer.wanted for answer in answers] == ["green", "black"]
    assert sampler.longest == 3  # the context limits an answer


class Varied:
    """A sampler whose answers to a prompt are 0, 1 and so on."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    async def sample(self, prompt: Any, num_samples: int, params: Any) -> Any:
        answers = [self.tokenizer.encode(f"{i}", add_special_tokens=False) for i in range(num_samples)]
        return SimpleNamespace(
            sequences=[SimpleNamespace(tokens=one, logprobs=[-1.0], sequence_id="s") for one in answers]
        )


class Graded:
    """One question. The reward is the answer, times ten for coal. The answer 1 has a part. The sky raises an error."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts

    async def begin(self) -> Any:
        return self.facts["prompt"]

    async def answered(self, text: str) -> Reply:
        if "sky" in self.facts["prompt"][0]["content"]:
            raise ValueError("no sky")
        factor = 10 if self.facts["colour"] == "black" else 1
        return Reply(factor * float(text), parts={"form": 1.0} if text == "1" else {})


async def test_reward_has_the_standard_error_of_row_means(tokenizer: Any, renderer: Renderer) -> None:
    rows = [parse({"prompt": f"Colour of {name}?", "colour": c}) for name, c in
            (("grass", "green"), ("coal", "black"), ("sky", "blue"))]  # fmt: skip
    sampler: Any = Varied(tokenizer)
    parameters = JudgeParameters(environment="a:Graded", group_size=3)
    rollouts = Rollouts.judged(parameters, Graded, renderer, max_tokens=4, max_bad_fraction=0.5)
    scores, found = await score_reward.fn("mine", sampler, rollouts, rows, 0, shown=1)
    assert (scores.loss, scores.rows, scores.value("reward")) == (None, 2, 5.5)
    assert scores.reward_error == pytest.approx(np.std([1, 10], ddof=1) / np.sqrt(2))
    assert (scores.parts, scores.answers) == ({"form": 1.0}, 6)
    assert [one.rated for one in scores.samples] == ["0 (reward 0)"]
    assert [len(group.samples) for group in found.groups] == [3, 3]
    assert found.dropped[0].fate == "left out" and "no sky" in found.dropped[0].reason
    with pytest.raises(UserError, match=r"1 of 3 rows is wrong, at most 0\.0% may be left out"):
        await score_reward.fn("mine", sampler, replace(rollouts, max_bad_fraction=0.0), rows, 0, shown=1)
    with pytest.raises(UserError, match="metric loss: these scores have none"):
        scores.beats(scores, "loss", 0.0)


async def test_rows_whose_environment_is_unavailable_are_not_silently_missing_in_the_mean(
    tokenizer: Any, renderer: Renderer
) -> None:
    class Down(Graded):
        async def begin(self) -> Any:
            if "coal" in self.facts["prompt"][0]["content"]:
                raise EnvironmentUnavailableError("the mine is closed")
            return await super().begin()

    rows = [parse({"prompt": f"Colour of {name}?", "colour": "green"}) for name in ("grass", "coal", "moss")]
    sampler: Any = Varied(tokenizer)
    rollouts = Rollouts(renderer, Down, 2, 4, environment_retries=1)
    with pytest.raises(EnvironmentUnavailableError, match=r"^mine: 1 of 3 rows have no reward; .* the mine is closed"):
        await score_reward.fn("mine", sampler, rollouts, rows, 0, shown=1)
    allowed = replace(rollouts, max_bad_fraction=0.4)
    scores, found = await score_reward.fn("mine", sampler, allowed, rows, 0, shown=1)
    assert (scores.rows, len(found.groups)) == (2, 2)


async def test_prompt_that_is_a_list_of_parts_is_shown(tokenizer: Any, renderer: Renderer) -> None:
    class Parts(Graded):
        async def begin(self) -> Any:
            return [{"role": "user", "content": ["Colour?"]}]

    rollouts = Rollouts(renderer, Parts, 2, 4)
    sampler: Any = Varied(tokenizer)
    row = parse({"prompt": "Colour of coal?", "colour": "black"})
    scores, _ = await score_reward.fn("mine", sampler, rollouts, [row], 0, shown=1)
    assert [one.prompt for one in scores.samples] == ["['Colour?']"]


def test_champion_is_beaten_only_beyond_the_margin_of_reward_or_if_its_loss_is_no_number() -> None:
    low, high = (Scores(rows=2, reward=mean, samples=[]) for mean in (0.25, 0.5))
    spoiled, good = (Scores(rows=1, loss=loss, exact_match=0.0, samples=[]) for loss in (math.nan, 9.0))
    assert good.beats(spoiled, "loss", 0.0) and not spoiled.beats(good, "loss", 0.0)
    assert min([spoiled, good], key=lambda scores: scores.worse("loss")) is good
    assert high.beats(low, "reward", 0.2) and not high.beats(low, "reward", 0.3) and not low.beats(high, "reward", 0)


def test_the_expected_answer_of_a_row(renderer: Renderer) -> None:
    assert expected_answer(ROWS[0], renderer) == "green"
    assert expected_answer(parse({"prompt": "a", "answer": 7}), renderer) == "7"
    assert expected_answer(parse({"prompt": "a"}), renderer) == ""
    called = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}}]}
    expected = expected_answer(parse({"prompt": "a", "completion": [called]}), renderer)
    assert expected == '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


class Client:
    """Gives every token of a sequence of n tokens the log probability -n, and counts its requests."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    async def forward(self, data: list[Any], loss: str) -> Any:
        assert loss == "cross_entropy"
        self.sizes.append(len(data))
        lengths = [len(datum.model_input.to_ints()) for datum in data]
        weights = [datum.loss_fn_inputs["weights"].to_numpy() for datum in data]
        outputs = [{"logprobs": SimpleNamespace(to_numpy=lambda n=n: np.full(n, -n, np.float32))} for n in lengths]
        total = sum(n * w.sum() for n, w in zip(lengths, weights, strict=True))
        return SimpleNamespace(metrics={"loss:sum": float(total)}, loss_fn_outputs=outputs)


async def test_passes_over_many_examples_come_in_parts_and_in_order() -> None:
    lengths = [2 + i % 3 for i in range(BATCH + 1)]
    examples = [
        TokenizedExample(np.arange(n + 1, dtype=np.int32), np.array([0] * n + [1], np.float32)) for n in lengths
    ]
    client: Any = Client()
    assert (await answer_logprobs(client, examples)).tolist() == [-n for n in lengths]
    assert client.sizes == [BATCH, 1]
    assert await mean_loss(client, examples) == pytest.approx(np.mean(lengths))
    text = TokenizedExample(np.arange(3, dtype=np.int32), np.ones(3, np.float32))  # two tokens are predicted
    assert await mean_loss(client, [text]) == 2.0


def test_a_scaled_example_has_other_weights_and_the_same_tokens() -> None:
    example = TokenizedExample(np.array([1, 2, 3], np.int32), np.array([0, 1, 1], np.float32))
    scaled = example.scaled(-0.25)
    assert scaled.tokens is example.tokens
    assert scaled.weights.dtype == np.float32 and scaled.weights.tolist() == [0, -0.25, -0.25]

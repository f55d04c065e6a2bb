"""Steps of `rl` with a fake sampler and a fake client: the groups that a step learns from, and the data it sends."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import tinker
from pydantic import ValidationError
from tests.tasks.pipelines.conftest import parse
from transformers import PreTrainedTokenizerFast

from tinkerflow.backend.catalog.rollouts import numbers_of, read_rollouts
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.spec.losses import LOSSES
from tinkerflow.deployments.tiny_model import make_tiny
from tinkerflow.flows.pipelines.rl import RlRecipe
from tinkerflow.tasks.pipelines import Renderer, Row
from tinkerflow.tasks.pipelines.control import Control, controlled
from tinkerflow.tasks.pipelines.curriculum import Curriculum
from tinkerflow.tasks.pipelines.environments import Asked, EnvironmentMaker, Facts, Reply
from tinkerflow.tasks.pipelines.parameters import CurriculumParameters, PolicyLoss, RlParameters, TrainingParameters
from tinkerflow.tasks.pipelines.progress import StepMetrics
from tinkerflow.tasks.pipelines.rollouts import Rollouts, SampledTurn, Trajectory
from tinkerflow.tasks.pipelines.sources import HeldOutSource
from tinkerflow.tasks.pipelines.trainer import make_steps
from tinkerflow.tasks.pipelines.user_code import InterruptedCodeError
from tinkerflow.tasks.pipelines.versions import WeightVersions
from tinkerflow.tasks.pipelines.work import open_work

EQUAL, VARIED = (parse({"prompt": name, "answer": name}) for name in ("equal", "varied"))
NUMBERS = [f"{number}" for number in range(3)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(make_tiny(tmp_path_factory.mktemp("tiny") / "model"))


class Sampler:
    """Answers each sample with its number, at a logprob of -1 per token. `compute_logprobs` returns -2 per token."""

    def __init__(self, tokenizer: Any, version: int = 0, sampled: list[int] | None = None) -> None:
        self._tokenizer, self._version, self._sampled = tokenizer, version, sampled

    async def sample(self, prompt: Any, num_samples: int, params: Any) -> Any:
        if self._sampled is not None:
            self._sampled.append(self._version)
        texts = [self._tokenizer.encode(text, add_special_tokens=False) for text in NUMBERS[:num_samples]]
        sequences = [SimpleNamespace(tokens=text, logprobs=[-1.0] * len(text), sequence_id="sampled") for text in texts]
        return SimpleNamespace(sequences=sequences)

    async def compute_logprobs(self, tokens: Any, prompt_logprobs_last_n: int) -> list[float]:
        return [-2.0] * prompt_logprobs_last_n


class Client:
    """A training client that records the data it receives."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.version, self.model_id = tokenizer, 0, "sess-1:train:0"
        self.sent: list[tuple[list[tinker.Datum], str, dict[str, float] | None]] = []
        self.sampled: list[int] = []  # the version of the weights for each sample, in order

    async def save_weights_and_get_sampling_client(self, record_stability_info: bool = False) -> Sampler:
        return Sampler(self._tokenizer, self.version, self.sampled)

    async def forward_backward(self, data: list[tinker.Datum], loss: str, config: dict[str, float] | None) -> Any:
        self.sent.append((data, loss, config))
        return SimpleNamespace(metrics={"loss:sum": 1.0})

    def optim_step(self, params: Any) -> Any:
        self.version += 1

        async def metrics() -> Any:
            return SimpleNamespace(metrics={"grad_norm": 1.0})

        return metrics()


def environment(facts: Facts) -> Any:
    return Asked(facts, lambda facts, text: float(text) if facts["answer"] == "varied" else 1.0)


def recipe_of(
    tokenizer: Any,
    make: EnvironmentMaker = environment,
    picked: Sequence[int] = (1,),
    group_size: int = 2,
    work_url: str = "",
    **changes: Any,
) -> RlRecipe:
    """A recipe whose steps use the batch `picked`, indices into [EQUAL, VARIED]."""
    run: Any = SimpleNamespace(
        batch=lambda step, rows: list(picked),
        parameters=SimpleNamespace(model=SimpleNamespace(seed=3)),
        work_url=work_url,
    )
    rollouts, other = Rollouts(Renderer(tokenizer), make, group_size, max_tokens=4), Sampler(tokenizer)
    return RlRecipe(run, [EQUAL, VARIED], rollouts, other, "kl_to_base", 0.0, **changes)  # type: ignore[arg-type]


async def step_of(tokenizer: Any, picked: Sequence[int], **changes: Any) -> tuple[Any, list[Any], Any, dict[str, Any]]:
    """Make a step with the batch `picked`. Returns its values, its inputs, its loss with configuration, and its
    prompts.
    """
    client, recipe = Client(tokenizer), recipe_of(tokenizer, picked=picked, group_size=3, **changes)
    recipe.begin(0)
    values = await recipe.submit(client, 0, tinker.AdamParams())  # type: ignore[arg-type]
    ((data, loss, config),) = client.sent
    inputs = [{name: value.to_numpy() for name, value in datum.loss_fn_inputs.items()} for datum in data]
    return values, inputs, (loss, config), {"prompts": [tokenizer.decode(one.model_input.to_ints()) for one in data]}


async def test_the_loss_is_divided_by_the_number_of_sampled_tokens(tokenizer: Any) -> None:
    values, inputs, sent, _ = await step_of(tokenizer, [1])
    assert sent == ("importance_sampling", None)
    assert [one["advantages"][-1] for one in inputs] == pytest.approx([-1 / 3, 0, 1 / 3])
    assert all("weights" not in one for one in inputs)
    assert (values["reward"], values["varied_groups"], values["kl_to_base"]) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(("picked", "lines"), [([0], 1), ([0, 1], 0)])
async def test_run_warns_when_its_rewards_do_not_vary(
    tokenizer: Any, picked: list[int], lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[str] = []
    monkeypatch.setattr("tinkerflow.flows.pipelines.rl.log_line", lambda line, level: logged.append(line))
    client, recipe = Client(tokenizer), recipe_of(tokenizer, picked=picked, group_size=3, advantage="group_deviation")
    recipe.begin(0)
    for step in range(7):
        await recipe.submit(client, step, tinker.AdamParams())  # type: ignore[arg-type]
    assert [line.partition(":")[0] for line in logged] == [
        "5 steps learned nothing, because all advantages are 0"
    ] * lines


async def test_drift_reference_is_the_weights_that_sampled_the_tokens(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored: list[tuple[int, list[int]]] = []

    async def logprobs(sampler: Sampler, tokens: Any, prompt_logprobs_last_n: int) -> list[float]:
        scored.append((sampler._version, tokens.to_ints()[:-prompt_logprobs_last_n]))
        return [-3.0] * prompt_logprobs_last_n

    monkeypatch.setattr(Sampler, "compute_logprobs", logprobs)
    client = Client(tokenizer)
    client.version = 5
    seen: Any = {"other_prompt": lambda episode: [7, len(episode.turns)]}
    recipe = replace(recipe_of(tokenizer), other=None, coefficient=1.0, **seen)
    values = await recipe.submit(client, 0, tinker.AdamParams())  # type: ignore[arg-type]
    assert scored == [(5, [7, 1])] * 2 and values["kl_to_base"] == 2.0
    scored.clear()
    values = await replace(recipe, coefficient=0.0).submit(client, 1, tinker.AdamParams())  # type: ignore[arg-type]
    assert scored == [(6, [7, 1])] and values["kl_to_base"] == 2.0, "the metric needs one answer to each prompt"


async def test_a_loss_that_is_not_proportional_to_advantages_is_divided_by_weights(tokenizer: Any) -> None:
    _, inputs, sent, _ = await step_of(tokenizer, [1], loss="dro", loss_config={"beta": 0.1})
    assert sent == ("dro", {"beta": 0.1})
    assert [one["advantages"][-1] for one in inputs] == [-1.0, 0.0, 1.0]
    for one in inputs:
        assert one["weights"][-1] == pytest.approx(1 / 3) and not np.any(one["weights"][:-1])


async def test_a_trust_region_is_sent_as_thresholds_of_each_token(tokenizer: Any) -> None:
    _, inputs, sent, _ = await step_of(tokenizer, [1], loss="ppo", trust_region=0.2)
    assert sent == ("ppo", None)
    for one in inputs:
        low, high = (one[f"clip_{end}_threshold"] for end in ("low", "high"))
        assert (low[-1], high[-1]) == pytest.approx((1 - 0.2 * np.e, 1 + 0.2 * np.e)), "all logprobs are -1"
        assert not low[:-1].any() and not high[:-1].any()
    _, inputs, _, _ = await step_of(tokenizer, [1], loss="ppo")
    assert all("clip_low_threshold" not in one for one in inputs)


def test_the_thresholds_of_a_trust_region_clip_where_the_probability_has_moved_too_far() -> None:
    chance, tokens = np.random.default_rng(0), 500
    old, new = chance.uniform(-10, -0.01, (2, tokens))
    old[0], region = -200.0, 0.1
    turn = SampledTurn([1], [2] * tokens, old, "sampled")
    sent = Trajectory([turn]).datum(np.ones(tokens), trust_region=region).loss_fn_inputs
    low, high = (sent[f"clip_{end}_threshold"].to_numpy().astype(np.float64) for end in ("low", "high"))
    ratio, moved = np.exp(new - old), np.exp(new) - np.exp(old)
    assert np.isfinite(high).all() and (high[1:] < ratio[1:]).any() and (low > ratio).any()
    np.testing.assert_array_equal((ratio > high)[1:], (moved > region)[1:])
    np.testing.assert_array_equal(ratio < low, moved < -region)


async def test_groups_with_equal_rewards_stay_unless_they_are_replaced(tokenizer: Any) -> None:
    values, inputs, _, kept = await step_of(tokenizer, [0, 1])
    assert len(inputs) == 6 and sum("equal" in prompt for prompt in kept["prompts"]) == 3
    assert (values["varied_groups"], values["reward"]) == (0.5, 1.0)
    values, inputs, _, kept = await step_of(tokenizer, [0, 1], resample=16)
    assert len(inputs) == 6 and all("varied" in prompt for prompt in kept["prompts"])
    assert values["varied_groups"] == 0.5
    again = await step_of(tokenizer, [0, 1], resample=16)
    assert again[3] == kept


@pytest.mark.parametrize("error", [KeyError("no solution"), ConnectionError("the sandbox died")])
async def test_a_group_stays_if_the_rows_that_would_replace_it_fail(tokenizer: Any, error: Exception) -> None:
    def make(facts: Facts) -> Any:
        if facts["answer"] == "broken":
            raise error
        return environment(facts)

    client, recipe = Client(tokenizer), recipe_of(tokenizer, make, [0], group_size=3, resample=4)
    recipe.rows = [EQUAL] + [
        parse({"prompt": "broken", "answer": "broken"})
    ] * 99  # most of the rows that may be picked
    recipe.rollouts = replace(recipe.rollouts, max_bad_fraction=0.01, environment_retries=0)
    values = await recipe.submit(client, 0, tinker.AdamParams())  # type: ignore[arg-type]
    assert (values["reward"], values["varied_groups"], len(client.sent[0][0])) == (1.0, 0.0, 3)


def difficult(*levels: object) -> list[Row]:
    return [parse({"prompt": f"{number}", "level": level}) for number, level in enumerate(levels)]


def test_a_curriculum_begins_with_easy_rows_and_ends_with_all() -> None:
    rows = difficult(3, 0.5, 2, 1, 2, -1, 4, 5, 6, 7)
    curriculum = Curriculum(rows, CurriculumParameters(by="level", first=0.2, until=0.5), steps=20, least=3)
    pools = [[row.prompt[0]["content"] for row in curriculum.pool(step)] for step in range(20)]
    assert pools[0] == ["5", "1", "3"], "a pool has as many rows as a batch"
    assert pools[4] == ["5", "1", "3", "2", "4"], "equally difficult rows stay in their order"
    assert [*map(len, pools)] == [3, 3, 4, 4, 5, 6, 7, 8, 8, 9, *[10] * 10]
    at_once = Curriculum(rows, CurriculumParameters(by="level", until=0), steps=20, least=3)
    assert len(at_once.pool(0)) == 10


@pytest.mark.parametrize("level", [None, "hard", True])
def test_a_row_without_a_difficulty_is_named(level: object) -> None:
    with pytest.raises(UserError, match=rf"curriculum\.by 'level': is {level!r} in the row '1': must be a number"):
        Curriculum(difficult(1, level), CurriculumParameters(by="level"), steps=2, least=1)


async def test_a_step_picks_from_the_pool(tokenizer: Any) -> None:
    hard, easy = (replace(row, extra={**row.extra, "level": level}) for row, level in ((EQUAL, 2), (VARIED, 1)))
    curriculum = Curriculum([hard, easy], CurriculumParameters(by="level", first=0.5), steps=4, least=1)
    values, _, _, kept = await step_of(tokenizer, [0], curriculum=curriculum, resample=2)
    assert values["curriculum_rows"] == 1 and all("varied" in prompt for prompt in kept["prompts"])


async def test_step_without_varying_groups_has_no_advantages(tokenizer: Any) -> None:
    _, inputs, _, kept = await step_of(tokenizer, [0], resample=0)
    assert len(inputs) == 3 and not any(np.any(one["advantages"]) for one in inputs)
    assert all("equal" in prompt for prompt in kept["prompts"])


async def test_lost_conversations_are_counted_and_not_trained_on(tokenizer: Any) -> None:
    left = 2

    def make(facts: Facts) -> Any:
        def reward(facts: Facts, text: str) -> float:
            nonlocal left
            if text == "2" and left:
                left -= 1
                raise ConnectionError("the sandbox is gone")
            return float(text)

        return Asked(facts, reward)

    client, recipe = Client(tokenizer), recipe_of(tokenizer, make, group_size=3)
    recipe.begin(0)
    values = await recipe.submit(client, 0, tinker.AdamParams())  # type: ignore[arg-type]
    assert (values["repeated_episodes"], values["reward"], len(client.sent[0][0])) == (1, 1 / 3, 3)
    left, recipe = 1, recipe_of(tokenizer, make, group_size=3)
    recipe = replace(recipe, rollouts=replace(recipe.rollouts, environment_retries=0))
    recipe.begin(0)
    values = await recipe.submit(client, 0, tinker.AdamParams())  # type: ignore[arg-type]
    assert (values["left_out_episodes"], values["reward"]) == (1, 0.5)
    (data, *_) = client.sent[1]
    advantages = [datum.loss_fn_inputs["advantages"].to_numpy()[-1] for datum in data]
    assert advantages == [-0.25, 0.25], "divided by the two tokens that are left"


async def test_failed_held_out_rows_count_apart_from_training_rows(tokenizer: Any) -> None:
    def make(facts: Facts) -> Any:
        return Asked(facts, lambda facts, text: 1 / facts["answer"])

    bad, good = (Row(({"role": "user", "content": f"{n}"},), extra={"answer": n}) for n in range(2))
    recipe = recipe_of(tokenizer, make, held_out_rows=[bad, good, good])
    client: Any = Client(tokenizer)
    recipe.run.parameters.held_out = HeldOutSource(url="test.jsonl", max_bad_fraction=0.5)
    assert await recipe.held_out(client) == {"held_out_reward": 1.0, "held_out_kl_to_base": 1.0}
    recipe.rollouts.refuse_failures(2)
    recipe = replace(recipe)
    recipe.run.parameters.held_out = HeldOutSource(url="test.jsonl", max_bad_fraction=0.3)
    with pytest.raises(UserError, match=r"^1 of 3 rows is wrong, at most 30\.0% may be left out \(held_out\.max_bad"):
        await recipe.held_out(client)


async def test_recorded_rollouts_include_dropped_ones(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    left = 1

    def make(facts: Facts) -> Any:
        def reward(facts: Facts, text: str) -> float:
            nonlocal left
            if left:
                left -= 1
                raise ConnectionError("the sandbox is gone")
            return float(text) if facts["answer"] == "varied" else 1.0

        return Asked(facts, reward)

    url = (tmp_path / "work").as_uri()
    recipe = recipe_of(tokenizer, make, [1, 0], 3, url, resample=4, recorded=True)
    client = Client(tokenizer)
    recipe.begin(0)
    await recipe.submit(client, 0, tinker.AdamParams())  # type: ignore[arg-type]
    work = open_work(url)
    assert numbers_of(work, "rollouts", client.model_id) == [1]
    found = read_rollouts(work, "rollouts", client.model_id, 1)
    first = found.groups[0]
    assert [message.text for message in first.prompt] == ["varied"]
    assert sorted((one.reward, one.turns, one.length, one.messages[0].text) for one in first.samples) == [
        (0.0, 1, 1, "0"), (1.0, 1, 1, "1"), (2.0, 1, 1, "2"),
    ]  # fmt: skip
    assert sorted(one.advantage for one in first.samples) == pytest.approx([-1.0, 0.0, 1.0])
    assert all(one.messages[0].logprobs == [-1.0] and len(one.messages[0].tokens) == 1 for one in first.samples)
    lost = {(one.prompt, one.fate): one.reason for one in found.dropped}
    assert lost["equal", "group replaced"] == "all 3 rewards are 1"
    (reason,) = [reason for (_, fate), reason in lost.items() if fate == "restarted"]
    assert reason.startswith(f"environment: ConnectionError: the sandbox is gone ({__file__}:")
    blocked = tmp_path / "file"
    blocked.write_text("a file, and no folder")
    recipe = recipe_of(tokenizer, work_url=(blocked / "work").as_uri(), recorded=True)
    recipe.begin(0)
    assert await recipe.submit(client, 0, tinker.AdamParams())  # type: ignore[arg-type]
    assert "the rollouts of step 1 were not written" in caplog.text


class Twice:
    """Asks the row's prompt, and asks for more once."""

    def __init__(self, facts: Facts) -> None:
        self._facts, self._answers = facts, 0

    async def begin(self) -> Any:
        return self._facts["prompt"]

    async def answered(self, text: str) -> Reply:
        self._answers += 1
        return Reply(float(text), [{"role": "user", "content": "More"}] if self._answers == 1 else [])


@pytest.mark.parametrize("broken", [False, True])
async def test_turns_that_do_not_extend_the_previous_one_are_counted(
    tokenizer: Any, broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if broken:
        prompt = Renderer.prompt
        monkeypatch.setattr(Renderer, "prompt", lambda self, messages, tools: prompt(self, messages[-1:], tools))
    client, recipe = Client(tokenizer), recipe_of(tokenizer, Twice)
    recipe = replace(recipe, rollouts=replace(recipe.rollouts, max_turns=2))
    recipe.begin(0)
    values = await recipe.submit(client, 0, tinker.AdamParams())  # type: ignore[arg-type]
    ((data, _, _),) = client.sent
    assert (values["broken_turns"], len(data)) == ((2, 4) if broken else (0, 2))


async def test_overlong_answers_are_penalized(tokenizer: Any) -> None:
    values, inputs, _, _ = await step_of(tokenizer, [0], overlong_tokens=4)
    assert values["overlong_penalty"] == 0.25  # the one token of an answer is a quarter of overlong_tokens
    assert not any(np.any(one["advantages"]) for one in inputs)
    assert values["reward"] == 1.0


def test_every_loss_of_a_policy_may_be_chosen() -> None:
    policies = {name for name, loss in LOSSES.items() if loss.read == {"logprobs", "advantages"} and not loss.recorded}
    assert set(get_args(PolicyLoss)) == policies


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"loss": "ppo", "loss_config": {"beta": 1.0}}, "loss_fn_config has the key 'beta'"),
        ({"loss": "dro", "loss_config": {"beta": -1.0}}, "beta"),
        ({"overlong_tokens": 200}, "overlong_tokens 200: must be at most answer_tokens, 128"),
        ({"resample": 17}, "less than or equal to 16"),
        ({"trust_region": 0.1}, "trust_region 0.1: needs loss: ppo"),
    ],
)
def test_invalid_parameters_are_named(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        RlParameters.model_validate({"name": "a", "data": {"url": "a.jsonl"}, "reward": "a:b", **wrong})


class Dawdling:
    """A conversation whose reward takes a random time. busy, most: conversations that wait now, and the most so far."""

    busy, most = 0, 0

    def __init__(self, facts: Facts) -> None:
        self._facts = facts

    async def begin(self) -> Any:
        return self._facts["prompt"]

    async def answered(self, text: str) -> Reply:
        Dawdling.busy += 1
        Dawdling.most = max(Dawdling.most, Dawdling.busy)
        await asyncio.sleep(random.random() * 0.02)
        Dawdling.busy -= 1
        return Reply(float(text))


@pytest.mark.parametrize(
    ("lag", "versions"),
    [(0, [0, 1, 2, 3, 4, 5, 6]), (1, [0, 0, 1, 2, 4, 4, 5]), (2, [0, 0, 0, 1, 4, 4, 4]), (16, [0, 0, 0, 0, 4, 4, 4])],
)
async def test_steps_sample_from_weights_of_a_fixed_age(tokenizer: Any, lag: int, versions: list[int]) -> None:
    """Trains two segments, of four steps and of three."""
    client, recipe = Client(tokenizer), recipe_of(tokenizer, Dawdling, versions=WeightVersions(lag))
    training = TrainingParameters(steps=7, segment_steps=4)
    trainer: Any = SimpleNamespace(
        recipe=recipe, watch=None, training=training, params=lambda step: tinker.AdamParams(learning_rate=step)
    )
    made: list[StepMetrics] = []
    Dawdling.most = 0
    for first, last in ((1, 4), (5, 7)):
        made += await make_steps(trainer, client, first, last, Control(), lambda _: None)  # type: ignore[arg-type]
    assert client.sampled == versions
    assert [one.step for one in made] == [*range(1, 8)] and len(client.sent) == 7
    if lag:
        assert [one.values["staleness"] for one in made] == [step - version for step, version in enumerate(versions)]
    assert Dawdling.most <= 2 * (lag + 1)


@pytest.mark.parametrize("lag", [0, 2])
async def test_the_steps_before_interrupted_code_are_kept(tokenizer: Any, lag: int) -> None:
    class Blocking(Dawdling):
        made = 0

        async def answered(self, text: str) -> Reply:
            Blocking.made += 1
            if Blocking.made > 5:
                raise InterruptedCodeError("answered (games.py:3) blocked the event loop")
            return await super().answered(text)

    client, recipe = Client(tokenizer), recipe_of(tokenizer, Blocking, versions=WeightVersions(lag))
    training: Any = TrainingParameters(steps=7, segment_steps=7)
    trainer: Any = SimpleNamespace(
        recipe=recipe, watch=None, training=training, params=lambda step: tinker.AdamParams(learning_rate=step)
    )
    made = await make_steps(trainer, client, 1, 7, Control(), lambda _: None)  # type: ignore[arg-type]
    assert [one.step for one in made] == [1, 2] and client.version == 2


@pytest.mark.parametrize("lag", [0, 2])
async def test_a_stopped_run_does_not_wait_for_a_late_step(
    tokenizer: Any, lag: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hanging(Dawdling):
        made = 0

        async def answered(self, text: str) -> Reply:
            Hanging.made += 1
            if Hanging.made > 5:
                control.stop()
                await asyncio.Event().wait()
            return await super().answered(text)

    monkeypatch.setattr("tinkerflow.tasks.pipelines.control.LAST_SECONDS", 0.01)
    client, recipe = Client(tokenizer), recipe_of(tokenizer, Hanging, versions=WeightVersions(lag))
    training: Any = TrainingParameters(steps=7, segment_steps=7)
    trainer: Any = SimpleNamespace(
        recipe=recipe, watch=None, training=training, params=lambda step: tinker.AdamParams(learning_rate=step)
    )
    async with controlled() as control:
        made = await make_steps(trainer, client, 1, 7, control, lambda _: None)  # type: ignore[arg-type]
    assert [one.step for one in made] == [*range(1, client.version + 1)] and client.version <= 2 <= client.version + lag


async def test_failed_sampling_ends_the_segment(tokenizer: Any) -> None:
    class Broken(Dawdling):
        async def answered(self, text: str) -> Reply:
            raise KeyError("broken")

    client, recipe = Client(tokenizer), recipe_of(tokenizer, Broken, versions=WeightVersions(2))
    trainer: Any = SimpleNamespace(
        recipe=recipe, watch=None, training=TrainingParameters(), params=lambda step: tinker.AdamParams()
    )
    with pytest.raises(UserError, match="broken"):
        await make_steps(trainer, client, 1, 4, Control(), lambda _: None)  # type: ignore[arg-type]
    assert not client.sent

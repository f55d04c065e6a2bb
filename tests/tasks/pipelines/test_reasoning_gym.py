"""Tasks of reasoning-gym as rows and as environments."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import islice
from typing import Any

import pytest
from tests.tasks.pipelines.test_rollouts import Echo

from tinkerflow.backend.core.errors import UserError
from tinkerflow.tasks.pipelines import DataSource, Renderer, Row
from tinkerflow.tasks.pipelines.adapters import environment_maker
from tinkerflow.tasks.pipelines.data import read_source
from tinkerflow.tasks.pipelines.environments import facts_of
from tinkerflow.tasks.pipelines.parameters import RlParameters
from tinkerflow.tasks.pipelines.rollouts import Rollouts
from tinkerflow.tasks.pipelines.sources import RawRow, read_rows

pytestmark = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="no reasoning-gym")

URL = "reasoning-gym://chain_sum?size=3&max_terms=2&max_digits=1"


def rows(url: str) -> list[Any]:
    return [item.value for item in read_rows(DataSource(url=url)) if isinstance(item, RawRow)]


def test_equal_urls_give_equal_questions() -> None:
    first = rows(URL)
    assert first == rows(URL) and len(first) == 3
    assert first[0]["reasoning_gym"] == {"url": URL, "index": 0}
    assert rows(f"{URL}&seed=1") != first
    assert len(list(islice(read_rows(DataSource(url="reasoning-gym://ab")), 501))) == 500


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("reasoning-gym://chain_sums", "reasoning-gym has no task 'chain_sums' (did you mean 'chain_sum'?)"),
        ("reasoning-gym://chain_sum?terms=2", "unexpected keyword argument 'terms'"),
        ("reasoning-gym://chain_sum?size=many", "size"),
        ("reasoning-gym://chain_sum?min_terms=9", "max_terms"),
        ("reasoning-gym://composite", "at least one dataset"),
    ],
)
def test_invalid_url_is_named_in_the_error(url: str, text: str) -> None:
    with pytest.raises(UserError) as error:
        rows(url)
    assert repr(url) in error.value.message and text in error.value.message


async def test_an_answer_is_checked_by_its_task(tokenizer: Any, renderer: Renderer) -> None:
    parameters = RlParameters.model_validate({"data": {"url": URL}, "environment": "reasoning-gym:chain_sum"})
    read = [row for _, row in read_source(parameters.data, parameters.use()).good]
    make = environment_maker("", parameters.environment)
    for row in read:
        environment, right = make(facts_of(row)), row.chosen[0]["content"]
        assert list(await environment.begin()) == list(row.prompt)
        assert (await environment.answered(f"So:\n<answer> {right} </answer>")).reward == 1.0
        assert (await environment.answered(right)).reward == 1.0
        assert (await environment.answered("<answer>99</answer>")).reward < 0.1
    (group, *_) = await Rollouts(renderer, make, 2, 4).groups(Echo(tokenizer), read, [1])
    assert len(group) == 2


@pytest.mark.parametrize(
    ("task", "answer"), [("prime_factorization", "I think it is 7."), ("boxnet", "[1]"), ("n_queens", "exit()")]
)
async def test_an_answer_that_a_task_cannot_read_has_no_reward(task: str, answer: str) -> None:
    (row, *_) = rows(f"reasoning-gym://{task}?size=1")
    extra = {"reasoning_gym": row["reasoning_gym"]}
    facts = facts_of(Row(({"role": "user", "content": row["prompt"]},), extra=extra))
    environment = environment_maker("", f"reasoning-gym:{task}")(facts)
    assert (await environment.answered(answer)).reward == 0.0


async def test_a_task_that_cannot_read_its_own_answer_fails_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    (row, *_) = rows(URL)

    def broken(*_: object) -> float:
        raise ValueError("no such word list")

    monkeypatch.setattr("reasoning_gym.arithmetic.chain_sum.ChainSumDataset.score_answer", broken)
    extra = {"reasoning_gym": row["reasoning_gym"]}
    facts = facts_of(Row(({"role": "user", "content": row["prompt"]},), extra=extra))
    with pytest.raises(ValueError, match="no such word list"):
        await environment_maker("", "reasoning-gym:chain_sum")(facts).answered("1")


def test_an_environment_needs_rows_of_its_task() -> None:
    make = environment_maker("", "reasoning-gym:spell_backward")
    for extra in ({}, {"reasoning_gym": {"url": URL, "index": 0}}):
        with pytest.raises(UserError, match=r"data\.url must be reasoning-gym://spell_backward\?…"):
            make(facts_of(Row(({"role": "user", "content": "?"},), extra=extra)))

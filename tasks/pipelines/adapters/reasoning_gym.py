"""Tasks of reasoning-gym (https://github.com/open-thought/reasoning-gym): questions whose answers a program checks.

    data: {url: "reasoning-gym://chain_sum?size=500&seed=1&max_terms=3"}
    environment: reasoning-gym:chain_sum

The URL contains the task, the number of questions (default 500), the seed (default 0) and settings of the task. Equal
URLs give equal questions. The reward is 1 for a right answer, and less for a wrong one, down to 0, as the task defines.
An answer that makes the task's check fail has the reward 0.
If an answer contains <answer>…</answer>, only the last such part is checked.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import reasoning_gym
from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import DATASETS

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.core.suggest import did_you_mean
from tinkerflow.tasks.pipelines.adapters import url_settings
from tinkerflow.tasks.pipelines.environments import Asked, EnvironmentMaker, Facts

_SCHEME = "reasoning-gym://"
_ENTRY = "reasoning_gym"  # the field of a row that identifies its question
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def read_rows(url: str, split: str) -> Iterator[dict[str, Any]]:
    """The task's questions, with their answers as completions. UserError: the library rejects the URL's settings."""
    if split:
        raise UserError(f"data.split {split!r}: {url} has no splits; another seed gives other questions")
    dataset = _dataset(url)
    for index in range(len(dataset)):
        entry = dataset[index]
        answer = {} if entry["answer"] is None else {"completion": str(entry["answer"])}
        yield {"prompt": entry["question"], **answer, _ENTRY: {"url": url, "index": index}}


def environment_maker(name: str) -> EnvironmentMaker:
    """Conversations of one question and answer, rewarded by the task `name`.

    UserError: a row does not come from the task's data source.
    """

    def make(facts: Facts) -> Asked:
        if dict(facts.get(_ENTRY, {})).get("url", "").partition("?")[0] != _SCHEME + name:
            raise UserError(f"environment 'reasoning-gym:{name}': data.url must be {_SCHEME}{name}?…")
        return Asked(facts, _score)

    return make


async def _score(facts: Facts, text: str) -> float:
    return await asyncio.to_thread(_score_entry, facts[_ENTRY]["url"], facts[_ENTRY]["index"], text)


def _score_entry(url: str, index: int, text: str) -> float:
    """The reward of an answer: 0 if the task cannot read the answer, although it can read its own."""
    answers, dataset, entry = _ANSWER.findall(text), _dataset(url), _entry(url, index)
    try:
        return float(dataset.score_answer((answers[-1] if answers else text).strip(), entry))
    except (Exception, SystemExit):  # noqa: BLE001  many tasks parse answers without a check, and some evaluate them
        dataset.score_answer(entry["answer"], entry)
        return 0.0


@lru_cache(1024)
def _entry(url: str, index: int) -> dict[str, Any]:
    """A question with its answer, cached: the dataset makes it again at each access, and a group needs it often."""
    entry: dict[str, Any] = _dataset(url)[index]
    return entry


@lru_cache(8)
def _dataset(url: str) -> ProceduralDataset:
    name, _, query = url.removeprefix(_SCHEME).partition("?")
    if name not in DATASETS:
        raise UserError(f"data.url {url!r}: reasoning-gym has no task {name!r}{did_you_mean(name, DATASETS)}")
    try:
        return reasoning_gym.create_dataset(name, **{"seed": 0, "size": 500} | url_settings(query))
    except (AssertionError, TypeError, ValueError) as error:
        raise UserError(f"data.url {url!r}: {error}") from error

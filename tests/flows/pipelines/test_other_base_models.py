"""Pipelines whose checkpoints belong to another base model than the run's, on a server that offers several."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from tinkerflow.backend.core.errors import UserError
from tinkerflow.flows.pipelines import evaluate as evaluating
from tinkerflow.flows.pipelines.evaluate import evaluate
from tinkerflow.flows.pipelines.nightly import NightlyParameters, nightly
from tinkerflow.tasks.pipelines import champions, preparation
from tinkerflow.tasks.pipelines.connection import ServerClients
from tinkerflow.tasks.pipelines.data import DataSource, Use
from tinkerflow.tasks.pipelines.parameters import EvaluateParameters, SftParameters
from tinkerflow.tasks.pipelines.preparation import prepare
from tinkerflow.tasks.pipelines.scoring import Scores

BASES = {"first": ("a", "b"), "twin": ("a", "b"), "other": ("b", "a")}  # base models and the words of their tokenizers


class BegunError(Exception):
    """The run reads its data."""


class Sampler:
    def __init__(self, base: str) -> None:
        words = {word: number for number, word in enumerate(BASES[base])}
        made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a"))
        self.get_tokenizer = lambda: PreTrainedTokenizerFast(tokenizer_object=made)


class Service:
    async def create_sampling_client(self, base_model: str) -> Sampler:
        return Sampler(base_model)


class Rest:
    """The base model of a checkpoint is the first part of its path."""

    async def get_server_capabilities(self) -> Any:
        models = [SimpleNamespace(model_name=name, max_context_length=64) for name in BASES]
        return SimpleNamespace(supported_models=models)

    async def get_weights_info_by_tinker_path(self, path: str) -> Any:
        return SimpleNamespace(base_model=path.removeprefix("tinker://").partition("/")[0])


@pytest.fixture(autouse=True)
def _server(monkeypatch: pytest.MonkeyPatch) -> None:
    @asynccontextmanager
    async def connect(block: str) -> AsyncIterator[ServerClients]:
        yield ServerClients(Service(), Rest())  # type: ignore[arg-type]

    def check(source: DataSource, work_url: str, renderer: Any, use: Use) -> Any:
        raise BegunError

    for module in (preparation, evaluating, champions):
        monkeypatch.setattr(module, "connect", connect)
    for module in (preparation, evaluating):
        monkeypatch.setattr(module, "check_data", check)


@pytest.mark.parametrize(
    ("start", "base", "refused"),
    [
        ("first", "", False),
        ("other", "", True),
        ("twin", "", True),
        ("other", "other", False),
        ("first", "other", True),
    ],
)
async def test_a_run_starts_only_from_a_checkpoint_of_its_own_base_model(start: str, base: str, refused: bool) -> None:
    model = {"start_from": f"tinker://{start}/weights/w", "base_model": base, "format": "text"}
    parameters = SftParameters.model_validate({"data": {"url": "rows.jsonl"}, "model": model})
    rule = rf"model\.start_from tinker://{start}/weights/w: belongs to .* set model\.base_model to '{start}'"
    with pytest.raises(UserError if refused else BegunError, match=rule if refused else None):
        async with prepare(parameters):
            pass


@pytest.mark.parametrize(("weights", "refused"), [("first", False), ("twin", False), ("other", True)])
async def test_weights_with_another_tokenizer_are_not_scored(weights: str, refused: bool) -> None:
    values = {"weights": f"tinker://{weights}/sampler_weights/w", "data": {"url": "rows.jsonl"}, "format": "text"}
    rule = (
        rf"weights tinker://{weights}/.* whose tokenizer differs from that of 'first'.* set the base model to 'other'"
    )
    with pytest.raises(UserError if refused else BegunError, match=rule if refused else None):
        await evaluate.fn(EvaluateParameters.model_validate(values))


@pytest.mark.parametrize(("best", "refused"), [("twin", False), ("other", True)])
async def test_a_champion_with_another_tokenizer_fails_nightly_before_it_trains(
    best: str, refused: bool, tmp_path: Path
) -> None:
    (rows := tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    scores = Scores(rows=2, loss=1.0, exact_match=0.5, samples=[]).model_dump()
    facts = {"number": 1, "weights": f"tinker://{best}/sampler_weights/w", "state": "s", "run": "r", "data": "d"}
    values = {
        "champion": "plants",
        "work": f"file://{tmp_path}",
        "data": {"url": str(rows)},
        "model": {"format": "text"},
    }
    new = champions.Champion.model_validate(facts | {"scores": scores, "promoted_at": "2026-01-01T00:00:00Z"})
    champions.promote.fn(str(values["work"]), "plants", new)
    with pytest.raises(UserError if refused else BegunError, match="champion 'plants' tinker://" if refused else None):
        await nightly.fn(NightlyParameters.model_validate(values | {"held_out": {"url": str(rows)}}))

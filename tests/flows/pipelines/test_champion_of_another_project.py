"""Runs of `nightly` and `evaluate` whose key belongs to another project than the champion."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import tinker
from tests.manual_clock import ManualClock

from tinkerflow.backend.core.errors import UserError
from tinkerflow.flows.pipelines import evaluate as evaluating
from tinkerflow.flows.pipelines import nightly as pipeline
from tinkerflow.flows.pipelines.evaluate import evaluate
from tinkerflow.flows.pipelines.nightly import NightlyParameters, nightly
from tinkerflow.tasks.pipelines import champions
from tinkerflow.tasks.pipelines.connection import ServerClients
from tinkerflow.tasks.pipelines.parameters import EvaluateParameters
from tinkerflow.tasks.pipelines.scoring import Scores

READABLE = "tinker://mine/sampler_weights/final"


class BegunError(Exception):
    """The run began to train or to score."""


@pytest.mark.parametrize("name", ["nightly", "evaluate"])
@pytest.mark.parametrize(("weights", "refused"), [(READABLE, False), ("tinker://other/sampler_weights/final", True)])
async def test_a_champion_of_another_project_fails_the_run_before_it_begins(
    name: str, weights: str, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    async def weights_info(path: str) -> Any:
        if path != READABLE:
            answer = httpx.Response(404, request=httpx.Request("POST", "http://127.0.0.1:1/api/v1/weights_info"))
            raise tinker.NotFoundError("does not exist", response=answer, body=None)
        return SimpleNamespace(base_model="tiny")

    async def capabilities() -> Any:
        return SimpleNamespace(supported_models=[SimpleNamespace(model_name="tiny", max_context_length=64)])

    @asynccontextmanager
    async def connect(block: str) -> AsyncIterator[Any]:
        asked.append(block)
        rest: Any = SimpleNamespace(get_weights_info_by_tinker_path=weights_info, get_server_capabilities=capabilities)
        yield ServerClients(None, rest)  # type: ignore[arg-type]

    async def begin(*parameters: Any) -> None:
        raise BegunError

    monkeypatch.setattr(champions, "connect", connect)
    monkeypatch.setattr(pipeline, "fine_tune", begin)
    monkeypatch.setattr(evaluating, "score_all", begin)
    scores = Scores(rows=2, loss=1.0, exact_match=0.5, samples=[])
    facts = {"number": 1, "weights": weights, "state": "s", "run": "r", "data": "d", "scores": scores}
    best = champions.Champion.model_validate(facts | {"promoted_at": ManualClock().now()})
    values: dict[str, Any] = {"name": "p", "champion": "plants", "connection": "theirs", "work": f"file://{tmp_path}"}
    values["data"] = {"url": "a.jsonl"}
    (rows := tmp_path / "b.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    if name == "evaluate":
        run = evaluate.fn(EvaluateParameters.model_validate(values))
    else:
        run = nightly.fn(NightlyParameters.model_validate(values | {"held_out": {"url": str(rows)}}))
    champions.promote.fn(values["work"], "plants", best)
    reason = (
        r"champion 'plants' belongs to another project than this key, or tinker://other/.* was deleted: use its project"
    )
    with pytest.raises(UserError if refused else BegunError, match=reason if refused else None):
        await run
    assert asked == ["theirs"]
    if name == "evaluate":
        typo = EvaluateParameters.model_validate(values | {"champion": "plant"})
        with pytest.raises(
            UserError, match=r"^champion 'plant': no weights were promoted .* \(did you mean 'plants'\?\)$"
        ):
            await evaluate.fn(typo)

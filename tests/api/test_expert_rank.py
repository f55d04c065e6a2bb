"""The rank of a new model's experts: from the setting, or from the checkpoint that is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.api.conftest import card_json

from tinkerflow.backend.catalog.model_card import ModelCard
from tinkerflow.backend.journal import CheckpointKind, CheckpointSaved, Journal
from tinkerflow.backend.journal.checkpoints import put_checkpoint

MIXTURE = "org/mixture"


@pytest.mark.parametrize(
    ("rule", "base_model", "rank", "own"),
    [("divided", MIXTURE, 32, 4), ("divided", MIXTURE, 4, 1), ("full", MIXTURE, 32, None), ("divided", None, 32, None)],
)
def test_a_new_model(
    start: Callable[..., Any], journal: Journal, rule: str, base_model: str | None, rank: int, own: int | None
) -> None:
    dense = ModelCard.from_json(card_json())
    mixture = replace(dense, name=MIXTURE, experts_per_token=8)
    journal.base_models.register([(card.name, card.to_json()) for card in (dense, mixture)])
    server = start(expert_rank=rule)
    body = {"session_id": server.session(), "model_seq_id": 0, "base_model": base_model or dense.name}
    made = server.post("create_model", {**body, "lora_config": {"rank": rank}}).json()["model_id"]
    view = journal.models.get(made, None)
    assert (view.rank, view.expert_rank) == (rank, own)


@pytest.mark.parametrize("own", [None, 2])
def test_model_from_a_checkpoint_has_the_expert_rank_of_the_checkpoint(
    server: Any, journal: Journal, own: int | None
) -> None:
    model = server.model()
    owner = journal.models.get(model, None).owner
    path = f"tinker://{model}/weights/x"
    base = ModelCard.from_json(card_json()).name
    saved = CheckpointSaved(
        path, model, CheckpointKind.WEIGHTS, "x", owner, base, 16, True, True, True, 3, 10, expert_rank=own
    )
    with journal.models._write() as connection:
        put_checkpoint(connection, saved, server.clock.now())
    body = {"session_id": server.session(), "model_seq_id": 0, "path": path, "optimizer": False}
    made = server.post("load_weights", body).json()["model_id"]
    view = journal.models.get(made, None)
    assert (view.rank, view.expert_rank) == (16, own)

"""A model's optimizer is fixed at its creation, reported by the SDK and saved with its state. Optimizers never mix."""

from __future__ import annotations

import pytest
import tinker
from tinker import types

pytestmark = pytest.mark.thorough

DIMUON = types.DimuonOptimizerConfig()
STEP = types.DimuonParams(learning_rate=2e-2)
TEXT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]


def train(model: tinker.TrainingClient, data: list[tinker.Datum], steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        passed = model.forward_backward(data, "cross_entropy")
        model.optim_step(STEP).result()
        losses.append(passed.result().metrics["loss:sum"])
    return losses


def test_dimuon_trains_saves_and_resumes(server, make_datum):
    client, rest, data = server.client(), server.rest(), [make_datum(TEXT)]
    model = client.create_lora_training_client(server.base_model, rank=8, seed=1, optimizer=DIMUON).result()
    assert model.get_info().optimizer_config.type == "dimuon"
    losses = train(model, data, 6)
    assert losses[-1] < 0.8 * losses[0]
    with pytest.raises(tinker.TinkerError, match="parameters are adamw's, but the model was created with dimuon"):
        model.optim_step(types.AdamParams()).result()

    path = model.save_state("at-6").result().path
    info = rest.get_weights_info_by_tinker_path(path).result()
    assert info.optimizer_config.type == "dimuon"
    resumed = client.create_training_client_from_state_with_optimizer(path).result()
    assert resumed.get_info().optimizer_config.type == "dimuon"
    assert train(resumed, data, 3) == pytest.approx(train(model, data, 3), rel=1e-5)

    fresh = client.create_training_client_from_state(path).result()
    assert fresh.get_info().optimizer_config.type == "adamw"
    fresh.forward_backward(data, "cross_entropy").result()
    assert fresh.optim_step(types.AdamParams()).result().metrics["optimizer_step"] == 1
    refused = pytest.raises(tinker.TinkerError, match="contains the state of dimuon, but model")
    with pytest.warns(FutureWarning, match="load_state"), refused:
        fresh.load_state_with_optimizer(path).result()

"""Custom losses through the real SDK: the server runs a traced loss as the client would."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tinker
import torch

pytestmark = pytest.mark.thorough

TEXTS = [[17, 45, 99, 23, 23, 150, 7, 81], [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], [200, 201, 3]]


@pytest.fixture(scope="module")
def client(server) -> tinker.ServiceClient:
    return server.client()


@pytest.fixture(scope="module")
def trainer(server, client) -> tinker.TrainingClient:
    return client.create_lora_training_client(base_model=server.base_model, rank=8, seed=1).result()


@pytest.fixture
def data(make_datum) -> list[tinker.Datum]:
    made = []
    for i, text in enumerate(TEXTS):
        datum = make_datum(text)
        n = len(text) - 1
        policy = {
            "logprobs": np.full(n, -5.5, np.float32),
            "advantages": np.linspace(-1, 1 + i, n, dtype=np.float32),
            "target_tokens": datum.loss_fn_inputs["target_tokens"],
        }
        made.append(tinker.Datum(model_input=datum.model_input, loss_fn_inputs=policy))
    return made


def squares(logprobs: torch.Tensor, advantages: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = -(logprobs * advantages).mean() + 0.01 * (logprobs**2).mean()
    return loss, {"custom/logprob:mean": logprobs.mean(), "custom/tokens:sum": torch.ones_like(logprobs).sum()}


def test_traced_loss_on_the_server_equals_the_client_loss(client, trainer, data):
    handle = client.create_custom_loss(squares, {"logprobs": 1, "advantages": 1}).result()
    assert handle.loss_id == f"{handle.session_id}:loss:0"
    steps = {}
    for where, loss in (("server", handle), ("client", replace(handle, loss_id=None))):
        result = trainer.forward_backward_custom(data, loss).result()
        norm = trainer.optim_step(tinker.AdamParams(learning_rate=0.0)).result().metrics["grad_norm"]
        steps[where] = {**result.metrics, "grad_norm": norm}
    assert steps["server"].keys() <= steps["client"].keys()
    assert steps["server"] == pytest.approx({k: steps["client"][k] for k in steps["server"]}, rel=1e-4)
    assert steps["server"]["custom/tokens:sum"] == sum(len(text) - 1 for text in TEXTS)


def test_forbidden_graph_and_foreign_handle_are_refused(client, trainer, data, server):
    def sorted_loss(logprobs: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return torch.sort(logprobs).values.sum(), {}

    with pytest.raises(tinker.TinkerError, match=r"torch\.sort"):
        client.create_custom_loss(sorted_loss, {"logprobs": 1}).result()
    other = server.client()
    foreign = other.create_custom_loss(squares, {"logprobs": 1, "advantages": 1}).result()
    mine = client.create_lora_training_client(base_model=server.base_model, rank=4).result()
    disguised = replace(foreign, session_id=mine.get_info().model_id.split(":")[0])
    with pytest.raises(tinker.TinkerError, match="this session has no custom loss"):
        mine.forward_backward_custom(data, disguised).result()
    assert np.isfinite(trainer.forward(data, "importance_sampling").result().metrics["loss:sum"])

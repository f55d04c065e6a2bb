"""The SDK's own loop: the calls of a training script, in order."""

from __future__ import annotations

import numpy as np
import pytest
import tinker
from tinker import types

ADAM = types.AdamParams(learning_rate=1e-2)
TEXTS = [[17, 45, 99, 23, 23, 150, 7, 81], [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], [200, 201]]


@pytest.fixture(scope="module")
def trainer(server) -> tinker.TrainingClient:
    return server.client().create_lora_training_client(base_model=server.base_model, rank=8, seed=1).result()


@pytest.fixture
def data(make_datum) -> list[tinker.Datum]:
    return [make_datum(text) for text in TEXTS]


def logprobs(outputs) -> list[np.ndarray]:
    return [np.array(o["logprobs"].data) for o in outputs.loss_fn_outputs]


def test_operations_are_submitted_together_and_awaited(trainer, data):
    losses = []
    for _ in range(6):
        forward = trainer.forward_backward(data, "cross_entropy")
        update = trainer.optim_step(ADAM)
        result = forward.result()
        losses.append(result.metrics["loss:sum"])
        assert update.result().metrics["grad_norm"] > 0
        assert losses[-1] == pytest.approx(-sum(x.sum() for x in logprobs(result)), rel=1e-5)
        assert [len(x) for x in logprobs(result)] == [len(t) - 1 for t in TEXTS]
    assert losses[-1] < 0.7 * losses[0]


def test_forward_does_not_change_the_model(trainer, data):
    first = trainer.forward(data, "cross_entropy").result()
    second = trainer.forward(data, "cross_entropy").result()
    assert all((a == b).all() for a, b in zip(logprobs(first), logprobs(second), strict=True))


def test_sampler_sees_the_weights_of_its_save(trainer, data):
    before = logprobs(trainer.forward(data, "cross_entropy").result())
    sampler = trainer.save_weights_and_get_sampling_client().result()
    trainer.forward_backward(data, "cross_entropy").result()
    trainer.optim_step(ADAM).result()
    for text, expected in zip(TEXTS, before, strict=True):
        scored = sampler.compute_logprobs(types.ModelInput.from_ints(text)).result()
        assert scored[0] is None
        assert np.allclose(scored[1:], expected, atol=1e-3)


def test_resuming_equals_continuing(server, trainer, data):
    trainer.forward_backward(data, "cross_entropy").result()
    trainer.optim_step(ADAM).result()
    path = trainer.save_state(name="resume").result().path
    assert path == f"tinker://{trainer.model_id}/weights/resume"
    with server.client() as other:
        resumed = other.create_training_client_from_state_with_optimizer(path).result()
        ends = []
        for client in (trainer, resumed):
            for _ in range(2):
                client.forward_backward(data, "cross_entropy").result()
                client.optim_step(ADAM).result()
            ends.append(logprobs(client.forward(data, "cross_entropy").result()))
    assert all((a == b).all() for a, b in zip(*ends, strict=True))


def test_stop_strings_and_no_stop(trainer):
    sampler = trainer.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(TEXTS[1][:3])
    greedy = (
        sampler.sample(prompt, 1, types.SamplingParams(max_tokens=10, temperature=0.0, stop=[])).result().sequences[0]
    )
    assert len(greedy.tokens) == 10
    assert greedy.stop_reason == "length"
    stop = greedy.tokens[4]
    cut = (
        sampler.sample(prompt, 1, types.SamplingParams(max_tokens=10, temperature=0.0, stop=[stop]))
        .result()
        .sequences[0]
    )
    assert cut.stop_reason == "stop"
    assert list(cut.tokens) == list(greedy.tokens[: list(greedy.tokens).index(stop) + 1])

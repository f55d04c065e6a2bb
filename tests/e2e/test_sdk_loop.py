"""The SDK's own loop: the calls of a training script, in order."""

from __future__ import annotations

import numpy as np
import pytest
import tinker
import torch
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


def test_sampled_logprobs_match_the_model(trainer, make_datum):
    sampler = trainer.save_weights_and_get_sampling_client().result()
    prompt = TEXTS[1][:4]
    params = types.SamplingParams(max_tokens=12, temperature=1.0, seed=3, stop=[])
    answer = sampler.sample(types.ModelInput.from_ints(prompt), num_samples=3, sampling_params=params).result()
    assert len({tuple(s.tokens) for s in answer.sequences}) > 1
    for sequence in answer.sequences:
        assert len(sequence.tokens) == len(sequence.logprobs) == 12
        scored = logprobs(trainer.forward([make_datum(prompt + list(sequence.tokens))], "cross_entropy").result())[0]
        assert np.allclose(scored[len(prompt) - 1 :], sequence.logprobs, atol=1e-3)
    again = sampler.sample(types.ModelInput.from_ints(prompt), num_samples=3, sampling_params=params).result()
    assert [s.tokens for s in again.sequences] == [s.tokens for s in answer.sequences]


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


def test_resuming_without_optimizer_starts_it_fresh(server, trainer, data):
    path = trainer.save_state(name="no-optimizer").result().path
    expected = logprobs(trainer.forward(data, "cross_entropy").result())
    with server.client() as other:
        resumed = other.create_training_client_from_state(path).result()
        assert all(
            (a == b).all()
            for a, b in zip(expected, logprobs(resumed.forward(data, "cross_entropy").result()), strict=True)
        )


def test_named_sampler_weights_survive_as_a_checkpoint(server, trainer, data):
    path = trainer.save_weights_for_sampler(name="final").result().path
    expected = logprobs(trainer.forward(data, "cross_entropy").result())
    with server.client() as other:
        sampler = other.create_sampling_client(model_path=path).result()
        assert sampler.get_base_model() == server.base_model
        scored = sampler.compute_logprobs(types.ModelInput.from_ints(TEXTS[0])).result()
    assert np.allclose(scored[1:], expected[0], atol=1e-3)


def test_custom_loss_by_torch_equals_the_built_in(server, make_datum):
    with server.client() as service:
        base = server.base_model
        twins = [service.create_lora_training_client(base_model=base, rank=4, seed=9).result() for _ in range(2)]
        data = [make_datum(TEXTS[0]), make_datum(TEXTS[1])]

        def nll(data: list[tinker.Datum], scored: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
            return -sum(x.sum() for x in scored), {"datums:sum": float(len(data))}

        built_in = twins[0].forward_backward(data, "cross_entropy").result()
        custom = twins[1].forward_backward_custom(data, nll).result()
        assert custom.metrics["loss:sum"] == pytest.approx(built_in.metrics["loss:sum"], rel=1e-5)
        for twin in twins:
            twin.optim_step(ADAM).result()
        first, second = (logprobs(t.forward(data, "cross_entropy").result()) for t in twins)
        assert all(np.allclose(a, b, atol=1e-4) for a, b in zip(first, second, strict=True))


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


def test_many_chunks_arrive_in_order(server, make_datum):
    """More datums than fit one chunk: the SDK sends chunks 2..n first and chunk 1 last."""
    with server.client() as service:
        trainer = service.create_lora_training_client(base_model=server.base_model, rank=2, seed=0).result()
        data = [make_datum([i % 250 + 1, i % 13 + 1, 3]) for i in range(2100)]
        result = trainer.forward_backward(data, "cross_entropy").result()
        assert len(result.loss_fn_outputs) == 2100
        assert result.metrics["loss:sum"] == pytest.approx(-sum(x.sum() for x in logprobs(result)), rel=1e-4)

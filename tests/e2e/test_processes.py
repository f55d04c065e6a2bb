"""Two JAX processes give the numbers of one, through the same command."""

from __future__ import annotations

import numpy as np
from tinker import types


def run(server, make_datum) -> tuple[list[float], list[list[float]]]:
    with server.client() as service:
        client = service.create_lora_training_client(base_model=server.base_model, rank=8, seed=2).result()
        data = [make_datum([1 + (i * k) % 300 for i in range(20 + 9 * k)]) for k in range(1, 6)]
        losses = []
        for _ in range(4):
            forward = client.forward_backward(data, "cross_entropy")
            client.optim_step(types.AdamParams(learning_rate=5e-3)).result()
            losses.append(forward.result().metrics["loss:sum"])
        sampler = client.save_weights_and_get_sampling_client().result()
        scored = [sampler.compute_logprobs(d.model_input).result()[1:] for d in data]
        greedy = types.SamplingParams(max_tokens=8, temperature=0.0, stop=[])
        tokens = [list(sampler.sample(d.model_input, 1, greedy).result().sequences[0].tokens) for d in data[:2]]
        return losses, [*scored, *tokens]


def test_two_processes_agree_with_one(tmp_path, server, start_server, make_datum):
    losses, numbers = run(server, make_datum)
    with start_server(tmp_path, "--processes", "2", prefect="off") as pair:
        assert len(pair.workers()) == 2
        other_losses, other_numbers = run(pair, make_datum)
    assert losses[-1] < losses[0]
    assert np.allclose(losses, other_losses, rtol=1e-4)
    for a, b in zip(numbers, other_numbers, strict=True):
        assert np.allclose(a, b, atol=2e-3)

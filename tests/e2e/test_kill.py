"""kill -9 of a pool process in the middle of a step: the client sees a pause, and the same numbers as without.

One process alone is among those that test_crash_loop.py kills.
"""

from __future__ import annotations

import os
import signal
import time

from tinker import types


def train(client, make_datum, kill=lambda: None):
    """Losses and gradient norms of some steps sent at once; `kill` is called while they are under way."""
    tokens = [1 + i % 200 for i in range(80)]
    futures = []
    for step in range(4):
        futures.append(client.forward_backward([make_datum(tokens[step:])] * 4, "cross_entropy"))
        futures.append(client.optim_step(types.AdamParams(learning_rate=1e-3)))
    kill()
    return [future.result().metrics for future in futures]


def test_one_of_two_processes_killed_costs_a_pause(tmp_path, start_server, make_datum):
    prompt = types.ModelInput.from_ints([1, 2, 3, 4])
    params = types.SamplingParams(max_tokens=100, seed=5, stop=[])
    with start_server(tmp_path, "--processes", "2") as server, server.client() as service:
        base = server.base_model
        undisturbed = service.create_lora_training_client(base_model=base, rank=8, seed=3).result()
        expected = train(undisturbed, make_datum)
        sampler = undisturbed.save_weights_and_get_sampling_client().result()
        said = sampler.sample(prompt, 2, params).result().sequences

        client = service.create_lora_training_client(base_model=base, rank=8, seed=3).result()
        killed = server.workers()
        assert len(killed) == 2
        again = sampler.sample(prompt, 2, params)

        def kill():
            time.sleep(0.1)
            os.kill(killed[-1], signal.SIGKILL)

        assert train(client, make_datum, kill) == expected
        assert [one.tokens for one in again.result().sequences] == [one.tokens for one in said]
        assert not set(server.workers()) & set(killed)
        # Both models live on, the one that was idle as well, and they are still the same.
        assert train(client, make_datum) == train(undisturbed, make_datum)

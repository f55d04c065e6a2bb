"""Several JAX processes and devices give the results of one, and survive a kill of one process or of the engine."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest
from tinker import types

pytestmark = pytest.mark.thorough


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


@pytest.fixture(scope="module")
def pair(tmp_path_factory, start_server):
    with start_server(tmp_path_factory.mktemp("pair"), "--processes", "2", prefect="off") as found:
        assert len(found.workers()) == 2
        yield found


def test_two_processes_agree_with_one(server, pair, make_datum):
    losses, numbers = run(server, make_datum)
    other_losses, other_numbers = run(pair, make_datum)
    assert losses[-1] < losses[0]
    assert np.allclose(losses, other_losses, rtol=1e-4)
    for a, b in zip(numbers, other_numbers, strict=True):
        assert np.allclose(a, b, atol=2e-3)


@pytest.mark.parametrize(("processes", "devices"), [(1, 8), (2, 4)])
def test_default_settings_use_all_devices(
    server, start_server, make_datum, train, tmp_path, monkeypatch, processes, devices
):
    """XLA gives each process several CPU devices."""
    monkeypatch.setenv("XLA_FLAGS", f"--xla_force_host_platform_device_count={devices}")
    with start_server(tmp_path, "--processes", str(processes), prefect="off") as found:
        losses, numbers = run(server, make_datum)
        other_losses, other_numbers = run(found, make_datum)
        assert np.allclose(losses, other_losses, rtol=1e-4)
        for a, b in zip(numbers, other_numbers, strict=True):
            assert np.allclose(a, b, atol=2e-3)
        with found.client() as service:
            undisturbed = service.create_lora_training_client(base_model=found.base_model, rank=8, seed=3).result()
            expected = train(undisturbed)
            client = service.create_lora_training_client(base_model=found.base_model, rank=8, seed=3).result()
            killed = found.workers()
            assert len(killed) == processes
            assert train(client, kill=lambda: os.kill(killed[-1], signal.SIGKILL)) == expected
            assert not set(found.workers()) & set(killed)


def test_killing_one_of_two_processes_costs_only_a_pause(pair, train):
    """`kill -9` in the middle of a step. test_crash_loop.py kills the only process of a group."""
    prompt = types.ModelInput.from_ints([1, 2, 3, 4])
    params = types.SamplingParams(max_tokens=100, seed=5, stop=[])
    with pair.client() as service:
        base = pair.base_model
        undisturbed = service.create_lora_training_client(base_model=base, rank=8, seed=3).result()
        expected = train(undisturbed)
        sampler = undisturbed.save_weights_and_get_sampling_client().result()
        said = sampler.sample(prompt, 2, params).result().sequences

        client = service.create_lora_training_client(base_model=base, rank=8, seed=3).result()
        killed = pair.workers()
        assert len(killed) == 2
        again = sampler.sample(prompt, 2, params)

        def kill():
            time.sleep(0.1)
            os.kill(killed[-1], signal.SIGKILL)

        assert train(client, kill=kill) == expected
        assert [one.tokens for one in again.result().sequences] == [one.tokens for one in said]
        assert not set(pair.workers()) & set(killed)
        # Both models continue, even the idle one, and are still equal.
        assert train(client) == train(undisturbed)


def test_a_killed_engine_leaves_its_processes_to_the_next_one(pair, train):
    with pair.client() as service:
        base = pair.base_model
        undisturbed = service.create_lora_training_client(base_model=base, rank=8, seed=4).result()
        expected = train(undisturbed)
        client = service.create_lora_training_client(base_model=base, rank=8, seed=4).result()
        ((engine,), workers) = pair.parts("engine"), pair.workers()
        # Between two requests, because during one the ranks may have received different numbers of commands.
        os.kill(engine, signal.SIGKILL)
        assert train(client) == expected
        assert pair.parts("engine") != [engine]
        assert pair.workers() == workers  # nothing was loaded or compiled again
        assert train(client) == train(undisturbed)

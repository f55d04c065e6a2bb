"""kill -9 of a pool process in the middle of a step: a named error within 30 s, and the next client works."""

from __future__ import annotations

import os
import signal
import time

import pytest
import tinker
from tinker import types


@pytest.mark.parametrize("processes", [1, 2])
def test_killed_worker_answers_everything_and_comes_back(tmp_path, start_server, make_datum, processes):
    tokens = [1 + i % 200 for i in range(400)]
    with start_server(tmp_path, "--processes", str(processes)) as server, server.client() as service:
        base = server.base_model
        client = service.create_lora_training_client(base_model=base, rank=8).result()
        client.forward_backward([make_datum(tokens)], "cross_entropy").result()
        sampler = service.create_sampling_client(base_model=base).result()
        sampler.sample(types.ModelInput.from_ints(tokens[:4]), 1, types.SamplingParams(max_tokens=2)).result()

        outstanding = [client.forward_backward([make_datum(tokens)] * 40, "cross_entropy") for _ in range(3)]
        outstanding.append(client.optim_step(types.AdamParams()))
        samples = [
            sampler.sample(types.ModelInput.from_ints(tokens[:4]), 1, types.SamplingParams(max_tokens=400, stop=[]))
            for _ in range(2)
        ]
        time.sleep(0.3)
        killed = server.workers()
        assert len(killed) == processes
        os.kill(killed[-1], signal.SIGKILL)
        start = time.monotonic()
        failures = 0
        for future in [*outstanding, *samples]:
            try:
                future.result()
            except tinker.RequestFailedError as error:
                failures += 1
                assert error.category == "server"
        assert time.monotonic() - start < 30
        assert failures >= 3

        with pytest.raises(tinker.RequestFailedError, match="lost"):
            client.forward_backward([make_datum(tokens)], "cross_entropy").result()
        fresh = service.create_lora_training_client(base_model=base, rank=8).result()
        assert fresh.forward_backward([make_datum(tokens)], "cross_entropy").result().metrics["loss:sum"] > 0
        assert (
            len(
                sampler.sample(types.ModelInput.from_ints(tokens[:4]), 1, types.SamplingParams(max_tokens=3, stop=[]))
                .result()
                .sequences[0]
                .tokens
            )
            == 3
        )
        assert not set(server.workers()) & set(killed)

"""After a kill of the service and the loss of its database, the store alone suffices to list and load checkpoints."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress

import pytest
from tinker import types

pytestmark = pytest.mark.thorough


def test_checkpoints_outlive_the_database(tmp_path, start_server, make_datum):
    example = make_datum(list(range(1, 60)))
    prompt = types.ModelInput.from_ints([1, 2, 3, 4, 5, 6])
    with start_server(tmp_path, prefect="off") as server:
        with server.client() as service:
            client = service.create_lora_training_client(
                base_model=server.base_model, rank=8, seed=3, user_metadata={"renderer": "qwen3"}
            ).result()
            client.forward_backward([example], "cross_entropy").result()
            client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
            state = client.save_state("state").result().path
            weights = client.save_weights_for_sampler("sampler").result().path
            said = service.create_sampling_client(model_path=weights).result().compute_logprobs(prompt).result()
            untrained = service.create_sampling_client(base_model=server.base_model).result()
            assert said != untrained.compute_logprobs(prompt).result()
            loss = client.forward([example], "cross_entropy").result().metrics
        before = listed(server)
        assert set(before) == {state, weights}
        for pid in (server.process.pid, *server.parts("engine", "api"), *server.workers()):
            with suppress(ProcessLookupError):  # the parts die with `up`
                os.kill(pid, signal.SIGKILL)
        server.process.wait()
    for file in tmp_path.glob("journal.db*"):
        file.unlink()
    (tmp_path / "jax-cache").unlink()  # start_server creates it

    command = [
        sys.executable,
        "-m",
        "tinkerflow",
        "checkpoint",
        "rebuild-index",
        "--data-dir",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "restored 2, known 0, damaged 0" in done.stdout

    with start_server(tmp_path, prefect="off") as server, server.client() as service:
        assert listed(server) == before
        run = server.rest().get_training_run_by_tinker_path(state).result()
        assert run.user_metadata == {"renderer": "qwen3"}
        assert run.last_checkpoint == before[state]
        sampler = service.create_sampling_client(model_path=weights).result()
        assert sampler.compute_logprobs(prompt).result() == said
        client = service.create_training_client_from_state_with_optimizer(state).result()
        assert client.forward([example], "cross_entropy").result().metrics == loss


def listed(server):
    return {one.tinker_path: one for one in server.rest().list_user_checkpoints().result().checkpoints}

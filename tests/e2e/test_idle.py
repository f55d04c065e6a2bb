"""Idle worker processes are released, and the next client waits for new ones."""

from __future__ import annotations

import pytest
from browser import wait_for
from tinker import types

pytestmark = pytest.mark.thorough


def test_model_continues_bit_for_bit_after_its_workers_were_released(
    tmp_path, start_server, make_datum, monkeypatch
) -> None:
    monkeypatch.setenv("TINKERFLOW_IDLE_RELEASE", "3")
    with start_server(tmp_path, prefect="off") as server, server.client() as service:
        tokens = [1 + i % 200 for i in range(80)]

        def steps(client, first: int) -> list[dict[str, float]]:
            futures = []
            for step in range(first, first + 2):
                futures.append(client.forward_backward([make_datum(tokens[step:])] * 4, "cross_entropy"))
                futures.append(client.optim_step(types.AdamParams(learning_rate=1e-3)))
            return [future.result().metrics for future in futures]

        def scored(sampler) -> list[float | None]:
            return sampler.compute_logprobs(types.ModelInput.from_ints(tokens[:20])).result()

        one, other = (
            service.create_lora_training_client(base_model=server.base_model, rank=8, seed=3).result() for _ in range(2)
        )
        expected = steps(one, 0) + steps(one, 2)
        sampler = one.save_weights_and_get_sampling_client().result()
        before = scored(sampler)
        found = steps(other, 0)
        (worker,) = server.workers()
        released = "no request for 3 s: worker processes are released until the next request"
        wait_for(lambda: released in (tmp_path / "up.log").read_text() and not server.workers())

        found += steps(other, 2)
        assert found == expected
        assert scored(sampler) == before
        assert "a request is waiting: worker processes are started again" in (tmp_path / "up.log").read_text()
        assert server.workers() != [worker]

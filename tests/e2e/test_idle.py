"""Idle worker processes are released, and the next client waits for new ones."""

from __future__ import annotations

import pytest
from tests.waiting import wait_for
from tinker import types

pytestmark = pytest.mark.thorough


def test_model_continues_bit_for_bit_after_its_workers_were_released(
    tmp_path, start_server, train, monkeypatch
) -> None:
    monkeypatch.setenv("TINKERFLOW_IDLE_RELEASE", "3")
    with start_server(tmp_path, prefect="off") as server, server.client() as service:

        def scored(sampler) -> list[float | None]:
            return sampler.compute_logprobs(types.ModelInput.from_ints(list(range(1, 21)))).result()

        one, other = (
            service.create_lora_training_client(base_model=server.base_model, rank=8, seed=3).result() for _ in range(2)
        )
        expected = train(one)
        sampler = one.save_weights_and_get_sampling_client().result()
        before = scored(sampler)
        found = train(other, range(2))
        (worker,) = server.workers()
        released = "no request for 3 s: worker processes are released until the next request"
        wait_for(lambda: released in (tmp_path / "up.log").read_text() and not server.workers())

        found += train(other, range(2, 4))
        assert found == expected
        assert scored(sampler) == before
        assert "a request is waiting: worker processes are started again" in (tmp_path / "up.log").read_text()
        assert server.workers() != [worker]

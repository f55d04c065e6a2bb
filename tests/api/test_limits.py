"""Limits as the SDK meets them."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import tinker
from tests.api.conftest import BASE
from tests.api.test_futures import PARAMS, PROMPT, calls_of, sample, sampler
from tinker import types

from tinkerflow.api import identity


def test_samples_over_the_limit_wait_in_the_client(start: Any, engine: Any) -> None:
    server = start(max_sampling_requests=2)
    with tinker.ServiceClient(base_url=server.url) as service:
        sampling = service.create_sampling_client(base_model=BASE).result()
        engine.paused = True
        seen = calls_of(server)
        futures = [sampling.sample(PROMPT, 1, PARAMS) for _ in range(4)]
        deadline = time.monotonic() + 10
        while seen.count("asample") < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(server.journal.requests.pending_samples(10)) <= 2
        threading.Timer(0.2, lambda: setattr(engine, "paused", False)).start()
        assert all(future.result().sequences for future in futures)
    assert seen.count("asample") > 4


def test_what_is_told_of_a_full_queue(start: Any, engine: Any) -> None:
    server = start(max_sampling_requests=1)
    engine.paused = True
    name = sampler(server)
    sample(server, name, 0)
    body = {"sampling_session_id": name, "seq_id": 1, "prompt": {"chunks": []}, "sampling_params": {}}
    refused = server.post("asample", body)
    assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
    assert "max_sampling_requests" in refused.json()["detail"]


def test_training_over_the_limits_fails_its_future_and_the_next_works(start: Any, engine: Any) -> None:
    server = start(max_queued_tokens=4, max_live_models=1, max_stored_bytes=1)
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([2, 3, 4]),
        loss_fn_inputs={"target_tokens": [3, 4, 5], "weights": [1.0, 1.0, 1.0]},
    )
    with tinker.ServiceClient(base_url=server.url) as service:
        training = service.create_lora_training_client(BASE, rank=8).result()
        with pytest.raises(tinker.RequestFailedError, match="max_live_models"):
            service.create_lora_training_client(BASE, rank=8).result()
        with pytest.raises(tinker.RequestFailedError, match="6 tokens, and this project has 0 waiting"):
            training.forward_backward([datum, datum], "cross_entropy").result()
        assert training.forward_backward([datum], "cross_entropy").result().metrics["loss:sum"] > 0
        training.save_state("one").result()
        with pytest.raises(tinker.RequestFailedError, match="max_stored_bytes"):
            training.save_state("two").result()
        sampling = training.save_weights_and_get_sampling_client().result()  # kept for sampling only, not stored
        assert sampling.sample(PROMPT, 1, PARAMS).result().sequences
        training.optim_step(types.AdamParams()).result()


def test_a_project_can_have_limits_of_its_own(start: Any, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "REMEMBERED_SECONDS", 0.0)
    server = start(max_live_models=2)
    keys = {project: server.journal.keys.create("key", project)[1] for project in ("small", "others")}
    server.journal.project_limits.set("small", {"max_live_models": 1, "max_stored_bytes": 1})

    def train(project: str, models: int) -> None:
        with tinker.ServiceClient(base_url=server.url, api_key=keys[project]) as service:
            runs = [service.create_lora_training_client(BASE, rank=8).result() for _ in range(models)]
            for name in ("one", "two"):
                runs[0].save_state(name).result()

    train("others", 2)
    with pytest.raises(tinker.RequestFailedError, match=r"at most 1 \(max_live_models\)"):
        train("small", 2)
    server.journal.project_limits.set("small", {"max_live_models": 0})
    with pytest.raises(tinker.RequestFailedError, match="nothing is saved from 1 on"):
        train("small", 3)

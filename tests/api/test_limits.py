"""Limits of projects, as seen through the SDK."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import tinker
from tests.api.conftest import BASE, KEY
from tests.api.test_futures import PARAMS, PROMPT, calls_of, sample, sampler
from tests.waiting import wait_for
from tinker import types

from tinkerflow.api import identity
from tinkerflow.flows.pipelines.fine_tuning import _prepared
from tinkerflow.tasks.pipelines.connection import ServerClients
from tinkerflow.tasks.pipelines.control import Control
from tinkerflow.tasks.pipelines.parameters import SftParameters
from tinkerflow.tasks.pipelines.progress import RunProgress
from tinkerflow.tasks.pipelines.trainer import Lineage, Trainer, train_segment


def test_samples_over_the_limit_wait_in_the_client(start: Any, engine: Any) -> None:
    server = start(max_sampling_requests=2)
    with tinker.ServiceClient(base_url=server.url) as service:
        sampling = service.create_sampling_client(base_model=BASE).result()
        engine.paused = True
        seen = calls_of(server)
        futures = [sampling.sample(PROMPT, 1, PARAMS) for _ in range(4)]
        wait_for(lambda: seen.count("asample") >= 4)
        assert len(server.journal.requests.pending_samples(10)) <= 2
        threading.Timer(0.2, lambda: setattr(engine, "paused", False)).start()
        assert all(future.result().sequences for future in futures)
    assert seen.count("asample") > 4


def test_full_queue_answers_429_with_retry_after_and_the_limit(start: Any, engine: Any) -> None:
    server = start(max_sampling_requests=1)
    engine.paused = True
    name = sampler(server)
    sample(server, name, 0)
    body = {"sampling_session_id": name, "seq_id": 1, "prompt": {"chunks": []}, "sampling_params": {}}
    refused = server.post("asample", body)
    assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
    assert refused.json()["detail"].endswith(
        "waiting sampling requests, its limit (max_sampling_requests); wait for answers, or ask the operator "
        "(`tinkerflow limit set PROJECT max_sampling_requests=N`)"
    )


def test_training_over_the_limits_fails_only_its_future(start: Any, engine: Any) -> None:
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


def test_project_limits_override_the_settings(start: Any, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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
    with pytest.raises(tinker.RequestFailedError, match="must be below 1 to save more"):
        train("small", 3)


def test_an_unloaded_model_no_longer_counts(start: Any, engine: Any) -> None:
    server = start(max_live_models=1)
    with tinker.ServiceClient(base_url=server.url) as service:
        training = service.create_lora_training_client(BASE, rank=8).result()
        saved = training.save_state("one").result().path
        assert server.post("unload_model", {"model_id": "sess-x:train:0"}).status_code == 404
        asked = server.post("unload_model", {"model_id": training.model_id, "type": "unload_model"}).json()
        done = server.result(asked["request_id"]).json()
        assert tinker.types.UnloadModelResponse.model_validate(done).model_id == training.model_id
        again = server.post("unload_model", {"model_id": training.model_id})
        assert again.status_code == 410 and "has already ended" in again.json()["detail"]
        with pytest.raises(tinker.RequestFailedError, match="was unloaded: by its client"):
            training.optim_step(types.AdamParams()).result()
        service.create_training_client_from_state(saved).result()


class FailingOnce:
    """A recipe whose second step fails in the first attempt, with the step after it under way."""

    ahead, failures = 1, 1

    async def submit(self, client: Any, step: int, params: Any) -> dict[str, float]:
        """Make a step, or fail."""
        update = client.optim_step(params)
        if step == 1 and self.failures:
            self.failures -= 1
            raise ConnectionError("the reward's server is away")
        await update
        return {"grad_norm": 0.0}

    def begin(self, step: int) -> None:
        """A step depends on no other step."""

    async def prepare(self, trainer: Trainer) -> None:
        """No value is measured."""

    async def held_out(self, client: Any) -> dict[str, float]:
        """No rows are held out."""
        return {}


async def test_each_pipeline_attempt_can_use_the_only_model_slot(start: Any, engine: Any, tmp_path: Any) -> None:
    server = start(max_live_models=1)
    values = {"data": {"url": "rows.jsonl"}, "training": {"steps": 4, "segment_steps": 2}, "samples": {"rows": 0}}
    parameters = SftParameters.model_validate(values)
    with tinker.ServiceClient(base_url=server.url) as service:
        clients = ServerClients(service, tinker.RestClient(base_url=server.url), server.url, KEY)

        def run(name: str) -> Trainer:
            async def preview(client: Any) -> list[Any]:
                return []

            known: Any = SimpleNamespace(parameters=parameters, server=clients, preview=preview)
            known.model = SimpleNamespace(name=BASE)
            progress = RunProgress(f"{tmp_path.as_uri()}/work", name, "plan")
            return Trainer(known, FailingOnce(), progress, Lineage("sft", name, "data", "code"))  # type: ignore[arg-type]

        for name in ("first", "second"):  # both share the session, as the points of a sweep do
            trainer = run(name)
            async with _prepared(trainer, trainer.progress.segments()):
                with pytest.raises(ConnectionError):
                    await train_segment.fn(trainer, 1, 2, Control(), lambda _: None)
                for first in (1, 3):
                    await train_segment.fn(trainer, first, first + 1, Control(), lambda _: None)
            assert [segment.last_step for segment in trainer.progress.segments()] == [2, 4]
            assert trainer.newest_run and not trainer.run_id

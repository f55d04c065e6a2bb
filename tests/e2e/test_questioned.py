"""Long histories: reruns of concurrent runs, and forks on Postgres with two API replicas after kills."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest
import tinker
from tests.benchmarks.replicas import replicas, wait_for
from tinker import types

from tinkerflow.backend.store import Store
from tinkerflow.deployments.recorded_run import Api, RecordedRun
from tinkerflow.deployments.rerun import Changes, Report, Rerun

STEPS, RUNS, AHEAD = 1000, 3, 8
pytestmark = pytest.mark.thorough


def started(service: tinker.ServiceClient, seed: int) -> Any:
    metadata = {"history": "true"}
    return service.create_lora_training_client("tinkerflow/tiny", rank=8, seed=seed, user_metadata=metadata).result()


def made(trainer: Any, make_datum: Any, seed: int, step: int) -> list[Any]:
    """Submit a step on two random rows, and return its futures."""
    draw = Random(1000 * seed + step)
    data = [make_datum([draw.randrange(1, 150) for _ in range(draw.randrange(6, 12))]) for _ in range(2)]
    forward = trainer.forward_backward(data, "cross_entropy")
    return [forward, trainer.optim_step(types.AdamParams(learning_rate=1e-3))]


def test_concurrent_runs_are_rerun_with_equal_hashes(server: Any, make_datum: Any) -> None:
    def train(seed: int) -> str:
        with server.client() as service:
            trainer = started(service, seed)
            futures: list[Any] = []
            for step in range(STEPS):
                futures += made(trainer, make_datum, seed, step)
                while len(futures) > AHEAD:
                    futures.pop(0).result()
            for future in futures:
                future.result()
            return str(trainer.model_id)

    def rerun(run_id: str) -> Report:
        with Api(server.api_url, "tml-test") as api:
            return Rerun(RecordedRun.find(api, run_id), Changes()).execute()

    with ThreadPoolExecutor(RUNS) as threads:
        reports = list(threads.map(rerun, list(threads.map(train, range(RUNS)))))
    assert [(report.steps, report.compared, report.parted) for report in reports] == [(STEPS, 2 * STEPS, None)] * RUNS


def test_forks_on_postgres_with_two_replicas_equal_the_saved_checkpoints(
    tmp_path: Path, postgres_database: Callable[[str], str], compiled_programs: Path, make_datum: Any
) -> None:
    (tmp_path / "jax-cache").symlink_to(compiled_programs)
    with (
        replicas(tmp_path, postgres_database("forks"), {}) as found,
        tinker.ServiceClient(base_url=found.url, api_key="tml-test") as service,
    ):
        trainer = started(service, 1)
        for step in range(1, 9):
            for future in (*made(trainer, make_datum, 1, step), trainer.save_state(f"saved-{step}")):
                future.result()
            if step == 3:
                found.engines[0].kill()  # the other engine takes over
            elif step == 6:
                found.apis[0].kill()
                wait_for(found.start_api(0), "ready\n")
        store, run = Store.open(f"file://{tmp_path / 'store'}"), f"tinker://{trainer.model_id}/weights"
        for step in (2, 4, 7):
            service.create_training_client_from_state_with_optimizer(f"{run}/@{step}").result()
            saved, forked = store.find(f"{run}/saved-{step}"), store.find(f"{run}/@{step}")
            assert saved is not None and forked is not None and saved.files == forked.files, step

"""A pipeline with its data, work folder, results and checkpoints on gs://, served by a fake of the GCS API."""

from __future__ import annotations

from collections.abc import Iterator

import prefect.settings
import pytest
from prefect import get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import StateType
from tests.store.fake_gcs import FakeGcs

from tinkerflow.backend.core.errors import UserError
from tinkerflow.deployments.run import example_file
from tinkerflow.deployments.serve import ensure_results
from tinkerflow.flows.pipelines.fine_tuning import TrainingResult
from tinkerflow.flows.pipelines.sft import SftParameters, SftRecipe, sft

pytestmark = pytest.mark.thorough

WORK, DATA = "gs://bucket/pipelines", "gs://bucket/given/colours.jsonl"


@pytest.fixture
def gcs(monkeypatch) -> Iterator[FakeGcs]:
    """A fake GCS that contains an example's rows."""
    with FakeGcs() as fake:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", fake.url)
        monkeypatch.setenv("NO_GCE_CHECK", "true")  # otherwise the search for credentials on the network takes seconds
        fake.write("given/colours.jsonl", example_file("colours-train.jsonl").read_bytes(), None)
        yield fake


@pytest.fixture
def tiny(pipelines, gcs, tmp_path, compiled_programs):
    """A service that stores its checkpoints on gs:// and uses the shared server's Prefect."""
    from tinkerflow.deployments.testing import (
        serve_tiny,  # a plugin of test_testing.py, which must be the first to import it
    )

    (tmp_path / "jax-cache").symlink_to(compiled_programs)
    with serve_tiny(tmp_path, store="gs://bucket/store") as service:
        yield service


def kept(gcs: FakeGcs, folder: str) -> list[str]:
    """Names of the objects in a folder of the bucket, relative to it."""
    return sorted(name.removeprefix(folder) for name in gcs.objects if name.startswith(folder))


async def test_failed_run_resumes_from_gcs_and_returns_its_result(gcs, tiny, tmp_path, monkeypatch):
    given = SftParameters.model_validate(
        {"name": "on-gs", "resume": "on-gs", "work": WORK, "data": {"url": DATA}}
        | {"model": {"rank": 8}, "samples": {"rows": 0}}
        | {"training": {"steps": 4, "segment_steps": 2, "batch_size": 8, "learning_rate": 0.005}}
    )
    submit, asked = SftRecipe.submit, []

    def dies(self, client, step, params):
        asked.append(step)
        if asked == [0, 1, 2, 3]:  # segments have two steps, so step 2 is lost
            raise UserError("it ends here")  # never retried
        return submit(self, client, step, params)

    monkeypatch.setattr(SftRecipe, "submit", dies)
    results = await ensure_results(f"{WORK}/results")
    with prefect.settings.temporary_settings({getattr(prefect.settings, name): results[name] for name in results}):
        with pytest.raises(UserError, match="it ends here"):
            await sft(given)
        assert {name.partition("/")[0] for name in kept(gcs, "pipelines/")} == {
            "data",
            "tokens",
            "progress",
            "results",
        }
        assert kept(gcs, "pipelines/progress/on-gs/") == [
            "parameters.json",
            "plan.json",
            "segments/00000001.json",
        ]
        first = dict(gcs.objects)  # including the failure, which is the result of its run

        made = await sft(given)
        async with get_client() as client:
            filters = FlowRunFilter.model_validate({"name": {"any_": ["sft on-gs"]}})
            runs = {run.state_type: run for run in await client.read_flow_runs(flow_run_filter=filters)}
        assert runs.keys() == {StateType.FAILED, StateType.COMPLETED}
        handed_out = TrainingResult.model_validate(await runs[StateType.COMPLETED].state.aresult())
    assert asked == [0, 1, 2, 3, 2, 3]
    assert handed_out == made
    (result,) = set(kept(gcs, "pipelines/results/")) - {name.removeprefix("pipelines/results/") for name in first}
    assert made.weights in gcs.objects[f"pipelines/results/{result}"].data.decode()
    assert kept(gcs, "pipelines/progress/on-gs/segments/") == ["00000001.json", "00000003.json"]
    assert all(gcs.objects[name] is one for name, one in first.items() if name.startswith("pipelines/"))  # written once
    commits = [name for name in kept(gcs, "store/runs/") if name.endswith("commit.json")]
    assert {name.split("/", 1)[1] for name in commits} >= {
        "weights/step-00000002/commit.json",
        "weights/step-00000004/commit.json",
        "sampler_weights/final/commit.json",
    }
    local = [one.name for name in ("store", "pipelines", "work") for one in (tmp_path / name).rglob("*")]
    assert local == [".lock"]
    with tiny.client() as service:
        assert service.create_training_client_from_state(made.state).result().get_info().lora_rank == 8

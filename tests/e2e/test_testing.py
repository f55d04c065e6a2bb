"""The fixtures that users import, as the README shows them."""

from __future__ import annotations

import pytest
from prefect import flow, get_client, task
from prefect.client.schemas.objects import StateType

from tinkerflow.deployments.run import example_file
from tinkerflow.flows.pipelines.sft import SftParameters, sft

pytestmark = pytest.mark.thorough

pytest_plugins = ["tinkerflow.deployments.testing"]
MOST = {"steps": 2, "segment_steps": 1, "batch_size": 2}


@task(retries=1)
def doubled(number: int) -> int:
    return 2 * number


@flow
def twice_doubled(number: int) -> int:
    return doubled(doubled(number, return_state=False))


async def test_a_whole_pipeline_without_a_prefect_server(tiny_service, plain_calls, tmp_path):
    given = {
        "name": "mine",
        "resume": "mine",
        "work": f"file://{tmp_path}",
        "data": {"url": str(example_file("colours-train.jsonl"))},
        "model": {"rank": 4},
        "training": MOST,
        "samples": {"rows": 0},
    }
    trained = await sft(SftParameters.model_validate(given))
    assert trained.steps == 2
    with tiny_service.client() as service:
        assert service.create_training_client_from_state(trained.state).result().get_info().lora_rank == 4


def test_tasks_and_flows_are_plain_functions(plain_calls, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")  # no server is called
    assert twice_doubled(5) == 20


async def test_the_harness_keeps_states(prefect_harness):
    state = twice_doubled(5, return_state=True)
    assert state.is_completed()
    assert await state.aresult() == 20
    async with get_client() as client:
        runs = await client.read_flow_runs()
    assert [run.state_type for run in runs] == [StateType.COMPLETED]

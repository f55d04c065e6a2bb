"""What `tinkerflow serve` reads from a prefect.yaml, and what it refuses before anything is served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tinkerflow.backend.core.errors import UserError
from tinkerflow.deployments.run import example_file, read_config
from tinkerflow.deployments.serve import Deployment, make_deployment, read_deployments, read_tag_limits


def test_deployments_with_paths_relative_to_the_file(tmp_path: Path) -> None:
    file = tmp_path / "prefect.yaml"
    file.write_text(
        "deployments:\n"
        "  - {name: a, entrypoint: m.f, parameters: {parameters: {data: {url: rows.jsonl}}}, work_pool: {name: p}}\n"
        "  - {name: b, entrypoint: m.f, schedules: [{cron: 0 2 * * *}], paused: true}\n"
        "tag_limits: {nightly: 2}\n"
    )
    first, second = read_deployments(file)
    assert first.parameters == {"parameters": {"data": {"url": str(tmp_path / "rows.jsonl")}}}
    assert (second.schedules, second.paused, second.tags) == ([{"cron": "0 2 * * *"}], True, [])
    assert read_tag_limits(file) == {"nightly": 2}


@pytest.mark.parametrize("text", ["name: x", "deployments: [", "- a", ""])
def test_a_file_without_deployments_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "prefect.yaml").write_text(text)
    with pytest.raises(UserError, match=r"must be a prefect\.yaml with deployments"):
        read_deployments(tmp_path / "prefect.yaml")
    with pytest.raises(UserError, match=r"must be a prefect\.yaml with deployments"):
        read_deployments(tmp_path / "none.yaml")


@pytest.mark.parametrize("limits", ["[nightly]", "{nightly: 0}", "{nightly: many}"])
def test_a_limit_that_is_none_is_refused(tmp_path: Path, limits: str) -> None:
    (tmp_path / "prefect.yaml").write_text(f"deployments: []\ntag_limits: {limits}\n")
    with pytest.raises(UserError, match="must give a number of at least 1 for each tag"):
        read_tag_limits(tmp_path / "prefect.yaml")


@pytest.mark.parametrize(
    ("schedule", "kind"), [({"cron": "0 2 * * *", "timezone": "UTC"}, "cron"), ({"interval": 60}, "interval")]
)
async def test_a_deployment_of_a_pipeline(schedule: dict[str, Any], kind: str) -> None:
    values = read_config(example_file("sft.yaml"))
    wanted = Deployment(
        name="mine",
        entrypoint="tinkerflow.flows.pipelines.sft.sft",
        parameters={"parameters": values},
        tags=["t"],
        schedules=[schedule],
        concurrency_limit={"limit": 1, "collision_strategy": "CANCEL_NEW"},
    )
    made = await make_deployment(wanted)
    assert (made.flow_name, made.name, made.tags) == ("sft", "mine", ["t"])
    assert made.entrypoint == "tinkerflow.flows.pipelines.sft.sft"
    assert getattr(made.schedules[0].schedule, kind) is not None


async def test_wrong_parameters_and_schedules_are_refused_now() -> None:
    entrypoint = "tinkerflow.flows.pipelines.sft.sft"
    with pytest.raises(ValidationError, match="data"):
        await make_deployment(Deployment(name="x", entrypoint=entrypoint, parameters={"parameters": {}}))
    parameters = {"parameters": read_config(example_file("sft.yaml"))}
    with pytest.raises(UserError, match="must have cron, or interval in seconds"):
        await make_deployment(
            Deployment(name="x", entrypoint=entrypoint, parameters=parameters, schedules=[{"every": "day"}])
        )

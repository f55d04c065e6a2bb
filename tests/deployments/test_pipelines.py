"""Every registered pipeline is complete: example, entrypoint, help, deployments and documentation."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from prefect.flows import load_flow_from_entrypoint
from typer.testing import CliRunner

from tinkerflow.deployments import prefect_files
from tinkerflow.deployments.commands import command_line
from tinkerflow.deployments.config import read_config
from tinkerflow.deployments.run import example_file
from tinkerflow.deployments.serve import read_file
from tinkerflow.flows.pipelines import Pipeline, pipelines
from tinkerflow.tasks.pipelines.parameters import PARAMETERS, SftParameters

ROOT = Path(__file__).parents[2]
EVERY = pytest.mark.parametrize("pipeline", pipelines().values(), ids=pipelines())


def test_pipelines_parameters_and_examples_have_the_same_names() -> None:
    examples = sorted(file.stem for file in example_file("").glob("*.yaml"))
    assert examples == list(pipelines()) == list(PARAMETERS)
    assert all(pipeline.parameters is PARAMETERS[name] for name, pipeline in pipelines().items())


@pytest.mark.parametrize("command", [("serve", "--file", "p.yaml"), ("run", "sft", "--config", "s.yaml")])
def test_flows_work_in_the_data_dir_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setenv("TINKERFLOW_DATA_DIR", "/elsewhere")
    found = []

    def look(*_: object, **__: object) -> bool:
        found.append(SftParameters.model_construct().work_url)
        return True

    monkeypatch.setattr("tinkerflow.deployments.serve.serve", look)
    monkeypatch.setattr("tinkerflow.deployments.run.run", look)
    monkeypatch.setattr("tinkerflow.deployments.commands.pipelines._end", lambda work: work())
    done = CliRunner().invoke(command_line("pipelines"), [*command, "--data-dir", str(tmp_path)])
    assert (done.exit_code, found) == (0, [f"file://{tmp_path}/pipelines"])


@EVERY
def test_the_example_fits_the_parameters_and_its_data_is_there(pipeline: Pipeline) -> None:
    parameters = pipeline.parameters.model_validate(read_config(example_file(f"{pipeline.name}.yaml")))
    for source in (parameters.data, getattr(parameters, "held_out", None)):  # type: ignore[attr-defined]
        assert source is None or Path(source.url).is_file()


@EVERY
def test_the_entrypoint_loads_the_flow(pipeline: Pipeline) -> None:
    assert pipeline.entrypoint == f"tinkerflow.flows.pipelines.{pipeline.name}.{pipeline.name}"
    flow = load_flow_from_entrypoint(pipeline.entrypoint, use_placeholder_flow=False)
    assert flow is pipeline.flow
    (definition,) = flow.parameters.properties.values()
    assert pipeline.parameters.__name__ in str(definition)  # so that the Prefect UI has a form for it
    values = read_config(example_file(f"{pipeline.name}.yaml"))
    validated = flow.validate_parameters({"parameters": values})["parameters"]  # as a flow run of a deployment does
    assert validated == pipeline.parameters.model_validate(values)


@EVERY
def test_the_help_and_the_documentation_name_it(pipeline: Pipeline) -> None:
    shown = CliRunner().invoke(command_line("pipelines"), ["run", "--help"], env={"COLUMNS": "200"}).stdout
    assert f" {pipeline.name}" in shown.replace(",", " ")
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    assert any(f"`{pipeline.name}`" in page.read_text() for page in pages)


def test_every_parameter_is_described() -> None:
    for parameters in (pipeline.parameters for pipeline in pipelines().values()):
        schema = parameters.model_json_schema()
        for name, model in {"": schema, **schema["$defs"]}.items():
            found = model.get("properties", {}).items()
            # A field that is itself a model shows the model's docstring if both texts are the same.
            missing = [field for field, shown in found if "description" not in shown and "$ref" not in shown]
            assert not missing, f"{parameters.__name__}.{name}: {missing}"


@pytest.mark.parametrize("file", prefect_files.files(), ids=lambda file: file.name)
def test_prefect_file_matches_the_registered_pipelines(file: Path) -> None:
    again = "run `python -m tinkerflow.deployments.prefect_files`"
    assert file.read_text() == prefect_files.rewritten(file), again
    deployed = read_file(file).deployments
    assert [one.entrypoint for one in deployed] == [pipeline.entrypoint for pipeline in pipelines().values()]
    for one, pipeline in zip(deployed, pipelines().values(), strict=True):
        pipeline.parameters.model_validate(one.parameters["parameters"])
        assert [schedule["cron"] for schedule in one.schedules] == ([pipeline.cron] if pipeline.cron else [])
    assert {one["work_pool"]["name"] for one in yaml.safe_load(file.read_text())["deployments"]} <= {
        "tinkerflow",
        "tinkerflow-kubernetes",
    }


def test_existing_deployments_keep_their_names() -> None:
    """Prefect servers have stored the flows and deployments under these names since the first release."""
    names = {(pipeline.name, pipeline.deployment) for pipeline in pipelines().values()}
    assert names >= {(n, "by-hand") for n in ("sft", "dpo", "rl", "distill", "sweep", "evaluate")}
    assert ("nightly", "every-night") in names

"""Generate the deployments in prefect.yaml and prefect-kubernetes.yaml from the pipelines and their examples.

`python -m tinkerflow.deployments.prefect_files` writes the files. A test compares the files with the pipelines.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from tinkerflow.deployments.run import example_file
from tinkerflow.flows.pipelines import Pipeline, pipelines

_BEGIN = "deployments: # below this line: python -m tinkerflow.deployments.prefect_files\n"


def rewritten(file: Path) -> str:
    """The text of a file with new deployments. The part above them stays unchanged."""
    head = file.read_text(encoding="utf-8").partition(_BEGIN)[0]
    on_kubernetes = file.name == "prefect-kubernetes.yaml"
    return head + _BEGIN + "\n".join(_entry(pipeline, on_kubernetes) for pipeline in pipelines().values())


def files() -> list[Path]:
    folder = Path(str(resources.files("tinkerflow.deployments")))
    return [folder / "prefect.yaml", folder / "prefect-kubernetes.yaml"]


def _entry(pipeline: Pipeline, on_kubernetes: bool) -> str:
    parameters = yaml.safe_load(example_file(f"{pipeline.name}.yaml").read_text(encoding="utf-8"))
    parameters = _moved(parameters, "gs://bucket/data/" if on_kubernetes else "examples/")
    if on_kubernetes:
        parameters |= {"connection": "tinkerflow", "work": "gs://bucket/pipelines"}
    entry: dict[str, Any] = {
        "name": pipeline.deployment,
        "description": pipeline.summary,
        "entrypoint": pipeline.entrypoint,
        "parameters": {"parameters": parameters},
        "tags": ["tinkerflow", *([pipeline.name] if pipeline.cron else [])],
    }
    if pipeline.cron:
        entry |= {"schedules": [{"cron": pipeline.cron, "timezone": "UTC"}], "concurrency_limit": 1}
    text = yaml.safe_dump([entry], sort_keys=False, width=120, default_flow_style=None)
    return "".join(f"  {line}\n" for line in [*text.splitlines(), "  work_pool: *pool"])


def _moved(values: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """The parameters with every `url` of example data moved to `folder`."""
    moved = {name: _moved(value, folder) if isinstance(value, dict) else value for name, value in values.items()}
    return moved | ({"url": f"{folder}{moved['url']}"} if "url" in moved else {})


if __name__ == "__main__":
    for file in files():
        file.write_text(rewritten(file), encoding="utf-8")

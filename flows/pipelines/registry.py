"""The registry of pipelines: every module of this folder that declares a `PIPELINE`."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from prefect import Flow

from tinkerflow.tasks.pipelines.parameters import Parameters


@dataclass(frozen=True)
class Pipeline:
    """One pipeline: its flow, and the model of the flow's only argument, `parameters`.

    deployment: the name under which prefect.yaml deploys the pipeline. cron: the deployment's schedule in UTC, or empty
    if people start its runs. A scheduled deployment executes at most one run at a time. example_teacher: the example of
    `tinkerflow run` first trains a student and a teacher with `sft`.
    """

    flow: Flow[..., Any]
    parameters: type[Parameters]
    deployment: str = "by-hand"
    cron: str = ""
    example_teacher: bool = False

    @property
    def name(self) -> str:
        """The name on the command line, of the module, of the flow and of the example file."""
        return self.flow.name

    @property
    def summary(self) -> str:
        """The first sentence of the parameters' docstring."""
        return (self.parameters.__doc__ or "").partition("\n")[0]

    @property
    def entrypoint(self) -> str:
        """The import path of the flow, as in deployments of Prefect."""
        return f"{self.flow.fn.__module__}.{self.flow.fn.__name__}"


@cache
def pipelines() -> Mapping[str, Pipeline]:
    """All pipelines by name, in alphabetical order. The first call imports every module of this folder."""
    package = import_module("tinkerflow.flows.pipelines")
    modules = (import_module(f"{package.__name__}.{found.name}") for found in pkgutil.iter_modules(package.__path__))
    declared = (vars(module).get("PIPELINE") for module in modules)
    return {found.name: found for found in declared if isinstance(found, Pipeline)}

"""Fine-tuning pipelines as Prefect flows that people run and schedule: clients of our API, apart from the engine."""

from collections.abc import Mapping
from typing import Any

from prefect import Flow

from flows.pipelines.dpo import dpo
from flows.pipelines.evaluate import Evaluated, evaluate
from flows.pipelines.nightly import Night, nightly
from flows.pipelines.sft import sft
from flows.pipelines.training import Trained
from tasks.pipelines.parameters import DpoParameters, EvaluateParameters, NightlyParameters, Parameters, SftParameters

# What can be run by name: the flow, and what its one argument, `parameters`, is.
PIPELINES: Mapping[str, tuple[Flow[..., Any], type[Parameters]]] = {
    "sft": (sft, SftParameters),
    "dpo": (dpo, DpoParameters),
    "evaluate": (evaluate, EvaluateParameters),
    "nightly": (nightly, NightlyParameters),
}

__all__ = ["PIPELINES", "Evaluated", "Night", "Trained", "dpo", "evaluate", "nightly", "sft"]

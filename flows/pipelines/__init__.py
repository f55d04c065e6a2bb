"""Fine-tuning pipelines as Prefect flows that people run and schedule: clients of our API, apart from the engine."""

from collections.abc import Mapping
from typing import Any

from prefect import Flow

from tinkerflow.flows.pipelines.distill import distill
from tinkerflow.flows.pipelines.dpo import dpo
from tinkerflow.flows.pipelines.evaluate import Evaluated, evaluate
from tinkerflow.flows.pipelines.nightly import Night, nightly
from tinkerflow.flows.pipelines.rl import rl
from tinkerflow.flows.pipelines.sft import sft
from tinkerflow.flows.pipelines.sweep import Swept, sweep
from tinkerflow.flows.pipelines.training import Trained
from tinkerflow.tasks.pipelines.parameters import (
    DistillParameters,
    DpoParameters,
    EvaluateParameters,
    NightlyParameters,
    Parameters,
    RlParameters,
    SftParameters,
    SweepParameters,
)

# What can be run by name: the flow, and what its one argument, `parameters`, is.
PIPELINES: Mapping[str, tuple[Flow[..., Any], type[Parameters]]] = {
    "sft": (sft, SftParameters),
    "dpo": (dpo, DpoParameters),
    "rl": (rl, RlParameters),
    "distill": (distill, DistillParameters),
    "evaluate": (evaluate, EvaluateParameters),
    "sweep": (sweep, SweepParameters),
    "nightly": (nightly, NightlyParameters),
}

__all__ = [
    "PIPELINES",
    "Evaluated",
    "Night",
    "Swept",
    "Trained",
    "distill",
    "dpo",
    "evaluate",
    "nightly",
    "rl",
    "sft",
    "sweep",
]

"""Fine-tuning pipelines: Prefect flows that people run and schedule, clients of our API like any program with the SDK.

Each pipeline is one file of this folder, with its parameters, its recipe and its flow, declared by a `PIPELINE`.
"""

from tinkerflow.flows.pipelines.registry import Pipeline, pipelines

__all__ = ["Pipeline", "pipelines"]

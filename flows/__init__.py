"""Flows: who runs what, and when. `run_engine` takes requests from the journal to the pool and answers them.

A model has a runner (its loop over batches), a base model one for samples; `prefect` shows what they do. `pipelines`
are Prefect flows that people schedule.
"""

from tinkerflow.flows.engine import run_engine
from tinkerflow.flows.prefect.server import PrefectServer, start_server

__all__ = ["PrefectServer", "run_engine", "start_server"]

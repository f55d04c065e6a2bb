"""Keys in the `user_metadata` of training runs that the service and its pipelines write or show, and their metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

FLOW_RUN = "flow_run"  # the id of the pipeline's flow run in Prefect
DEFAULTS = "default_parameters"  # names of the pipeline's parameters with default values
OUTCOME, REASON = "outcome", "reason"  # how a program ended with the run, and why
Outcome = Literal["completed", "failed", "cancelled"]
# Magnitude of a reported metric. The database averages values, and much larger ones would overflow.
LARGEST_METRIC = 1e30


def for_repeats(metadata: Mapping[str, str]) -> dict[str, str]:
    """The metadata of a run for a run that repeats it: without the pipeline's flow run and the outcome."""
    return {key: value for key, value in metadata.items() if key not in (FLOW_RUN, OUTCOME, REASON)}

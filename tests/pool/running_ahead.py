"""The real executor, whose sampler runs ahead as it does off CPUs."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from tinkerflow.backend.compute.executor import Executor
from tinkerflow.backend.compute.sampler import sampler


class RunsAhead(Executor):
    """Its chunks of tokens are on the devices between commands."""

    def __init__(self, *args: Any) -> None:
        with patch.object(sampler, "on_cpu", lambda: False):
            super().__init__(*args)

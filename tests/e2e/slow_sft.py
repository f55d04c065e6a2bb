"""The pipeline `sft` in processes that each make three steps and then wait for the request to stop.

After its three steps, a process creates a file named after its pid in the folder SLOW_SFT.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from prefect import flow

from tinkerflow.flows.pipelines.fine_tuning import cancellable
from tinkerflow.flows.pipelines.sft import SftParameters, fine_tune
from tinkerflow.tasks.pipelines.control import Control

may_go_on, asked = Control.may_go_on, 0


async def may_continue_three_times(control: Control) -> bool:
    global asked
    asked += 1
    if asked > 3:
        Path(os.environ["SLOW_SFT"], str(os.getpid())).touch()
        while not control.stopping:  # noqa: ASYNC110  Control has no event for this
            await asyncio.sleep(0.05)
    return await may_go_on(control)


Control.may_go_on = may_continue_three_times


@flow(name="sft", flow_run_name="sft {parameters.name}")
@cancellable
async def slow_sft(parameters: SftParameters):
    return await fine_tune(parameters)

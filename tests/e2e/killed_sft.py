"""`python killed_sft.py CONFIG STEP`: the pipeline `sft` in a process that is killed (-9) when it would begin STEP."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from deployments.run import read_config
from flows.pipelines import sft
from tasks.pipelines.imitate import Imitate
from tasks.pipelines.parameters import SftParameters

submit = Imitate.submit


def submit_or_die(self, client, step, params):
    if step + 1 == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    return submit(self, client, step, params)


Imitate.submit = submit_or_die
asyncio.run(sft(SftParameters.model_validate(read_config(Path(sys.argv[1])))))

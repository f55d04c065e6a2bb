"""Worker processes as jobs of Slurm: `srun tinkerflow worker` for each process, started again when it ends.

Slurm places them. Inside an allocation (`sbatch`, `salloc`) they are steps of that job; else each is a job of its own.
Hosts share the file system: the program, the group's secret and the data dir are at the same paths.
"""

from __future__ import annotations

import asyncio
import math
import sys

from tinkerflow.deployments.keeper import Part
from tinkerflow.deployments.launching import Launcher, Plan, Say, ending_with_us, own_address

# Only what is asked for, so that steps run side by side; the memory is the job's.
_OF_A_STEP = ("--exact", "--mem=0")


async def _keep(plan: Plan, report: Say) -> None:
    """Keep a srun for each process."""
    async with asyncio.TaskGroup() as together:
        for number in range(plan.processes):
            part = Part(
                f"slurm-{number}",
                ending_with_us(srun(plan, number)),
                environment=plan.environment,
                log_dir=plan.data_dir / "logs",
                silence=math.inf,  # Slurm watches it
                report=report,
            )
            together.create_task(part.keep())


def srun(plan: Plan, number: int) -> tuple[str, ...]:
    """The command of one process. number: of the process."""
    asked = ["--job-name=tinkerflow", "--ntasks=1", "--input=none", "--kill-on-bad-exit=1"]
    if plan.devices:
        asked.append(f"--gpus={plan.devices}")
    inside = "SLURM_JOB_ID" in plan.environment
    if inside:
        asked += _OF_A_STEP
    if plan.spread:
        asked += ["--nodes=1", f"--relative={number}"] if inside else ["--exclusive"]
    worker = (sys.executable, "-m", "tinkerflow", "worker", "--group", plan.group)
    folders = ("--secret-file", str(plan.secret_file), "--data-dir", str(plan.data_dir))
    return ("srun", *asked, *worker, *folders)


LAUNCHER = Launcher("slurm", _keep, lambda settings: own_address())

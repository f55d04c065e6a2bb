"""Worker processes as jobs of Slurm: `srun tinkerflow worker` for each process, restarted when it ends.

Slurm places the processes. Inside an allocation (`sbatch`, `salloc`) they are steps of that job. Otherwise each process
is a separate job. All hosts need the program, the group's secret and the data dir at the same paths of a shared file
system.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import sys

from tinkerflow.backend.core.errors import UserError, broken
from tinkerflow.deployments.keeper import Part
from tinkerflow.deployments.launching import Launcher, Plan, Say, ending_with_us, own_address


async def _keep(plan: Plan, report: Say) -> None:
    """Run srun for each process until cancelled. UserError: there is no srun, or the job has too few nodes."""
    if shutil.which("srun", path=plan.environment.get("PATH")) is None:
        fix = "run `tinkerflow up` on a host of the cluster, or choose another --launcher"
        raise UserError(f"launcher 'slurm': there is no program 'srun' on this host; {fix}")
    nodes = plan.environment.get("SLURM_JOB_NUM_NODES", "")
    if plan.spread and nodes.isdigit() and int(nodes) < plan.processes:
        fix = "where spread_hosts is true; max_groups=1 lets base models take turns"
        rule = f"at most {nodes}, the nodes of the job, {fix}"
        raise broken("the number of processes of all groups", plan.processes, rule)
    async with asyncio.TaskGroup() as together:
        for number in range(plan.processes):
            part = Part(
                f"slurm-{number}",
                ending_with_us(srun(plan, number)),
                environment=plan.environment,
                log_dir=plan.data_dir / "logs",
                silence=math.inf,  # Slurm monitors the process
                report=report,
            )
            together.create_task(part.keep())


def srun(plan: Plan, number: int) -> tuple[str, ...]:
    """The command that starts one process. number: the process's number, from 0."""
    asked = ["--job-name=tinkerflow", "--ntasks=1", "--input=none", "--kill-on-bad-exit=1"]
    if plan.devices:
        asked.append(f"--gpus={plan.devices}")
    inside = "SLURM_JOB_ID" in plan.environment
    if inside:
        # Steps share the memory of the job. A step with a node of its own uses all of the node's CPUs. Steps that may
        # share a node run in parallel only if each uses no more than it requests.
        asked += ["--mem=0", *(("--nodes=1", f"--relative={number}") if plan.spread else ("--exact",))]
    elif plan.spread:
        asked.append("--exclusive")
    worker = (sys.executable, "-m", "tinkerflow", "worker", "--group", plan.group)
    folders = ("--secret-file", str(plan.secret_file), "--data-dir", str(plan.data_dir))
    return ("srun", *asked, *worker, *folders)


LAUNCHER = Launcher("slurm", _keep, lambda settings: own_address())

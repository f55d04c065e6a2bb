"""A one-node Slurm cluster on this machine, in its own folder, with munged, slurmctld and slurmd as child processes."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tinkerflow.backend.supervise.processes import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "squeue", "sinfo")
_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


def missing() -> str:
    """The reason why no cluster can run here, or ""."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]
    if absent:
        return f"no {', '.join(absent)} (Debian: slurmctld slurmd slurm-client munge)"
    return "" if os.geteuid() == 0 else "slurmd needs root"


@contextmanager
def slurm(folder: Path) -> Iterator[Mapping[str, str]]:
    """Run a cluster with 4 CPUs, and yield the environment of programs that use it."""
    name, munge = socket.gethostname(), folder / "munge.socket"
    (folder / "state").mkdir()
    (folder / "spool").mkdir()
    (folder / "key").write_bytes(os.urandom(128))
    (folder / "key").chmod(0o600)
    (folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
    (folder / "slurm.conf").write_text(f"""
ClusterName=tests
SlurmctldHost={name}(127.0.0.1)
SlurmctldPort={free_port()}
SlurmdPort={free_port()}
AuthType=auth/munge
AuthInfo=socket={munge}
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
KillWait=10
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SlurmctldParameters=preempt_send_user_signal
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={name} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE OverSubscribe=NO State=UP GraceTime=60
PartitionName=urgent Nodes=ALL PriorityTier=2 State=UP
""")
    environment = os.environ | {"PATH": _PATH, "SLURM_CONF": str(folder / "slurm.conf")}
    with ExitStack() as stack:
        files = (f"--{kind}-file={folder}/munge.{kind}" for kind in ("log", "pid", "seed"))
        stack.enter_context(
            _daemon(folder, environment, "munged", "-F", "-f", f"-S{munge}", f"--key-file={folder}/key", *files)
        )
        stack.enter_context(_daemon(folder, environment, "slurmctld", "-D", "-f", str(folder / "slurm.conf")))
        stack.enter_context(_daemon(folder, environment, "slurmd", "-D", "-f", str(folder / "slurm.conf")))
        deadline = time.monotonic() + 120
        while "idle" not in (said := _said(environment, "sinfo", "--noheader", "--format=%T")):
            logs = "\n".join(f"{file.name}: {file.read_text()[-600:]}" for file in folder.glob("*.out"))
            assert time.monotonic() < deadline, f"the node is {said!r}\n{logs}"
            time.sleep(0.5)
        yield environment


def jobs(environment: Mapping[str, str]) -> list[str]:
    """The id, name and state of each job of the cluster."""
    return _said(environment, "squeue", "--noheader", "--format=%i %j %T").splitlines()


def _said(environment: Mapping[str, str], *command: str) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr if done.returncode else done.stdout


@contextmanager
def _daemon(folder: Path, environment: Mapping[str, str], *command: str) -> Iterator[None]:
    with (folder / f"{command[0]}.out").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

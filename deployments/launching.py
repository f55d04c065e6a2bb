"""What starts worker processes: the plan that a launcher is given, and what a launcher is.

A launcher has processes join the engine's group, wherever they run: it starts `tinkerflow worker`, or the same agent
(`backend/pool/host/agent.py`), once for each place. Placement, restarts and quotas are the work of the system that it
speaks to. Commands, fencing and recovery stay the engine's: to it, a process that is replaced is a host that was lost.
A group has its size for a generation, so a launcher is stopped and begun anew for another number of processes.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tinkerflow.backend.core.errors import broken
from tinkerflow.backend.core.joining import make_secret
from tinkerflow.backend.settings import Settings

_ANYWHERE = "192.0.2.1"  # of TEST-NET-1: nothing is sent there

Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """The processes that are to join a group.

    processes: how many, of all groups that run at a time.
    devices: accelerators for each process; 0 = none is asked for.
    platform: the setting: which kind of devices.
    spread: whether each process must be on a host of its own.
    base_models: what they serve: ids or folders, which must be there on their hosts.
    group: HOST:PORT at which they join.
    secret: the group's. secret_file: where it is on this host.
    data_dir: the folder for logs and compiled programs, on each host.
    cluster: the address of the system that starts them; "" = that system's default.
    environment: the settings and the variables of this process, for commands.
    """

    processes: int
    devices: int
    platform: str
    spread: bool
    base_models: tuple[str, ...]
    group: str
    secret: bytes = field(repr=False)
    secret_file: Path
    data_dir: Path
    cluster: str
    environment: Mapping[str, str] = field(repr=False)

    @classmethod
    def of(cls, settings: Settings, environment: Mapping[str, str]) -> Plan:
        """The plan that the settings ask for. Makes the group's secret.

        UserError when that file does not hold one, and when CPUs are to have accelerators.
        """
        if settings.process_devices and settings.platform == "cpu":
            raise broken("process_devices", settings.process_devices, "0 where platform is 'cpu'")
        return cls(
            processes=settings.processes * settings.groups,
            devices=settings.process_devices,
            platform=settings.platform,
            spread=settings.spread_hosts,
            base_models=settings.base_models,
            group=settings.group,
            secret=make_secret(settings.group_secret_path),
            secret_file=settings.group_secret_path,
            data_dir=settings.data_dir,
            cluster=settings.ray_address,
            environment={**environment, **settings.environment()},
        )


async def _nothing(plan: Plan, say: Say) -> None:
    await asyncio.Event().wait()


@dataclass(frozen=True)
class Launcher:
    """One way to start worker processes.

    name: of the setting `launcher`, and of the launcher's file.
    keep: has the plan's processes join the group, and replaces those that end, until it is cancelled; then it ends them
    all. It tells people by the function that it is given. UserError when the plan cannot be.
    address: the address of this host that those processes reach, for a group that was given none.
    rest: runs in place of `keep` while no request needs the processes, until it is cancelled.
    """

    name: str
    keep: Callable[[Plan, Say], Coroutine[None, None, None]]
    address: Callable[[Settings], str]
    rest: Callable[[Plan, Say], Coroutine[None, None, None]] = _nothing


def own_address(peer: str = "") -> str:
    """The address by which `peer` (a host; "" = other hosts) reaches this host; loopback when there is no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((peer or _ANYWHERE, 9))  # only chooses a route
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def ending_with_us(command: Sequence[str]) -> tuple[str, ...]:
    """A command for a child process that gets SIGTERM when this process ends, however it ends."""
    code = (
        "import os, signal, sys; from tinkerflow.backend.supervise.processes import die_with_parent; "
        "die_with_parent(int(sys.argv[1]), signal.SIGTERM); os.execvp(sys.argv[2], sys.argv[2:])"
    )
    return (sys.executable, "-c", code, str(os.getpid()), *command)

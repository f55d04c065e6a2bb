"""The interface of launchers, which start worker processes, and the plan that launchers receive.

A launcher makes processes join the engine's group. It starts `tinkerflow worker`, or the same agent
(`backend/pool/host/agent.py`), for each process. The cluster's own system places processes, restarts them and applies
quotas. The engine sends commands, fences and recovers, and treats a replaced process as a lost host. A generation of a
group has a fixed size, so a launcher is stopped and started again to change the number of processes.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tinkerflow.backend.core.errors import broken
from tinkerflow.backend.core.joining import make_secret
from tinkerflow.backend.settings import Settings

_ANYWHERE = "192.0.2.1"  # an address of TEST-NET-1; nothing is sent there

Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """The processes that are to join a group.

    processes: the number of processes of all groups that run at the same time.
    devices: the number of accelerators to request for each process; 0 = none.
    platform: the kind of devices, as in the settings.
    spread: whether each process must have its own host.
    base_models: ids or folders of the served base models. Folders must exist on the hosts.
    group: HOST:PORT where the processes join.
    secret: the secret of the group. secret_file: its path on this host.
    data_dir: the folder for logs and compiled programs, on each host.
    cluster: the address of the system that starts the processes; "" = that system's default.
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
        """The plan for these settings. Creates the group's secret if it is missing.

        UserError: the secret's file contains no secret, or accelerators are requested for the platform `cpu`.
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

    name: the value of the setting `launcher`, and the name of the launcher's file.
    keep: starts the plan's processes, and replaces those that end, until cancelled. Then it ends all of them. Its
    second argument reports lines to people. UserError: the plan is impossible.
    address: returns the address at which processes reach this host, for a group without a configured address.
    rest: runs instead of `keep` while no request needs the processes, until cancelled.
    """

    name: str
    keep: Callable[[Plan, Say], Coroutine[None, None, None]]
    address: Callable[[Settings], str]
    rest: Callable[[Plan, Say], Coroutine[None, None, None]] = _nothing


def own_address(peer: str = "") -> str:
    """The address of this host for connections from `peer` (a host; "" = other hosts); loopback without a network.

    Nodes of a cluster may have no route to `peer`. Then this is the address that the name of this host resolves to.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((peer or _ANYWHERE, 9))  # only chooses a route
        except OSError:
            with suppress(OSError):
                return socket.gethostbyname(socket.gethostname())
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def ending_with_us(command: Sequence[str]) -> tuple[str, ...]:
    """A command for a child process that receives SIGTERM when this process ends for any reason."""
    code = (
        "import os, signal, sys; from tinkerflow.backend.supervise.processes import die_with_parent; "
        "die_with_parent(int(sys.argv[1]), signal.SIGTERM); os.execvp(sys.argv[2], sys.argv[2:])"
    )
    return (sys.executable, "-c", code, str(os.getpid()), *command)

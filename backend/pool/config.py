"""The settings shared by all generations of a pool."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tinkerflow.backend.pool.host.places import WorkerSlot
from tinkerflow.backend.pool.protocol import codec
from tinkerflow.backend.pool.protocol.messages import Start
from tinkerflow.backend.pool.protocol.software import code_version, contents_version
from tinkerflow.backend.spec.commands import GroupConfig


@dataclass(frozen=True)
class PoolConfig:
    """The configuration of a pool. Times are in seconds.

    group: the configuration that every process gets.
    processes: the number of processes in a group.
    command_deadline: the deadline of a command that is submitted without one.
    start_deadline: the deadline of a group's start, and of a command that waits for a group.
    groups: the number of groups that the driver starts. They may share devices.
    executor: "module:attribute" of the class that each worker runs (tinkerflow.backend.pool.worker.CommandExecutor).
    heartbeat_timeout: a process counts as stopped after this time without any message.
    chunks_per_microbatch: steps of the sampler per micro-batch of training, while both wait.
    stack_seconds: how long a process may take to log its stacks after it missed a deadline.
    exit_seconds: how long a process may take to end after it closed its connection, so that its exit status is known.
    agreement_seconds: after one rank ran out of device memory, all other ranks must report the same within this time.
    probation: how many commands are sent one at a time after an unexplained death. A second death then identifies its
    command.
    """

    group: GroupConfig
    processes: int
    command_deadline: float
    start_deadline: float
    groups: int = 1
    executor: str = "tinkerflow.backend.compute.executor:Executor"
    heartbeat_timeout: float = 30.0
    chunks_per_microbatch: float = 1.0
    stack_seconds: float = 1.0
    exit_seconds: float = 5.0
    agreement_seconds: float = 10.0
    probation: int = 2**14

    def start_message(self, coordinator: str, slots: Sequence[WorkerSlot]) -> Start:
        """The first message to every process. slots: the slots of all ranks, in order."""
        hosts = [slot.host for slot in slots]
        numbers = tuple(hosts.index(host) for host in hosts)
        fitting = [math.ceil(slot.capacity / hosts.count(slot.host)) for slot in slots if slot.capacity]
        groups = min(self.groups, max(fitting, default=self.groups))
        return Start(self.group, self.processes, coordinator, self.executor, self.heartbeat_timeout, numbers, groups)

    def digest(self) -> str:
        """A text that is equal for pools whose processes can serve each other's drivers.

        The digest covers the start message, our code and the files of the base model. Reading the files takes up to a
        second. OSError: a file cannot be read.
        """
        model = Path(self.group.model_path)
        digest = hashlib.sha256(b"".join(codec.encode(self.start_message(coordinator="", slots=()))))
        digest.update(code_version().encode())
        digest.update(contents_version(model, model.glob("*")).encode())
        return digest.hexdigest()

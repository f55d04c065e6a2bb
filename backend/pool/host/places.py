"""Where the processes of a group are started: on this machine, or (hosts.py) on the hosts that joined."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tinkerflow.backend.pool.host.spawn import Ending, spawn_worker
from tinkerflow.backend.pool.protocol.handshake import LaunchSpec
from tinkerflow.backend.processes import free_port


@dataclass(frozen=True)
class Launch:
    """What the processes of one generation have in common.

    port: the driver's. salt: what its secret is made of. plan: a digest of all that they are told to be (Plan.digest).
    """

    generation: int
    port: int
    salt: bytes
    plan: str


class WorkerProcess(Protocol):
    """A worker, wherever it runs. coordinator: "address:port", free on its host when it began, for jax.distributed."""

    pid: int
    coordinator: str

    def signal(self, number: int) -> None:
        """Send a signal; nothing happens to one that has ended."""

    async def ended(self) -> Ending:
        """Wait until it has ended, or can be reached no more; any number of times."""
        ...


class Place(Protocol):
    """Room for one process, until it is released."""

    async def spawn(self, launch: Launch, rank: int) -> WorkerProcess:
        """Start the process there. OSError when that fails."""
        ...

    def release(self) -> None:
        """Its process has ended, or never began: somebody else may have the room."""


class Site(Protocol):
    """Where a pool starts its processes."""

    address: str  # that the driver listens on for them

    def secret(self, salt: bytes) -> bytes:
        """The secret of a generation with this salt."""
        ...

    def lack(self, processes: int) -> str:
        """Why so many processes cannot be started now, for people; "" when they can."""
        ...

    async def changed(self) -> None:
        """Wait until `lack` may say something else."""

    def take(self, processes: int, plan: str) -> Sequence[Place]:
        """As many places; only when nothing lacks. Ranks are given to them in this order.

        plan: a digest. Where an earlier driver has left a whole group of the same one, its processes are taken over.
        """
        ...


class ThisMachine:
    """As many processes as are wanted, as children of this one, which they do not outlive."""

    address = "127.0.0.1"

    def __init__(self, log_dir: Path | None) -> None:
        """log_dir: where workers append worker-<rank>.log; None = to our stderr."""
        self._log_dir = log_dir

    def secret(self, salt: bytes) -> bytes:
        """The salt itself: nobody else sees it."""
        return salt

    def lack(self, processes: int) -> str:
        """Nothing ever lacks."""
        return ""

    async def changed(self) -> None:
        """Return at once."""

    def take(self, processes: int, plan: str) -> Sequence[Place]:
        """The machine itself, `processes` times."""
        return [self] * processes

    async def spawn(self, launch: Launch, rank: int) -> WorkerProcess:
        """Start a child."""
        spec = LaunchSpec(
            host=self.address,
            port=launch.port,
            secret=self.secret(launch.salt).hex(),
            generation=launch.generation,
            rank=rank,
            parent=os.getpid(),
            compile_cache_dir="",
        )
        return await spawn_worker(spec, f"{self.address}:{free_port()}", log_dir=self._log_dir)

    def release(self) -> None:
        """Nothing is held."""


def generation_secret(group_secret: bytes, salt: bytes) -> bytes:
    """The secret of one generation: hosts make it of the group's and the salt, so it never crosses the network."""
    return hmac.new(group_secret, b"generation|" + salt, hashlib.sha256).digest()

"""What passes between the driver and the agent of a host that joined the group (hosts.py, agent.py).

`process` is a number that the driver gives to a process when it asks for it; it is never used again.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Held:
    """A process that an earlier driver left. salt, plan: those that it was last told."""

    pid: int
    rank: int
    salt: bytes
    plan: str


@dataclass(frozen=True)
class Offer:
    """Agent to driver, first: how many processes the host runs.

    agent: the same for all connections of one agent. address: the host's, as seen from the driver's network. software:
    what must be the same on all hosts. held: those of its processes that run already.
    """

    agent: str
    host: str
    address: str
    processes: int
    software: str
    held: tuple[Held, ...]


@dataclass(frozen=True)
class Welcome:
    """Driver to agent, in answer to an Offer. silence: seconds until either end takes a silent other end for lost."""

    silence: float


@dataclass(frozen=True)
class Refusal:
    """Driver to agent, in answer to an Offer: why the host cannot join."""

    why: str


@dataclass(frozen=True)
class Spawn:
    """Driver to agent: start a process of a group, after the end of those that are held and had the same plan.

    Its secret is made of the group's own and `salt` (places.py). plan: a digest of what it is to be.
    """

    process: int
    generation: int
    rank: int
    port: int
    salt: bytes
    plan: str


@dataclass(frozen=True)
class TakeOver:
    """Driver to agent: let a process that is held serve this driver; it keeps its rank and plan."""

    process: int
    pid: int
    generation: int
    port: int
    salt: bytes


@dataclass(frozen=True)
class Signal:
    """Driver to agent: send a signal to a process."""

    process: int
    number: int


@dataclass(frozen=True)
class Spawned:
    """Agent to driver: a process runs, or was taken over.

    coordinator: "address:port" for jax.distributed, free on that host when the process began.
    """

    process: int
    pid: int
    coordinator: str


@dataclass(frozen=True)
class Ended:
    """Agent to driver: a process has ended, or never was (then there was no Spawned). See places.Ending."""

    process: int
    how: str
    crashed: bool

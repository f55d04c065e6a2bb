"""The messages of the pool: between driver and worker, besides commands and replies, and between driver and host agent.

`process` in the messages of agents is a number that the driver gives to a process when it asks for the process; a
number is never used again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tinkerflow.backend.core import errors
from tinkerflow.backend.spec.checkpoint import Digest
from tinkerflow.backend.spec.commands import Command, FetchState, GroupConfig, WriteState
from tinkerflow.backend.spec.pool_message import PoolMessage

# The errors that an executor may raise by name: it cannot pretend that its group failed. Only classes of
# backend/core/errors.py: classes that other rooms derive take more than a message, and no executor raises them.
_ERRORS: dict[str, type[errors.TinkerflowError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if (isinstance(kind, type) and issubclass(kind, errors.UserError))
    or kind in (errors.StateLostError, errors.StoreError, errors.StoreAwayError, errors.ServerError)
}
_LONGEST_MESSAGE = 10_000


class Start(PoolMessage, frozen=True):
    """Driver to worker, first: how to set up. `coordinator` is "host:port" for jax.distributed, "" with one process.

    silence: seconds after which the driver takes a silent process for stopped. hosts: for each rank the number of its
    host; ranks with the same number share that host's devices. groups: how many groups share a device, this one
    included.
    """

    config: GroupConfig
    processes: int
    coordinator: str
    executor: str  # "package.module:attribute"
    silence: float
    hosts: tuple[int, ...]
    groups: int = 1


class Rejoined(PoolMessage, frozen=True):
    """Worker to driver, first, when it has served another driver: how many commands it has received in its life.

    A driver sends commands only to a group that is ready, so ranks with the same commands have the same number.
    """

    commands: int


class Ready(PoolMessage, frozen=True):
    """Worker to driver, once: the executor is made. Its fields are those of GroupInfo.

    reaches_store: it can take part in a Transfer. programs: a digest.
    """

    devices: tuple[str, ...]
    parameters: int
    microbatch_tokens: int
    fsdp: int
    attention_tokens: int
    reaches_store: bool
    context: int
    context_rule: str
    memory: Mapping[str, int]
    programs: str


class Progress(PoolMessage, frozen=True):
    """Worker to driver, at any time: a line for people about what takes long."""

    text: str


class KeepAlive(PoolMessage, frozen=True):
    """Driver to worker (or to a host's agent) and back: the process is alive, whatever its main thread does."""


class Failed(PoolMessage, frozen=True):
    """A command's outcome in place of a Reply: the name of an error in backend/core/errors.py, and its message."""

    error: str
    message: str


class Traced(PoolMessage, frozen=True):
    """Driver to worker: a command that belongs to a traced request. parent: the context of its span; None: no span."""

    parent: str | None
    command: Command


class Transfer(PoolMessage, frozen=True):
    """Driver to worker, at any time: read or write a state beside the commands. number: of this transfer."""

    number: int
    job: FetchState | WriteState


class Transferred(PoolMessage, frozen=True):
    """Worker to driver: a Transfer is done. files: what was written, by file name."""

    number: int
    files: Mapping[str, Digest]
    failed: Failed | None


class Ack(PoolMessage, frozen=True):
    """What ranks above 0 send in place of a reply: whether the command failed there, and how."""

    failed: Failed | None


class TerminationNotice(PoolMessage, frozen=True):
    """Worker to driver: the process was told to end by SIGTERM, as before its machine is taken away."""


class Fatal(PoolMessage, frozen=True):
    """Worker to driver, last: why the process ends itself."""

    failed: Failed


@dataclass(frozen=True)
class OrphanedWorker:
    """A process that an earlier driver left, with the salt and the plan that it was told last."""

    pid: int
    rank: int
    salt: bytes
    plan: str


class Offer(PoolMessage, frozen=True):
    """Agent to driver, first: how many processes the host runs.

    agent: an id, the same for all connections of one agent. address: the host's, as seen from the driver's network.
    software: what must be the same on all hosts. held: processes that an earlier driver left there. pod: (slice,
    worker) of a host of TPUs, () of others.
    """

    agent: str
    host: str
    address: str
    processes: int
    software: str
    held: tuple[OrphanedWorker, ...]
    pod: tuple[int, ...] = ()


class Welcome(PoolMessage, frozen=True):
    """Driver to agent, in answer to an Offer. silence: seconds after which a silent end is lost to the other."""

    silence: float


class Refusal(PoolMessage, frozen=True):
    """Driver to agent, in answer to an Offer: why the host cannot join."""

    why: str


class Spawn(PoolMessage, frozen=True):
    """Driver to agent: start a process of a group, once the held processes with the same plan have ended.

    The process's secret is made of the group's secret and `salt` (places.py). plan: a digest of the pool's settings.
    """

    process: int
    generation: int
    rank: int
    port: int
    salt: bytes
    plan: str


class TakeOver(PoolMessage, frozen=True):
    """Driver to agent: let a held process serve this driver; it keeps its rank and plan."""

    process: int
    pid: int
    generation: int
    port: int
    salt: bytes


class Signal(PoolMessage, frozen=True):
    """Driver to agent: send a signal to a process."""

    process: int
    number: int


class Spawned(PoolMessage, frozen=True):
    """Agent to driver: a process runs, or was taken over.

    coordinator: "address:port" for jax.distributed, free on that host when the process began.
    """

    process: int
    pid: int
    coordinator: str


class Ended(PoolMessage, frozen=True):
    """Agent to driver: a process has ended, or could not be started. See supervise.Ending."""

    process: int
    how: str
    crashed: bool


WorkerMessage = (
    Start
    | Rejoined
    | Ready
    | Progress
    | KeepAlive
    | Failed
    | Traced
    | Transfer
    | Transferred
    | Ack
    | TerminationNotice
    | Fatal
)
HostMessage = Offer | Welcome | Refusal | Spawn | TakeOver | Signal | Spawned | Ended


def to_failed(error: BaseException) -> Failed:
    """How an exception of the executor travels: errors of our tree as they are, all others as a ServerError."""
    name = type(error).__name__
    if isinstance(error, errors.TinkerflowError) and name in _ERRORS:
        return Failed(name, error.message[:_LONGEST_MESSAGE])
    return Failed("ServerError", f"{name}: {error}"[:_LONGEST_MESSAGE])


def to_error(failed: Failed) -> errors.TinkerflowError:
    """The exception that `failed` stands for; an unknown name becomes a ServerError."""
    return _ERRORS.get(failed.error, errors.ServerError)(failed.message)


def same_outcome(one: Failed | None, other: Failed | None) -> bool:
    """Whether two ranks agree about a command.

    Server errors need not agree in their text (it may name ports, addresses or a rank); errors for the user must.
    """
    if one is None or other is None:
        return one is other
    if to_error(one).category == to_error(other).category == "server":
        return one.error == other.error
    return one == other

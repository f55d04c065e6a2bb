"""The messages of the pool: between driver and worker, besides commands and replies, and between driver and host agent.

In the messages of agents, `process` is a number that the driver assigns when it requests a process. The driver never
reuses a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tinkerflow.backend.core import errors
from tinkerflow.backend.spec.checkpoint import Digest
from tinkerflow.backend.spec.commands import Command, FetchState, GroupConfig, WriteState
from tinkerflow.backend.spec.pool_message import PoolMessage

# The errors that keep their class on the way from an executor to the driver. GroupFailedError is missing, because an
# executor cannot claim that its group failed. ContextExceededError and classes outside backend/core/errors.py are also
# missing: their constructors take more than a message, and no executor raises them.
_ERRORS: dict[str, type[errors.TinkerflowError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if (isinstance(kind, type) and issubclass(kind, errors.UserError) and kind is not errors.ContextExceededError)
    or kind in (errors.StateLostError, errors.StoreError, errors.StoreAwayError, errors.ServerError)
}
_LONGEST_MESSAGE = 10_000


class Start(PoolMessage, frozen=True):
    """Driver to worker, first: the setup.

    coordinator: "host:port" for jax.distributed; "" if there is one process.
    executor: "package.module:attribute" of the class that executes commands.
    silence: seconds after which the driver considers a silent process stopped.
    hosts: the number of each rank's host. Ranks with the same number share that host's devices.
    groups: how many groups share a device, including this group.
    """

    config: GroupConfig
    processes: int
    coordinator: str
    executor: str
    silence: float
    hosts: tuple[int, ...]
    groups: int = 1


class Rejoined(PoolMessage, frozen=True):
    """Worker to driver, first, if the worker has served another driver: the number of all commands ever received.

    A driver sends commands only to a group that is ready. Ranks that received the same commands have equal counts.
    """

    commands: int


class Ready(PoolMessage, frozen=True):
    """Worker to driver, once: the executor is ready. GroupInfo explains the fields.

    reaches_store: the worker can take part in a Transfer. programs: a digest.
    """

    devices: tuple[str, ...]
    parameters: int
    microbatch_tokens: int
    fsdp: int
    attention_tokens: int
    few_shapes: bool
    branch_tokens: int
    reaches_store: bool
    context: int
    context_rule: str
    memory: Mapping[str, int]
    programs: str


class Progress(PoolMessage, frozen=True):
    """Worker to driver, at any time: a line for people about long work."""

    text: str


class KeepAlive(PoolMessage, frozen=True):
    """Driver to worker (or to a host's agent) and back: the process is alive, even while its main thread is busy."""


class Failed(PoolMessage, frozen=True):
    """The outcome of a command that failed: the name of an error in backend/core/errors.py, and its message."""

    error: str
    message: str


class Traced(PoolMessage, frozen=True):
    """Driver to worker: a command of a traced request. parent: the context of the request's span; None: no span."""

    parent: str | None
    command: Command


class Transfer(PoolMessage, frozen=True):
    """Driver to worker, at any time: read or write a state while commands run. number: identifies this transfer."""

    number: int
    job: FetchState | WriteState


class Transferred(PoolMessage, frozen=True):
    """Worker to driver: a Transfer is done. files: the digests of the written files, by file name."""

    number: int
    files: Mapping[str, Digest]
    failed: Failed | None


class Ack(PoolMessage, frozen=True):
    """The answer of ranks above 0 to a command: whether the command failed there, and how."""

    failed: Failed | None


class TerminationNotice(PoolMessage, frozen=True):
    """Worker to driver: the process received SIGTERM, for example before its machine is preempted."""


class Fatal(PoolMessage, frozen=True):
    """Worker to driver, last: why the process is ending itself."""

    failed: Failed


@dataclass(frozen=True)
class OrphanedWorker:
    """A process that an earlier driver left. salt, plan: the last values that the process got; see Spawn."""

    pid: int
    rank: int
    salt: bytes
    plan: str


class Offer(PoolMessage, frozen=True):
    """Agent to driver, first: how many processes the host can run.

    agent: an id that is the same in all connections of one agent.
    address: the host's address in the driver's network.
    software: the versions that must be the same on all hosts.
    held: processes that an earlier driver left on the host.
    pod: (slice, worker) of a TPU host; () for any other host.
    """

    agent: str
    host: str
    address: str
    processes: int
    software: str
    held: tuple[OrphanedWorker, ...]
    pod: tuple[int, ...] = ()


class Welcome(PoolMessage, frozen=True):
    """Driver to agent, in answer to an Offer. silence: seconds after which each end considers a silent peer lost."""

    silence: float


class Refusal(PoolMessage, frozen=True):
    """Driver to agent, in answer to an Offer: why the host cannot join."""

    why: str


class Spawn(PoolMessage, frozen=True):
    """Driver to agent: end the held processes with the same plan, then start a process of a group.

    salt: combined with the group's secret to derive the process's secret (places.py). plan: a digest of the pool's
    settings.
    """

    process: int
    generation: int
    rank: int
    port: int
    salt: bytes
    plan: str


class TakeOver(PoolMessage, frozen=True):
    """Driver to agent: make a held process serve this driver. The process keeps its rank and plan."""

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
    """Agent to driver: a process was started or taken over.

    coordinator: "address:port" for jax.distributed. The port was free on that host when the process started.
    """

    process: int
    pid: int
    coordinator: str


class Ended(PoolMessage, frozen=True):
    """Agent to driver: a process has ended or could not be started. how, crashed: see supervise.Ending."""

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
    """The message for an exception of the executor. An exception outside our error tree becomes ServerError."""
    name = type(error).__name__
    if isinstance(error, errors.TinkerflowError) and name in _ERRORS:
        return Failed(name, error.message[:_LONGEST_MESSAGE])
    return Failed("ServerError", f"{name}: {error}"[:_LONGEST_MESSAGE])


def to_error(failed: Failed) -> errors.TinkerflowError:
    """The exception for `failed`. An unknown name becomes a ServerError."""
    return _ERRORS.get(failed.error, errors.ServerError)(failed.message)


def same_outcome(one: Failed | None, other: Failed | None) -> bool:
    """Whether two ranks agree on the outcome of a command.

    The texts of user errors must also agree. The texts of server errors may differ, because they may contain ports,
    addresses or a rank.
    """
    if one is None or other is None:
        return one is other
    if to_error(one).category == to_error(other).category == "server":
        return one.error == other.error
    return one == other

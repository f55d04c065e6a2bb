"""What passes between the driver and a worker besides commands and replies."""

from __future__ import annotations

from dataclasses import dataclass

from tinkerflow.backend import errors
from tinkerflow.backend.commands import GroupConfig

# What an executor may raise by name: it cannot pretend that its group failed. Only of backend/errors.py: what
# other rooms derive is made otherwise than of a message, and no executor raises it.
_ERRORS: dict[str, type[errors.TinkerflowError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if (isinstance(kind, type) and issubclass(kind, errors.UserError))
    or kind in (errors.StateLostError, errors.StoreError, errors.ServerError)
}
_LONGEST_MESSAGE = 10_000


@dataclass(frozen=True)
class Start:
    """Driver to worker, first: how to set up. `coordinator` is "host:port" for jax.distributed, "" with one process.

    silence: seconds after which the driver ends the group for a process that it does not hear.
    """

    config: GroupConfig
    processes: int
    coordinator: str
    executor: str  # "package.module:attribute"
    silence: float


@dataclass(frozen=True)
class Left:
    """Worker to driver, first, when it has served another one: how many commands it has received in its life.

    A driver sends commands only to a group that is ready: so ranks that were told the same have the same number.
    """

    commands: int


@dataclass(frozen=True)
class Ready:
    """Worker to driver, once: the executor stands."""

    devices: tuple[str, ...]
    parameters: int
    microbatch_tokens: int


@dataclass(frozen=True)
class Progress:
    """Worker to driver, at any time: what takes so long."""

    text: str


@dataclass(frozen=True)
class Beat:
    """Driver to worker (or to a host's agent) and back: the process is alive, whatever its main thread does."""


@dataclass(frozen=True)
class Failed:
    """A command's outcome in place of a Reply: the name of an error of tinkerflow.backend.errors, and its message."""

    error: str
    message: str


@dataclass(frozen=True)
class Ack:
    """What ranks above 0 send in place of a reply: whether the command failed there, and how."""

    failed: Failed | None


@dataclass(frozen=True)
class Fatal:
    """Worker to driver, last: why the process ends itself."""

    failed: Failed


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

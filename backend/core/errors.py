"""The one error tree. A failure is stored as `message` and `category`, and shown to the client unchanged.

TinkerflowError            category
├── UserError              user     the request is wrong
│   ├── NotFoundError               the object does not exist, or belongs to another project
│   ├── ConflictError               the same id was used before for other content
│   ├── BodyTooLargeError           the request body, as sent or decompressed, is over the limit
│   ├── TooManyError                the project has reached its limit of waiting work; retry later
│   ├── ContextExceededError        a prompt, or a prompt with its answer, is longer than the model's context
│   └── AllocationError             the devices had no memory left for the request; nothing was changed
└── ServerError            server   the service failed; the request was valid
    ├── GroupFailedError            a process of the worker group died, hung or was stopped
    │   ├── DeadlineError           a command was not answered within its deadline
    │   └── SuspectError            the worker group ended while it executed this command
    ├── DevicesError                a computation failed on the devices of a worker group
    ├── FencedError                 another engine has taken over the journal
    ├── StateLostError              an adapter or a snapshot was lost with its worker group
    ├── JournalBusyError            the journal takes no writes at present
    ├── NoTablesError               the journal's database is empty (backend/journal/migrate.py)
    ├── TrackerError                a tracker of runs failed (backend/tracking/mirror.py)
    ├── EnvironmentUnavailableError an environment of `rl` failed (tasks/pipelines/environments.py)
    └── StoreError                  a checkpoint could not be read or written
        └── StoreAwayError          the checkpoint store could not be reached
"""

from __future__ import annotations

from typing import ClassVar, Literal

Category = Literal["user", "server"]


class TinkerflowError(Exception):
    """Base class of all errors that this service raises deliberately."""

    category: ClassVar[Category] = "server"

    @property
    def message(self) -> str:
        """The sentence for the client. It names the field, its value and the rule."""
        return str(self)


class UserError(TinkerflowError):
    """The request is wrong: the message names the field, the value and the rule."""

    category: ClassVar[Category] = "user"


class NotFoundError(UserError):
    """The named object does not exist, or belongs to another project."""


class ConflictError(UserError):
    """An id was used again for different content."""


class BodyTooLargeError(UserError):
    """The request body, as sent or decompressed, is over the limit."""


class TooManyError(UserError):
    """The project has reached its limit of waiting work; the same request may be accepted a moment later."""


class ContextExceededError(UserError):
    """A prompt, or a prompt with its answer, is longer than the context of its model.

    context: the model's context in tokens. size: the prompt's size with its unit. most: the limit, in the same unit.
    """

    def __init__(self, message: str, *, context: int, size: str, most: int) -> None:
        """message: names the field, its value and the rule."""
        super().__init__(message)
        self.context = context
        self.size = size
        self.most = most


class AllocationError(UserError):
    """The devices had no memory left for the request, which changed nothing.

    The message is the same on every rank, because a group is ended if its ranks answer differently.
    """


class ServerError(TinkerflowError):
    """The service failed; the same request may work later."""


class GroupFailedError(ServerError):
    """A process of the worker group died, hung or was stopped."""


class DeadlineError(GroupFailedError):
    """A command did not answer before its deadline."""


class SuspectError(GroupFailedError):
    """The worker group ended while it executed this command.

    If several commands were in flight, this is the oldest command that the rank which reported its exit had not
    answered. If no rank reported its exit, this is the oldest command of all. crashed: False if a signal from outside
    ended the group.
    """

    def __init__(self, message: str, *, crashed: bool = True) -> None:
        """message: names the group, the rank and the cause."""
        super().__init__(message)
        self.crashed = crashed

    @property
    def out_of_memory(self) -> bool:
        """Whether the group ended because the devices had no memory left for this command."""
        return OUT_OF_MEMORY in self.message


class DevicesError(ServerError):
    """A computation failed on the devices. Their state is unknown, so the worker group ends."""


class FencedError(ServerError):
    """Another engine has taken over the journal, and this engine may no longer change it."""


class StateLostError(ServerError):
    """An adapter or a snapshot was lost together with its worker group."""


class JournalBusyError(ServerError):
    """The journal takes no writes at present: its lock is held, it is read-only, or its disk fails. Try again."""


class StoreError(ServerError):
    """The checkpoint store could not be read or written."""


class StoreAwayError(StoreError):
    """The store could not be reached, so the state of its checkpoints is unknown."""


OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"  # part of the text of XLA's errors
_LONGEST_SHOWN = 80  # characters of a value in a message


def shown(value: object) -> str:
    """The form of `value` in an error message: its repr, cut to 80 characters."""
    text = repr(value[: _LONGEST_SHOWN + 1] if isinstance(value, str | list) else value)
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 1] + "…"


def broken(field: str, value: object, rule: str) -> UserError:
    """The error `field is value: must be rule`."""
    return UserError(f"{field} is {shown(value)}: must be {rule}")

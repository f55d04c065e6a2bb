"""The one error tree. A failure is stored as `message` and `category` and shown to the client as it stands.

TinkerflowError            category
├── UserError              user     the request asked for something that cannot be
│   ├── NotFoundError               the object does not exist, or is not yours
│   ├── ConflictError               the same id was used before for other content
│   ├── BodyTooLargeError           the request body, as sent or decompressed, is over the limit
│   └── TooManyError                as much as is allowed waits already; the same request may be taken later
└── ServerError            server   the service failed; the request was right
    ├── GroupFailedError            a process of the worker group died, hung or was stopped
    │   ├── DeadlineError           a command did not answer in its time
    │   └── SuspectError            the group ended while it executed this very command, as far as is known
    ├── DevicesError                what had begun on the devices of a worker group failed there
    ├── FencedError                 another engine has taken over: this one may change nothing any more
    ├── StateLostError              the adapter or snapshot went with a worker group
    └── StoreError                  reading or writing the checkpoint store failed
"""

from __future__ import annotations

from typing import ClassVar, Literal

Category = Literal["user", "server"]


class TinkerflowError(Exception):
    """Base of every error this service raises on purpose."""

    category: ClassVar[Category] = "server"

    @property
    def message(self) -> str:
        """The sentence for the client: what is wrong, its value, and the rule."""
        return str(self)


class UserError(TinkerflowError):
    """The request is wrong: the message names the field, the value and the rule."""

    category: ClassVar[Category] = "user"


class NotFoundError(UserError):
    """The named object does not exist, or belongs to somebody else."""


class ConflictError(UserError):
    """An id was used again for different content."""


class BodyTooLargeError(UserError):
    """The request body, as sent or decompressed, is over the limit."""


class TooManyError(UserError):
    """As much as is allowed waits already; the same request may be taken in a moment."""


class ServerError(TinkerflowError):
    """The service failed; the same request may work later."""


class GroupFailedError(ServerError):
    """A process of the worker group died, hung or was stopped."""


class DeadlineError(GroupFailedError):
    """A command did not answer before its deadline."""


class SuspectError(GroupFailedError):
    """A group ended while it executed this very command.

    Of several, the first that the rank which said that it ends had not answered; the first, if none said so.

    crashed: by itself, not by a signal from outside.
    """

    def __init__(self, message: str, *, crashed: bool = True) -> None:
        """`message` names the group, the rank and the cause."""
        super().__init__(message)
        self.crashed = crashed


class DevicesError(ServerError):
    """What had begun on the devices failed there: nobody knows what is left on them, and the worker group ends."""


class FencedError(ServerError):
    """Another engine works on the journal; this one may change nothing any more."""


class StateLostError(ServerError):
    """An adapter or a snapshot was lost together with its worker group."""


class JournalBusyError(ServerError):
    """Somebody else wrote to the journal for too long; nothing was written."""


class StoreError(ServerError):
    """The checkpoint store could not be read or written."""


class StoreAwayError(StoreError):
    """The store itself failed, which says nothing of what is in it."""


_LONGEST_SHOWN = 80  # characters of a value in a message


def shown(value: object) -> str:
    """`value` as an error message shows it: its repr, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 1] + "…"


def broken(field: str, value: object, rule: str) -> UserError:
    """The error `field is value: must be rule`."""
    return UserError(f"{field} is {shown(value)}: must be {rule}")

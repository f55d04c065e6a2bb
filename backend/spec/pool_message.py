"""The base of all messages on the sockets between the engine, its workers and their hosts."""

from __future__ import annotations

from typing import Any, Self

import msgspec


class PoolMessage(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A message. On the wire it is a list of its class's name and its fields in order."""

    def copy_with(self, **changes: Any) -> Self:
        """A copy with these fields changed."""
        return msgspec.structs.replace(self, **changes)

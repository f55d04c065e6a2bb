"""The base of all values that stand alone on the sockets between the engine, its workers and their hosts."""

from __future__ import annotations

from typing import Any, Self

import msgspec


class PoolMessage(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A message: on the wire a list of its class's name and its fields, in their order."""

    def copy_with(self, **changes: Any) -> Self:
        """A copy with other values in these fields."""
        return msgspec.structs.replace(self, **changes)

"""How far a caller sees when looking around: its own project, or with an admin key every project."""

from __future__ import annotations

from typing import Literal

from tinkerflow.api.deps import Call

AccessScope = Literal["owned", "accessible"]


def visible(call: Call, scope: AccessScope = "accessible") -> str | None:
    """The owner whose rows the call sees, None for everybody's.

    An ordinary key sees its project's rows in both scopes: nothing else is accessible to it. An admin key sees its own
    project's in `owned`, and all in `accessible`.
    """
    return None if scope == "accessible" and call.admin else call.owner

"""Answers for forward_backward submits that the journal cannot keep: the request id itself carries the reason.

A refused submit of a chunk other than the first makes the SDK hang for good (PROTOCOL.md 3.5), so even a request whose
model is unknown or whose bytes cannot be read gets an id. Polling that id gives the failure. Nothing is stored, and
whoever makes up such an id reads back only what they wrote.
"""

from __future__ import annotations

import base64

_PREFIX = "refused-"
_LONGEST = 500  # characters


def refuse(reason: str) -> str:
    """A request id that stands for this failure of the user's."""
    return _PREFIX + base64.urlsafe_b64encode(reason[:_LONGEST].encode()).decode().rstrip("=")


def reason_of(request_id: str) -> str | None:
    """The reason in an id made by `refuse`, or None for any other id."""
    if not request_id.startswith(_PREFIX):
        return None
    text = request_id.removeprefix(_PREFIX)
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True).decode() or None
    except ValueError:  # not base64, or not text
        return None

"""Suggestions for a misspelled name."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str], *, likeness: float = 0.6) -> str:
    """The end of an error message about an unknown name, as in ' (did you mean 'steps'?)'; "" if none is close.

    likeness: the least similarity of a close name, as difflib's ratio.
    """
    close = get_close_matches(name, list(known), n=1, cutoff=likeness)
    return f" (did you mean {close[0]!r}?)" if close else ""

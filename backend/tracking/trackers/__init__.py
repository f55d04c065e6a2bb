"""The trackers. Each file in this folder declares one as `TRACKER`."""

from collections.abc import Iterable

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.core.suggest import did_you_mean
from tinkerflow.backend.spec.registry import registered
from tinkerflow.backend.tracking.tracker import Tracker

TRACKERS = registered(__name__, "TRACKER", Tracker)


def trackers_named(names: Iterable[str]) -> list[Tracker]:
    """The trackers with these names, each once. UserError: a tracker is unknown, or its library is not installed."""
    found = []
    for name in dict.fromkeys(names):
        if name not in TRACKERS:
            raise UserError(f"tracker {name!r}: must be one of {', '.join(TRACKERS)}{did_you_mean(name, TRACKERS)}")
        TRACKERS[name].check()
        found.append(TRACKERS[name])
    return found


__all__ = ["TRACKERS", "trackers_named"]

"""A clock that tests control."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta


class ManualClock:
    """A `Clock` that moves only by `advance`."""

    def __init__(self, start: datetime | None = None) -> None:
        """Start at `start` (default: 2026-01-01 UTC)."""
        self._start = start or datetime(2026, 1, 1, tzinfo=UTC)
        self._elapsed = 0.0

    def now(self) -> datetime:
        """The current time, aware, in UTC."""
        return self._start + timedelta(seconds=self._elapsed)

    def monotonic(self) -> float:
        """Seconds since the start."""
        return self._elapsed

    def advance(self, seconds: float) -> None:
        self._elapsed += seconds

"""Signs of life: both ends of a connection send beats, and count how many went by without a word of the other."""

from __future__ import annotations

BEATS = 6  # so many in a row without any frame from the other end: it is stopped, or cut off


class HeartbeatMonitor:
    """What one end knows of the other's life.

    Our own beats are counted, not time: a stall of this process accuses nobody. So a silence of `timeout` seconds is
    noticed at most one beat, a sixth of `timeout`, later.
    """

    def __init__(self, timeout: float) -> None:
        """Nothing is known yet; `timeout` in seconds."""
        self.pause = timeout / BEATS
        self._heard = True
        self._missed = 0

    def hear(self) -> None:
        """The other end sent something."""
        self._heard = True

    def beat(self) -> None:
        """Call it every `pause` seconds."""
        self._missed = 0 if self._heard else self._missed + 1
        self._heard = False

    def silent(self, beats: int = BEATS) -> bool:
        """Whether nothing was heard for so many beats."""
        return self._missed >= beats

    @property
    def seconds(self) -> float:
        """For how long nothing was heard."""
        return self._missed * self.pause

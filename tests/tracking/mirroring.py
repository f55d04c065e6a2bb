"""A process that mirrors a journal to a tracker, and prints a line after each turn: `mirroring.py TRACKER FOLDER`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tinkerflow.backend.core.clock import SystemClock
from tinkerflow.backend.journal import Journal
from tinkerflow.backend.tracking.journal_runs import JournalMirror
from tinkerflow.backend.tracking.trackers import TRACKERS
from tinkerflow.deployments.pulse import keep_stdout, say

if __name__ == "__main__":
    keep_stdout()
    name, folder = sys.argv[1], Path(sys.argv[2])
    journal = Journal.open(f"sqlite:///{folder / 'journal.db'}")
    mirror = JournalMirror(TRACKERS[name], journal, folder / "tracking", SystemClock())
    while True:
        mirror.turn()
        say("turn")
        time.sleep(0.05)

"""Child processes: start one, notice its end or its silence, stop it (and `retry.Restarts` before the next start).

The driver and the agents of hosts use these parts for workers, `up` uses them for the engine and the API, and the
engine uses them for its Prefect server.
"""

from tinkerflow.backend.supervise.heartbeat import BEATS, HeartbeatMonitor
from tinkerflow.backend.supervise.process import ChildProcess, Ending, watch

__all__ = [
    "BEATS",
    "ChildProcess",
    "Ending",
    "HeartbeatMonitor",
    "processes",
    "watch",
]

"""Child processes: start a process, detect its end or silence, and stop it. `retry.Restarts` delays the next start.

The driver and the hosts' agents start workers with this package, `up` starts the engine and the API, and the engine
starts its Prefect server.
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

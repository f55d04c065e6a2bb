"""Flows: who runs what, and when. The engine takes requests from the journal to the pool through Prefect flow runs.

`run_engine` is the whole of it. A model has a lane (order), a flow run (the picture), and task runs that pacing opens.
"""

from tinkerflow.flows.engine import run_engine
from tinkerflow.flows.prefect.tracking import Tracking, open_tracking
from tinkerflow.flows.prefect_server import PrefectServer, start_server

__all__ = ["PrefectServer", "Tracking", "open_tracking", "run_engine", "start_server"]

"""One small module per Tinker operation: from its pending request to its outcome, through the worker group.

`execute(runtime, request, turn)` of each module is plain asynchronous code without Prefect; `operation.begin` starts
it, and `window` lets task runs of Prefect follow what was started, so that people see it.
"""

from tinkerflow.tasks.answers import Answers
from tinkerflow.tasks.operation import Operation, begin, failure
from tinkerflow.tasks.runtime import Commanded, Runtime
from tinkerflow.tasks.sample import Batch
from tinkerflow.tasks.snapshots import Snapshots
from tinkerflow.tasks.turns import Turn
from tinkerflow.tasks.window import Window, track, tracked_task

__all__ = [
    "Answers",
    "Batch",
    "Commanded",
    "Operation",
    "Runtime",
    "Snapshots",
    "Turn",
    "Window",
    "begin",
    "failure",
    "track",
    "tracked_task",
]

"""One small module per Tinker operation: from its pending request to its outcome, through the worker group.

`execute(runtime, request, turn)` of each module is plain asynchronous code without Prefect; `operation.begin` starts
it, and `window` lets task runs of Prefect follow what was started, so that people see it.
"""

from tasks.answers import Answers
from tasks.operation import Operation, begin, failure
from tasks.runtime import Commanded, Runtime
from tasks.sample import Batch
from tasks.snapshots import Snapshots
from tasks.turns import Turn
from tasks.window import Window, track, tracked_task

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

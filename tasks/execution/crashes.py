"""A request that ends worker groups is failed by name, instead of being tried for ever.

Nothing is written before a command is sent: when a group ends, the engine notes what it was executing. A group that
crashed blames the request; one that was killed from outside (SIGKILL, SIGSTOP) hardly does, so that takes more. Where
several were being executed, as on GPUs, the first crash may blame the wrong one, and the next group takes them one by
one (pool/group.py). A request for which the devices had no memory left would fail again, so it is not tried again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from tinkerflow.backend.errors import DeadlineError, GroupFailedError, SuspectError
from tinkerflow.backend.journal import Outcome, Pending
from tinkerflow.tasks.execution.context import ExecutionContext

log = logging.getLogger(__name__)

MOST_CRASHES = 2
MOST_DEATHS = 6


def is_suspicious(error: GroupFailedError) -> bool:
    """Whether the group ended while it executed what got this error."""
    return isinstance(error, SuspectError | DeadlineError)


async def attribute_crash(
    context: ExecutionContext, executing: Sequence[Pending], error: GroupFailedError
) -> dict[str, Outcome]:
    """Note that the group ended with `error` while it executed these requests.

    Returns, by request id, the failure of every request whose worker groups ended too often.
    """
    if not executing or not is_suspicious(error):
        return {}
    crashed = error.crashed if isinstance(error, SuspectError) else True
    by_id = {request.id: request for request in executing}
    counts = await context.read(context.journal.recovery.suspect, sorted(by_id), crashed=crashed)
    failed = {}
    for request_id, (deaths, crashes) in counts.items():
        no_memory = isinstance(error, SuspectError) and error.out_of_memory
        if crashes >= MOST_CRASHES or deaths >= MOST_DEATHS or no_memory:
            request = by_id[request_id]
            text = (
                f"{request.kind} was being executed when a worker group ended, {deaths} times "
                f"({crashes} by a crash): it is not tried again. Last: {error.message}"
            )
            log.error("request %s: %s", request_id, text)
            failed[request_id] = request.failed(text, "server")
    return failed

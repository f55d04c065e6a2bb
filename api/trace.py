"""A session's timeline in the Chrome trace format, which https://ui.perfetto.dev and chrome://tracing open.

Each model, each sampler and each worker group is a process. In models and samplers, every request is a slice from its
submission to its answer. The slice contains `queued`, which ends when the first command is sent or the request joins
the decode batch, and `executing`. Worker groups contain only the executing parts. Overlapping slices are on different
threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import orjson

from tinkerflow.backend.journal import Timed

Event = dict[str, object]


class _Process:
    """A process in the trace. Its slices use as few threads as possible without overlaps."""

    def __init__(self, pid: int, name: str) -> None:
        self._pid = pid
        self._busy_until: list[int] = []
        self.events: list[Event] = [{"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}]

    def add(self, spans: Sequence[tuple[str, int, int]], args: dict[str, object]) -> None:
        """Add slices (name, start, end in microseconds); the first contains the others."""
        _, start, end = spans[0]
        thread = next((i for i, until in enumerate(self._busy_until) if until <= start), len(self._busy_until))
        self._busy_until[thread : thread + 1] = [end]
        for name, begin, stop in spans:
            timed = {"ts": begin, "dur": stop - begin, "pid": self._pid, "tid": thread + 1}
            self.events.append({"ph": "X", "name": name, "cat": "tinkerflow", **timed, "args": args})


def trace(requests: Sequence[Timed], now: datetime) -> bytes:
    """The trace of a session as JSON. requests: in order of submission. now: the end of requests without an answer."""
    zero = min((request.created_at for request in requests), default=now)
    processes: dict[str, _Process] = {}

    def process(name: str) -> _Process:
        return processes.setdefault(name, _Process(len(processes) + 1, name))

    def micros(moment: datetime) -> int:
        return round((moment - zero).total_seconds() * 1e6)

    executing: list[tuple[int, int, Timed]] = []
    for request in requests:
        start = micros(request.created_at)
        end = max(micros(request.finished_at or now), start)
        name = request.kind.value if request.seq_id is None else f"{request.kind.value} {request.seq_id}"
        spans = [(name, start, end)]
        if request.started_at is not None:
            began = min(max(micros(request.started_at), start), end)
            spans += [("queued", start, began), ("executing", began, end)]
            executing.append((began, end, request))
        args: dict[str, object] = {"request_id": request.id, "state": request.state}
        process(str(request.model_id or request.sampler_id)).add(spans, args)
    for began, end, request in sorted(executing, key=lambda one: one[:2]):
        owner = str(request.model_id or request.sampler_id)
        args = {"request_id": request.id, "of": owner}
        process(f"worker group of {request.base_model}").add([(request.kind.value, began, end)], args)
    events = [event for one in processes.values() for event in one.events]
    events.sort(key=lambda event: (event["ph"] != "M", event.get("ts", 0)))
    return orjson.dumps({"displayTimeUnit": "ms", "otherData": {"start": zero}, "traceEvents": events})

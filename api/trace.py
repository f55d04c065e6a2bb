"""A session's timeline in the Chrome trace format, which https://ui.perfetto.dev and chrome://tracing open.

Each model, each sampler and each worker group is a process. In models and samplers, every request is a slice from its
submission to its answer. The slice contains `queued`, which ends when the first command is sent or the request joins
the decode batch, and `executing`. Worker groups contain only the executing parts. Overlapping slices are on different
threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from heapq import heappop, heappush
from operator import itemgetter

import orjson

from tinkerflow.backend.journal import Timed


class _Process:
    """A process in the trace. Its slices use as few threads as possible without overlaps.

    events: start and JSON of each. They are encoded one by one, because a session may have 600,000, and encoding all at
    once would block the other threads of the API.
    """

    def __init__(self, pid: int, name: str) -> None:
        self._pid = pid
        self._busy: list[tuple[int, int]] = []  # a heap of the ends of the last slices, and their threads
        self._free: list[int] = []  # a heap of threads
        named = {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
        self.events: list[tuple[int, bytes]] = [(-1, orjson.dumps(named))]

    def add(self, spans: Sequence[tuple[str, int, int]], args: dict[str, object]) -> None:
        """Add slices (name, start, end in microseconds), in order of starts. The first contains the others."""
        _, start, end = spans[0]
        while self._busy and self._busy[0][0] <= start:
            heappush(self._free, heappop(self._busy)[1])
        thread = heappop(self._free) if self._free else len(self._busy) + 1
        heappush(self._busy, (end, thread))
        for name, begin, stop in spans:
            timed = {"ts": begin, "dur": stop - begin, "pid": self._pid, "tid": thread}
            event = orjson.dumps({"ph": "X", "name": name, "cat": "tinkerflow", **timed, "args": args})
            self.events.append((begin, event))


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
    events = sorted((event for one in processes.values() for event in one.events), key=itemgetter(0))
    about, listed = orjson.dumps({"start": zero}), b",".join(event for _, event in events)
    return b'{"displayTimeUnit":"ms","otherData":' + about + b',"traceEvents":[' + listed + b"]}"

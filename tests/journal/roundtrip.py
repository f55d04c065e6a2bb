"""Measure a request's path through the journal: `python tests/journal/roundtrip.py [--url URL] [--requests 1000]`.

Prints the median and the 90th percentile of each call and of their sum, in wall-clock time and in CPU time of the
calling thread. Without a URL it creates an SQLite file in a temporary folder.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable

from tinkerflow.backend.core.ids import model_id
from tinkerflow.backend.journal import Journal, Kind, ModelLive, NewModel, NewRequest, NewSession, StepMade, migrate

CALLS = ("submit", "ready", "finish", "result")


def measure(journal: Journal, requests: int, clock: Callable[[], float]) -> list[dict[str, float]]:
    """Measure the seconds of each call, for each of `requests` requests of a new model."""
    session = journal.sessions.create(NewSession("bench", "0"))
    model = model_id(session, 0)
    creation = NewRequest(Kind.CREATE_MODEL, "bench", b"{}", "create", model_id=model, seq_id=0)
    journal.models.create(NewModel(model, session, "bench", "tiny", rank=8), creation)
    journal.results.finish([pending.done(b"{}", "json", ModelLive(model)) for pending in journal.requests.ready(model)])
    seconds = []
    for seq in range(1, requests + 1):
        request = NewRequest(Kind.OPTIM_STEP, "bench", b"x" * 300, str(seq), model_id=model, seq_id=seq)
        times = [clock()]
        request_id = journal.requests.submit(request)
        times.append(clock())
        (pending,) = journal.requests.ready(model)
        times.append(clock())
        journal.results.finish([pending.done(b"y" * 300, "json", StepMade(model, seq))])
        times.append(clock())
        journal.results.get(request_id, "bench")
        times.append(clock())
        seconds.append({call: end - start for call, start, end in zip(CALLS, times, times[1:], strict=False)})
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url")
    parser.add_argument("--requests", type=int, default=1000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        url = arguments.url or f"sqlite:///{folder}/journal.db"
        migrate(url)
        journal = Journal.open(url)
        measure(journal, 50, time.perf_counter)
        for name, clock in (("wall", time.perf_counter), ("cpu", time.thread_time)):
            seconds = measure(journal, arguments.requests, clock)
            for call in (*CALLS, "sum"):
                values = sorted(row[call] if call in row else sum(row.values()) for row in seconds)
                p50, p90 = values[len(values) // 2], values[len(values) * 9 // 10]
                print(f"{name:4} {call:6} p50 {p50 * 1e3:6.2f} ms  p90 {p90 * 1e3:6.2f} ms")
        journal.close()


if __name__ == "__main__":
    main()

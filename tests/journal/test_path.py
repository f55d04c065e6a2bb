"""The path of an operation through the journal, including its limits, is short enough to read at one sitting."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from tinkerflow.backend.journal import Limits, LossMeasured, UsageKind, Used


def test_an_operation_is_submitted_executed_answered_and_read_in_five_files(scene):
    session = scene.session()
    model = scene.model(session)
    scene.journal.leases.acquire("an engine")
    visited: set[str] = set()

    def note(frame: object, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)  # type: ignore[attr-defined]
        if event == "call" and path.parent.name in ("journal", "notify") and path.parents[1].name == "backend":
            visited.add(path.name)

    sys.setprofile(note)
    try:
        request = scene.journal.requests.submit(replace(scene.operation(model, 1), tokens=3), Limits(queued_tokens=5))
        (pending,) = scene.journal.requests.ready(model)
        used = Used(session, "tiny", UsageKind.TRAINING, 10)
        scene.journal.results.finish([pending.done(b"result", "proto", used, LossMeasured(model, 10, 10.0, 2.5))])
        result = scene.journal.results.get(request, "local")
    finally:
        sys.setprofile(None)
    assert result.result == b"result"
    transports = {"notify_sqlite.py", "notify_postgres.py", "topics.py"}
    assert visited - transports == {"requests.py", "quotas.py", "results.py", "database.py", "notify.py"}

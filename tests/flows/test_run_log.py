"""Events of runs reach the journal in the background, without lines about steps."""

from __future__ import annotations

import asyncio
import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest
from tests.manual_clock import ManualClock

from tinkerflow.backend.journal import (
    CheckpointKind,
    CheckpointSaved,
    Effect,
    LossMeasured,
    Outcome,
    StepMeasured,
    Trained,
)
from tinkerflow.backend.spec.drift import UNLIMITED
from tinkerflow.flows.observers import Batch
from tinkerflow.flows.run_log import RunLogs
from tinkerflow.tasks.execution.restore import Restored


async def test_restores_saves_and_alarms_are_events_but_steps_are_not(client: Any) -> None:
    run, _ = client.submit_create(0)
    logs = RunLogs(client.journal, ManualClock(), budget_tokens=0, drift_limits=UNLIMITED)
    log = logs.observe(run, Trained())

    async def answered(*effects: Effect) -> None:
        outcome = asyncio.create_task(asyncio.sleep(0, Outcome("req", b"", "json", effects=effects)))
        operation: Any = SimpleNamespace(answered=outcome)
        batch: Any = Batch
        log.started(batch, [operation])
        await outcome

    path = f"tinker://{run}/weights/seen"
    await answered(LossMeasured(run, 4, 3.0, 6.0), StepMeasured(run, 1, 1, 0.5, 1e-4))
    saved = CheckpointSaved(path, run, CheckpointKind.WEIGHTS, "seen", "local", "tiny", 8, True, True, True, 1, 2**20)
    await answered(saved)
    await answered(LossMeasured(run, 4, 3.0, math.nan))
    log.interrupted()
    log.restored(2, Restored(None, 3, 1, 3, 0.25, [], {}))
    log.log("a line of Prefect's logs", logging.ERROR)
    assert logs.some.is_set()
    await asyncio.sleep(0)
    await logs.write()
    await logs.write()
    found = [(one.level, one.text) for one in client.journal.run_events.newest(run)]
    assert found == [
        (
            logging.INFO,
            "restored in worker group 2: 3 requests replayed (1 optimizer steps) after its creation, in 0.25 s",
        ),
        (logging.WARNING, "its worker group ended; the next one executes the operations in flight again"),
        (logging.ERROR, "the loss is nan, not a finite number"),
        (logging.INFO, f"step 1: saved {path} (weights, 1.05 MB)"),
    ]


async def test_events_stay_queued_while_the_journal_is_away() -> None:
    written: list[tuple[str, str]] = []

    class RunEvents:
        away = True

        def add(self, run_id: str, events: list[Any]) -> None:
            if run_id == "second" and self.away:
                self.away = False
                logs.add("second", "while it is away", logging.INFO)
                raise OSError("the journal is away")
            written.extend((run_id, one.text) for one in events)

    journal: Any = SimpleNamespace(run_events=RunEvents())
    logs = RunLogs(journal, ManualClock(), budget_tokens=0, drift_limits=UNLIMITED)
    for run_id in ("first", "second", "third"):
        logs.add(run_id, "restored", logging.INFO)
    with pytest.raises(OSError, match="the journal is away"):
        await logs.write()
    await logs.write()
    assert sorted(written) == [
        ("first", "restored"),
        ("second", "restored"),
        ("second", "while it is away"),
        ("third", "restored"),
    ]
    assert written.index(("second", "restored")) < written.index(("second", "while it is away"))

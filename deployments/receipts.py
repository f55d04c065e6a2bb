"""Compare a training run with its receipt: the history, and the recomputed results."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson

from tinkerflow.backend.catalog.receipt import Mark, check_receipt, first_difference, marks
from tinkerflow.backend.core.errors import ServerError, UserError
from tinkerflow.deployments.recorded_run import RecordedRun
from tinkerflow.deployments.rerun import Changes, Rerun


def read_receipt(file: Path) -> tuple[dict[str, Any], list[Mark]]:
    """Read a receipt and its marks. UserError: the file is absent, is not a receipt, or was changed."""
    try:
        issued = orjson.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"receipt {str(file)!r} cannot be read: {error}") from error
    return issued, check_receipt(issued)


def verify_history(run: RecordedRun, wanted: Sequence[Mark]) -> str | None:
    """The first place where the history differs from a receipt's marks, for people; None if there is none."""
    try:
        return first_difference(wanted, marks(run.links()))
    except ServerError as error:
        return str(error)


def verify_results(run: RecordedRun, last: Mark, sample: int, say: Callable[[str], object]) -> str | None:
    """Execute a run again up to a mark, or a `sample` of its steps. Returns the first difference, for people.

    say: gets lines about the progress.
    """
    chosen: list[int | None] = [None]
    if sample:
        made = run.made()
        first = next(iter(made), 0)
        # A step can be executed alone from the state before it, unless the run has made that state again later.
        alone = sorted(
            step
            for step, seq_id in made.items()
            if seq_id <= last.seq_id and (step == first or made.get(step - 1, seq_id) < seq_id)
        )
        chosen = [*sorted(secrets.SystemRandom().sample(alone, min(sample, len(alone))))]
    for step in chosen:
        report = Rerun(run, Changes(step, last.step if step is None else step)).execute()
        run.api.unload(report.run_id)
        if report.parted is not None:
            parted = report.parted
            return f"step {parted.step}: the result of {parted.kind} (request {parted.seq_id}) differs"
        what = f"steps 1 to {last.step}" if step is None else f"step {step}"
        say(f"{what}: {report.compared} results are equal when computed again")
    return None

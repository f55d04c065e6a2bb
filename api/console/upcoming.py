"""The upcoming events of a run that trains: its next checkpoint, its end, and its next recovery snapshot."""

from __future__ import annotations

from datetime import datetime

from tinkerflow.api.console.render import number, seconds
from tinkerflow.backend.journal import Curve, Journal, ModelView

_NEWEST = 10  # points of the curve that predict the pace of the next steps
_COPIES = ("rerun_of", "fork_of")  # metadata of runs whose plan was copied from another run


def upcoming(journal: Journal, run: ModelView, curve: Curve, now: datetime, snapshot_steps: int) -> str:
    """One line about a run that takes work, read with at most three statements.

    curve: the newest steps. now: the current time. snapshot_steps: the most steps between two recovery snapshots.
    """
    parts = [*_planned(journal, run, curve)]
    if snapshots := journal.recovery.snapshots(run.id):
        newest = snapshots[0]
        at, ago = number(newest.step), seconds(now - newest.created_at)
        parts.append(
            f"the newest recovery snapshot is from step {at} ({ago} ago), the next one is due by step "
            f"{number(newest.step + snapshot_steps)}"
        )
    return "; ".join(parts)


def _planned(journal: Journal, run: ModelView, curve: Curve) -> list[str]:
    """The next checkpoint and the end of a pipeline's run; [] for other runs, whose plan only the client knows."""
    steps, every, begun = (_whole(run, name) for name in ("planned_steps", "save_every", "step"))
    if not steps or not every or run.step >= steps or any(name in run.user_metadata for name in _COPIES):
        return []
    saved = journal.models.run(run.id, None).last_checkpoint
    at = min((begun if saved is None else saved.step) + every, steps)
    points = curve.points[-_NEWEST:]
    pace = (points[-1].at - points[0].at).total_seconds() / (points[-1].step - points[0].step) if points[1:] else 0.0

    def within(wanted: int) -> str:
        return f", in about {seconds(pace * (wanted - run.step))}" if pace and wanted > run.step else ""

    end = f"the last of {number(steps)} steps{within(steps)}"
    return [f"the next checkpoint is due at step {number(at)}{within(at)}", *([end] if at < steps else [])]


def _whole(run: ModelView, name: str) -> int:
    """A non-negative integer from the run's metadata, which clients write; 0 for anything else."""
    text = run.user_metadata.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0

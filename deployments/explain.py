"""The ancestry of a checkpoint: its run, the data that changed it, and the checkpoint that the run began from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tinkerflow.backend.catalog.card import TrainedData, loaded_by
from tinkerflow.backend.core.errors import NotFoundError
from tinkerflow.backend.spec.checkpoint import CheckpointPath
from tinkerflow.deployments.recorded_run import Api, RecordedRequest, RecordedRun, quoted

_MOST_PARENTS = 100


@dataclass
class Ancestry:
    """The part of a run that led to a checkpoint. seq_id: the request that made it. data: its training data."""

    path: str
    run: RecordedRun
    seq_id: int = -1
    data: TrainedData = field(default_factory=TrainedData)

    def add(self, recorded: RecordedRequest) -> None:
        """Add a successful request of the run."""
        self.seq_id = recorded.seq_id
        self.data.add(recorded.kind, recorded.payload)


def requests_behind(
    api: Api, against: str, unknown: Callable[[str], object]
) -> Iterator[tuple[RecordedRun, RecordedRequest]]:
    """The requests that led to a checkpoint, or all of a run, and then those behind the checkpoints that were loaded.

    Requests before a load are included, although the load replaces the weights. unknown: called with a loaded
    checkpoint whose requests are in no history. NotFoundError: see `explain`.
    """
    wanted: str | None = against
    for generation in range(_MOST_PARENTS):
        if wanted is None:
            return
        before, wanted = wanted, None
        path = CheckpointPath.parse(before) if before.startswith("tinker://") else None
        try:
            run = RecordedRun.find(api, before if path is None else path.run_id)
            for recorded in _up_to(run, path):
                yield run, recorded
                wanted = loaded_by(recorded.kind, recorded.payload) or wanted
        except NotFoundError:
            if generation == 0:
                raise
            unknown(before)


def explain(api: Api, path: str) -> Iterator[Ancestry]:
    """The ancestry of a checkpoint, then of the checkpoints before it, as long as their runs have histories.

    NotFoundError: the run of the first checkpoint has no history, or did not make the checkpoint.
    """
    wanted: str | None = path
    for generation in range(_MOST_PARENTS):
        if wanted is None:
            return
        try:
            ancestry = _of_checkpoint(api, CheckpointPath.parse(wanted))
        except NotFoundError:
            if generation == 0:
                raise
            return
        yield ancestry
        wanted = ancestry.data.loaded


def answers_of(api: Api, path: str) -> list[str]:
    """Sentences about the champions that name the checkpoint, and the sample requests that it answered."""
    parts = CheckpointPath.parse(path)
    given = api.ask(f"training_runs/{quoted(parts.run_id)}/checkpoints/{parts.kind}/{quoted(parts.name)}/answers")
    lines = [f"champion/{name} since {at or 'an unknown time'}" for name, at in given["champions"].items()]
    if not given["number"]:
        return [*(lines or ["no champion"]), "answered no requests"]
    since = f"the first at {given['first_at']}, the last at {given['last_at']}"
    return [*(lines or ["no champion"]), f"answered {given['number']:,} requests, {since}"]


def _of_checkpoint(api: Api, path: CheckpointPath) -> Ancestry:
    run = RecordedRun.find(api, path.run_id)
    ancestry = Ancestry(str(path), run)
    for recorded in _up_to(run, path):
        ancestry.add(recorded)
    return ancestry


def _up_to(run: RecordedRun, path: CheckpointPath | None) -> Iterator[RecordedRequest]:
    """The successful requests of a run up to the last one in the checkpoint; all if there is no checkpoint."""
    last = math.inf if path is None else run.last_request(path)
    for recorded in run.requests():
        if recorded.seq_id > last:
            return
        if recorded.error is None:
            yield recorded

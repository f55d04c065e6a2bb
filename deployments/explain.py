"""The ancestry of a checkpoint: its run, the data that changed it, and the checkpoint with which the run began."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import orjson

from tinkerflow.backend.core.errors import NotFoundError
from tinkerflow.backend.spec.checkpoint import SAMPLER_WEIGHTS, WEIGHTS, CheckpointPath
from tinkerflow.backend.spec.history import chain, digest
from tinkerflow.backend.wire import tinker_pb2 as pb
from tinkerflow.deployments.recorded_run import Api, RecordedRequest, RecordedRun

_SAVES = {"save_weights": WEIGHTS, "save_for_sampler": SAMPLER_WEIGHTS, "save_weights_external": "external_weights"}
_MOST_PARENTS = 100


@dataclass
class Ancestry:
    """The part of a run that a checkpoint has in it.

    seq_id: of the request that made the checkpoint. steps: optimizer steps. rows: digests of the trained rows by the
    number of times that each was trained. tokens: of all of these times. loaded: the checkpoint with which the run
    began, or that it loaded last; None if it began with a fresh adapter.
    """

    path: str
    run: RecordedRun
    seq_id: int = -1
    steps: int = 0
    rows: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    loaded: str | None = None

    @property
    def data_digest(self) -> str:
        """One digest for the different rows, whatever their order."""
        return chain(sorted(self.rows))

    def add(self, recorded: RecordedRequest) -> None:
        """Take up a successful request of the run."""
        self.seq_id = recorded.seq_id
        if recorded.kind == "forward_backward":
            for datum in pb.ForwardBackwardRequest.FromString(recorded.payload).data:
                key = digest(datum.SerializeToString(deterministic=True))
                self.rows[key] = self.rows.get(key, 0) + 1
                self.tokens += sum(len(chunk.encoded_text.tokens) // 4 for chunk in datum.model_input)
        elif recorded.kind == "optim_step":
            self.steps += 1
        elif recorded.kind in ("load_model", "load_weights"):
            self.rows, self.tokens, self.steps = {}, 0, 0  # its weights replace what was trained
            self.loaded = str(orjson.loads(recorded.payload)["path"])


def explain(api: Api, path: str) -> Iterator[Ancestry]:
    """The ancestry of a checkpoint, then those of the checkpoints before it, as far as their runs have histories.

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
        wanted = ancestry.loaded


def _of_checkpoint(api: Api, path: CheckpointPath) -> Ancestry:
    run = RecordedRun.find(api, path.run_id)
    ancestry = Ancestry(str(path), run)
    for recorded in run.requests():
        if recorded.error is not None:
            continue
        if _saves(recorded, path):
            ancestry.seq_id = recorded.seq_id
            return ancestry
        ancestry.add(recorded)
        if path.step == 0 or (recorded.kind == "optim_step" and recorded.step == path.step):
            return ancestry
    raise NotFoundError(f"checkpoint {str(path)!r}: the history of its run has no request that made it")


def _saves(recorded: RecordedRequest, path: CheckpointPath) -> bool:
    if path.step is not None or _SAVES.get(recorded.kind) != path.kind:
        return False
    return bool(orjson.loads(recorded.payload).get("path") == path.name)

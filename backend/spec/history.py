"""The history of a training run: its requests in the order of execution, their kinds, and digests of the results."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

HISTORY_KEY = "history"  # in the metadata of a run: "true" enables it


class Kind(StrEnum):
    """The operation of a request."""

    CREATE_MODEL = "create_model"
    LOAD_MODEL = "load_model"  # create-via-load
    FORWARD = "forward"
    FORWARD_BACKWARD = "forward_backward"
    OPTIM_STEP = "optim_step"
    SAVE_WEIGHTS = "save_weights"
    LOAD_WEIGHTS = "load_weights"
    SAVE_FOR_SAMPLER = "save_for_sampler"
    SAVE_EXTERNAL = "save_weights_external"
    SAMPLE = "sample"
    CREATE_CUSTOM_LOSS = "create_custom_loss"  # answered when it is stored; the engine does not execute it
    UNLOAD = "unload"


@dataclass(frozen=True)
class PastRequest:
    """One answered request of a training run.

    seq_id: its place in the run. kind: the operation (`Kind`). request_id: the id of the answered request.
    payload: the stored body. error: the failure, None if it succeeded. result_hash: `digest` of the result's bytes;
    "" after a failure, or if the result was dropped before the history was written. answered_at: with a time zone.
    """

    seq_id: int
    kind: str
    request_id: str
    payload: bytes
    error: str | None
    result_hash: str
    answered_at: datetime


@dataclass(frozen=True)
class Segment:
    """A stored part of a run's history: the requests from `first` to `last`, under `name` in the run's folder."""

    name: str
    first: int
    last: int
    size_bytes: int


def last_request(steps: Mapping[int, int], step: int) -> int | None:
    """The seq_id of the last request in the state of a run after `step`; None if the run never had this state.

    The result is the optim_step that made the step. If the run began with this state or has loaded it, the result is
    the request before the optim_step that made the next step, because other requests since then changed only gradients.
    If there is no step, it is 0, the creation. A run that has loaded an earlier state may have made the step several
    times. The last time counts. steps: the step that each optim_step made, by seq_id.
    """
    made = [seq_id for seq_id, one in steps.items() if one == step]
    before_next = [seq_id - 1 for seq_id, one in steps.items() if one == step + 1]
    return max(made or before_next, default=None if step else 0)


def digest(data: bytes) -> str:
    """The SHA-256 of these bytes (hex)."""
    return hashlib.sha256(data).hexdigest()


def chain(links: Sequence[str]) -> str:
    """One digest for a sequence of digests: each link is hashed with all links before it."""
    state = b""
    for link in links:
        state = hashlib.sha256(state + link.encode()).digest()
    return state.hex()

"""The words of the journal: kinds of requests, and the states that its rows pass through."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

PayloadType = Literal["json", "proto"]


class Kind(StrEnum):
    """What a request asks for."""

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
    CREATE_CUSTOM_LOSS = "create_custom_loss"  # answered as it is stored: nothing executes it
    UNLOAD = "unload"


class RequestState(StrEnum):
    """pending -> done | failed; nothing leaves `failed`, and `done` becomes `failed` only when its result expires."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


class SessionState(StrEnum):
    """active -> finished (the client said so) | expired (its heartbeats stopped)."""

    ACTIVE = "active"
    FINISHED = "finished"
    EXPIRED = "expired"


class ModelState(StrEnum):
    """creating -> live | failed; creating | live -> lost | unloaded, an end; lost | failed -> live when revived."""

    CREATING = "creating"
    LIVE = "live"
    LOST = "lost"
    UNLOADED = "unloaded"
    FAILED = "failed"


TAKES_WORK = (ModelState.CREATING, ModelState.LIVE)


class SamplerState(StrEnum):
    """live -> lost (its snapshot went with a worker group) | closed (its session ended)."""

    LIVE = "live"
    LOST = "lost"
    CLOSED = "closed"


class UsageKind(StrEnum):
    """What is counted: tokens, or for the last one checkpoints that were saved."""

    TRAINING = "training"  # of forward_backward and forward alike: the SDK knows no other kind for either
    PREFILL = "prefill"  # of prompts, that were computed: once for all sequences of a request
    CACHED_PREFILL = "cached_prefill"  # of prompts, that were not: all but the first sequence's, as the SDK tells users
    SAMPLE = "sample"
    CHECKPOINT = "checkpoint"


class CheckpointKind(StrEnum):
    """The path segment of a checkpoint: training state, weights for sampling, or weights exported for downloads."""

    WEIGHTS = "weights"
    SAMPLER_WEIGHTS = "sampler_weights"
    EXTERNAL_WEIGHTS = "external_weights"

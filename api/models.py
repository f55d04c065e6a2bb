"""The JSON of the synchronous endpoints. Requests may hold unknown fields; answers leave out what is None.

`tinkerflow.backend.wire` reads the bodies of training and sampling operations, for the API and the tasks alike.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tinkerflow.backend.commands import Optimizer

CheckpointType = Literal["training", "sampler", "external"]


def optimizer_config(optimizer: Optimizer) -> dict[str, str | int]:
    """An optimizer as the wire names it."""
    return {"type": "dimuon", "version": 1} if optimizer == "dimuon" else {"type": "adamw"}


class Wire(BaseModel):
    """Base of all: `model_` is a plain field prefix here."""

    model_config = ConfigDict(protected_namespaces=(), frozen=True)


# ------------------------------------------------------------------ requests
class CreateSession(Wire):
    """create_session."""

    sdk_version: str
    tags: tuple[str, ...] = ()
    user_metadata: dict[str, Any] | None = None
    project_id: str | None = None
    display_name: str | None = None


class Heartbeat(Wire):
    """session_heartbeat."""

    session_id: str


class FinishReason(Wire):
    """Why a session ends."""

    type: Literal["success", "errored", "interrupted"]


class Finish(Wire):
    """sessions/{id}/finish."""

    reason: FinishReason
    detail: str | None = None


class TelemetryEvent(Wire):
    """One event; the rest of its fields is not read (they can hold API keys)."""

    event: str = ""
    event_name: str | None = None
    error_type: str | None = None
    error_message: str | None = None


class Telemetry(Wire):
    """telemetry."""

    session_id: str = ""
    events: tuple[TelemetryEvent, ...] = ()


class CreateSamplingSession(Wire):
    """create_sampling_session: of a base model, or of a saved checkpoint."""

    session_id: str
    sampling_session_seq_id: int = Field(ge=0, lt=2**31)
    base_model: str | None = None
    model_path: str | None = None


class GetInfo(Wire):
    """get_info."""

    model_id: str


class WeightsPath(Wire):
    """weights_info."""

    tinker_path: str


class RetrieveFuture(Wire):
    """retrieve_future; allow_metadata_only: of a large result only its size is wanted first."""

    request_id: str
    allow_metadata_only: bool = False


class SamplingTarget(Wire):
    """Whose answers retrieve_futures is about: one copy of a sampling client."""

    sampling_session_id: str
    cloned_sampler_id: int = Field(default=0, ge=0, lt=9_000_000_000)


class RetrieveFutures(Wire):
    """retrieve_futures. timeout: seconds to wait when there is nothing; retrieved_request_ids: results downloaded."""

    target: SamplingTarget
    prev_cursor: int = Field(default=0, ge=0, lt=2**63)
    timeout: float | None = Field(default=None, ge=0)
    retrieved_request_ids: tuple[str, ...] = Field(default=(), max_length=100_000)


class CancelFuture(Wire):
    """cancel_future."""

    request_id: str


class JoinSamplingSession(Wire):
    """join_sampling_session."""

    sampling_session_id: str


# ------------------------------------------------------------------ answers
class SessionCreated(Wire):
    """create_session."""

    type: Literal["create_session"] = "create_session"
    session_id: str


class HeartbeatHeard(Wire):
    """session_heartbeat."""

    type: Literal["session_heartbeat"] = "session_heartbeat"


class TelemetryAccepted(Wire):
    """telemetry."""

    status: Literal["accepted"] = "accepted"


class Token(Wire):
    """auth/token."""

    jwt: str


class KeyOrganization(Wire):
    """The project of a key."""

    name: str


class KeyUser(Wire):
    """Who a key is known by."""

    email: str


class KeyDetails(Wire):
    """Whose a key is."""

    org_details: KeyOrganization
    user_details: KeyUser


class OwnKey(Wire):
    """auth/apikey/me."""

    key_id: int
    name: str
    note: str = ""
    details: KeyDetails


class Health(Wire):
    """healthz."""

    status: Literal["ok"] = "ok"


class SupportedModel(Wire):
    """A base model that is served."""

    model_name: str
    max_context_length: int
    trainable: bool = True
    sampleable: bool = True


class Capabilities(Wire):
    """get_server_capabilities."""

    supported_models: list[SupportedModel]


class SamplingSessionCreated(Wire):
    """create_sampling_session."""

    type: Literal["create_sampling_session"] = "create_sampling_session"
    sampling_session_id: str


class SamplingSessionJoined(Wire):
    """join_sampling_session."""

    type: Literal["join_sampling_session"] = "join_sampling_session"
    client_counter: int


class Sampler(Wire):
    """samplers/{id}."""

    sampler_id: str
    base_model: str
    model_path: str | None = None


class ModelData(Wire):
    """What a model is made of; tokenizer_id is what AutoTokenizer loads on the client."""

    arch: str
    model_name: str
    tokenizer_id: str


class ModelInfo(Wire):
    """get_info. Without model_name the SDK would ask samplers/{id}, and its get_tokenizer() fail."""

    type: Literal["get_info"] = "get_info"
    model_id: str
    model_data: ModelData
    is_lora: bool = True
    lora_rank: int
    model_name: str
    optimizer_config: dict[str, str | int]


class Checkpoint(Wire):
    """A saved checkpoint; checkpoint_id is `{kind}/{name}`."""

    checkpoint_id: str
    checkpoint_type: CheckpointType
    time: datetime
    tinker_path: str
    size_bytes: int
    public: bool
    user_metadata: dict[str, str]
    expires_at: datetime | None = None


class Cursor(Wire):
    """Which part of a list this is."""

    offset: int
    limit: int
    total_count: int


class Checkpoints(Wire):
    """A list of checkpoints, newest first."""

    checkpoints: list[Checkpoint]
    cursor: Cursor | None = None


class TrainingRun(Wire):
    """A training run (a model). corrupted: its state was lost with a worker group."""

    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool = True
    corrupted: bool
    lora_rank: int
    last_request_time: datetime
    last_checkpoint: Checkpoint | None = None
    last_sampler_checkpoint: Checkpoint | None = None
    user_metadata: dict[str, str]


class TrainingRuns(Wire):
    """A list of training runs, newest first."""

    training_runs: list[TrainingRun]
    cursor: Cursor


class WeightsInfo(Wire):
    """weights_info: what is needed to load a checkpoint."""

    base_model: str
    is_lora: bool = True
    lora_rank: int
    train_unembed: bool
    train_mlp: bool
    train_attn: bool
    optimizer_config: dict[str, str | int]


class WeightsCopied(Wire):
    """copy_weights."""

    tinker_path: str


class ExternalWeightsUrls(Wire):
    """external_weights_urls: by relative path, where each file can be read until `expires`."""

    urls: dict[str, str]
    expires: datetime

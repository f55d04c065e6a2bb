"""What goes into the journal: frozen dataclasses, made by the API (New...) and by the engine (Outcome, its effects)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from tinkerflow.backend.commands import Optimizer, StabilityInfo
from tinkerflow.backend.errors import Category
from tinkerflow.backend.journal.kinds import CheckpointKind, Kind, ModelState, PayloadType, SamplerState, UsageKind


@dataclass(frozen=True)
class NewSession:
    """A client's session, as create_session describes it. key_id: the key that made it, "" without keys.

    owner is the tenant boundary; project_id is a label of the client's inside it.
    """

    owner: str
    sdk_version: str
    tags: tuple[str, ...] = ()
    user_metadata: Mapping[str, object] = field(default_factory=dict)
    project_id: str | None = None
    display_name: str | None = None
    key_id: str = ""


@dataclass(frozen=True)
class NewModel:
    """A training run about to be created; its id is `{session_id}:train:{n}` (tinkerflow.backend.ids.model_id)."""

    id: str
    session_id: str
    owner: str
    base_model: str
    rank: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    optimizer: Optimizer = "adamw"
    seed: int | None = None
    user_metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class NewSampler:
    """A sampling session; its id is `{session_id}:sample:{n}` (tinkerflow.backend.ids.sampler_id).

    model_path: the checkpoint it samples (it can be loaded again); snapshot_id: its snapshot in the worker group.
    Both None: the base model itself.
    """

    id: str
    session_id: str
    owner: str
    base_model: str
    model_path: str | None = None
    snapshot_id: str | None = None


@dataclass(frozen=True)
class NewRequest:
    """One operation. Exactly one of model_id and sampler_id is given; its session is the model's or sampler's.

    content_hash: equal for replays of the same operation, whatever else differs in the bytes.
    error: set when the request is already known to be wrong. It is stored, its seq_id is used up, and it answers
    with this error: that is how a bad content is refused without a 4xx (PROTOCOL.md 3.5).
    tokens: of training data, counted while it waits when there is a limit; stores: whether it saves a checkpoint.
    """

    kind: Kind
    owner: str
    payload: bytes
    payload_type: PayloadType
    content_hash: str
    model_id: str | None = None
    sampler_id: str | None = None
    seq_id: int | None = None
    error: str | None = None
    category: Category = "user"
    tokens: int = 0
    stores: bool = False


@dataclass(frozen=True)
class NewCustomLoss:
    """A loss that a client traced; its id is `{session_id}:loss:{n}` (tinkerflow.backend.ids.custom_loss_id).

    definition: its inputs and graph as JSON text, checked already; error: what was wrong with it, as in NewRequest.
    """

    session_id: str
    owner: str
    seq_id: int
    name: str
    definition: str
    payload: bytes
    content_hash: str
    error: str | None = None


# ------------------------------------------------------------------ effects: row changes made with an outcome
@dataclass(frozen=True)
class ModelLive:
    """The model exists in the worker group now. rank and train_* are given when a checkpoint decided them."""

    model_id: str
    step: int = 0
    rank: int | None = None
    train_attn: bool | None = None
    train_mlp: bool | None = None
    train_unembed: bool | None = None


@dataclass(frozen=True)
class ModelEnded:
    """The model takes no more work: requests still waiting for it fail in the same transaction, with `detail`."""

    model_id: str
    state: Literal[ModelState.LOST, ModelState.UNLOADED, ModelState.FAILED]
    detail: str


@dataclass(frozen=True)
class StepMade:
    """The model stands at `step` optimizer steps now (after an optim_step, or after loading weights)."""

    model_id: str
    step: int


@dataclass(frozen=True)
class SamplerOpened:
    """A sampler exists now (an unnamed save_weights_for_sampler makes one). An id that exists stays as it is."""

    sampler: NewSampler


@dataclass(frozen=True)
class SamplerLoaded:
    """The sampler's checkpoint is in the worker group now, as this snapshot; None: it is there no longer."""

    sampler_id: str
    snapshot_id: str | None


@dataclass(frozen=True)
class SamplerEnded:
    """The sampler takes no more work: requests still waiting for it fail in the same transaction, with `detail`."""

    sampler_id: str
    state: Literal[SamplerState.LOST, SamplerState.CLOSED]
    detail: str


@dataclass(frozen=True)
class CheckpointSaved:
    """A checkpoint was committed to the store under `path` (tinker://...). Saving a path again replaces its row.

    size_bytes: all its files together. expires_at: aware, or None for never. attempt: the store's, "" when unknown.
    created_at: when it was committed, None: now.
    """

    path: str
    run_id: str
    kind: CheckpointKind
    name: str
    owner: str
    base_model: str
    rank: int
    train_attn: bool
    train_mlp: bool
    train_unembed: bool
    step: int
    size_bytes: int
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    expires_at: datetime | None = None
    optimizer: Optimizer = "adamw"
    attempt: str = ""
    created_at: datetime | None = None


@dataclass(frozen=True)
class SequencesRecorded:
    """Sampled sequences of a session that stable_reinforce may be trained on (record_stability_info)."""

    session_id: str
    sequences: tuple[StabilityInfo, ...]


@dataclass(frozen=True)
class SnapshotTaken:
    """A recovery snapshot was committed to the store under `path`: the model as its requests up to seq_id made it.

    snapshot_id: it holds only the weights that this sampling snapshot of the model was published with.
    """

    path: str
    model_id: str
    seq_id: int
    step: int
    size_bytes: int
    snapshot_id: str | None = None


@dataclass(frozen=True)
class Used:
    """So many tokens (or checkpoints) were used for a session on a base model; counted in the hour of the answer."""

    session_id: str
    base_model: str
    kind: UsageKind
    quantity: int


Effect = (
    ModelLive
    | ModelEnded
    | StepMade
    | SamplerOpened
    | SamplerLoaded
    | SamplerEnded
    | CheckpointSaved
    | SequencesRecorded
    | SnapshotTaken
    | Used
)


@dataclass(frozen=True)
class CopyMade:
    """`checkpoint`, committed to the store, is a copy of `source_path`, in a run of its own of the session named.

    key_id and project_id: as in NewSession.
    """

    session_id: str
    checkpoint: CheckpointSaved
    source_path: str
    key_id: str = ""
    project_id: str | None = None


@dataclass(frozen=True)
class CheckpointFound:
    """A checkpoint as the store's commit describes it, with what else the commit knows of it and of its run."""

    checkpoint: CheckpointSaved
    public: bool
    run_metadata: Mapping[str, str]


@dataclass(frozen=True)
class Outcome:
    """The answer to one request: result bytes, or an error with its category. Pending.done / Pending.failed make them.

    model_id, sampler_id and seq_id are the request's own: they move the model's next_seq past it, or have the sampler
    number it (completions.py). effects happen in the same
    transaction, and only if this is the request's first answer. A failed creation (seq_id 0) ends its model by itself.
    replays: it changed the model, so it is executed again when the model must be made again; or it has published
    weights that are not stored yet. That counts even when somebody else answered the request first. started_at: when
    its first command was sent, None when none was.
    """

    request_id: str
    result: bytes | None = None
    result_type: PayloadType = "json"
    error: str | None = None
    category: Category | None = None
    model_id: str | None = None
    sampler_id: str | None = None
    seq_id: int | None = None
    effects: tuple[Effect, ...] = ()
    replays: bool = False
    started_at: datetime | None = None

    def __post_init__(self) -> None:
        """Refuse an outcome that is neither a result nor an error, or both."""
        if (self.result is None) == (self.error is None):
            raise ValueError(f"outcome of {self.request_id}: exactly one of result and error must be given")
        if (self.error is None) != (self.category is None):
            raise ValueError(f"outcome of {self.request_id}: an error comes with its category, a result without")

"""The truth: what clients asked for, in which order, and what they were answered; models, samplers, checkpoints, keys.

`migrate(url)` makes the tables, `Journal.open(url)` reads and writes them, `Bell` wakes whoever waits for a change, and
`Waiters` waits for answers. Rows stay inside: what goes in is in records.py, what comes out in views.py.
"""

from backend.journal.audit import Event
from backend.journal.bell import Bell
from backend.journal.journal import Journal
from backend.journal.kinds import (
    CheckpointKind,
    Kind,
    ModelState,
    PayloadType,
    RequestState,
    SamplerState,
    SessionState,
)
from backend.journal.limits import Limits
from backend.journal.migrate import migrate
from backend.journal.records import (
    CheckpointSaved,
    CopyMade,
    Effect,
    ModelEnded,
    ModelLive,
    NewCustomLoss,
    NewModel,
    NewRequest,
    NewSampler,
    NewSession,
    Outcome,
    SamplerEnded,
    SamplerLoaded,
    SamplerOpened,
    SequencesRecorded,
    SnapshotTaken,
    StepMade,
)
from backend.journal.recovery import Recovery
from backend.journal.search import SessionQuery, SessionStatus, plain_metadata
from backend.journal.shares import access_hash
from backend.journal.views import (
    AuditView,
    BaseModelView,
    CheckpointView,
    Completion,
    Completions,
    Executed,
    Gap,
    KeyView,
    ModelView,
    Page,
    Pending,
    Result,
    RunView,
    SamplerView,
    SessionFailure,
    SessionSummary,
    SessionView,
    ShareView,
    SnapshotView,
)
from backend.journal.waiters import Waiters

__all__ = [
    "AuditView",
    "BaseModelView",
    "Bell",
    "CheckpointKind",
    "CheckpointSaved",
    "CheckpointView",
    "Completion",
    "Completions",
    "CopyMade",
    "Effect",
    "Event",
    "Executed",
    "Gap",
    "Journal",
    "KeyView",
    "Kind",
    "Limits",
    "ModelEnded",
    "ModelLive",
    "ModelState",
    "ModelView",
    "NewCustomLoss",
    "NewModel",
    "NewRequest",
    "NewSampler",
    "NewSession",
    "Outcome",
    "Page",
    "PayloadType",
    "Pending",
    "Recovery",
    "RequestState",
    "Result",
    "RunView",
    "SamplerEnded",
    "SamplerLoaded",
    "SamplerOpened",
    "SamplerState",
    "SamplerView",
    "SequencesRecorded",
    "SessionFailure",
    "SessionQuery",
    "SessionState",
    "SessionStatus",
    "SessionSummary",
    "SessionView",
    "ShareView",
    "SnapshotTaken",
    "SnapshotView",
    "StepMade",
    "Waiters",
    "access_hash",
    "migrate",
    "plain_metadata",
]

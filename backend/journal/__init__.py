"""The journal: all client requests with their order and answers, in an SQL database.

`migrate(url)` creates the tables, and `Journal.open(url)` returns one aggregate for each kind of row, as in
`journal.requests.submit(...)`. A `Notifier` wakes the processes that subscribed to a change.

The file of each aggregate defines its inputs (New..., effects), its outputs (...View) and its transactions.
"""

from tinkerflow.backend.core.ids import CheckpointKind as CheckpointKind
from tinkerflow.backend.journal.ancestry import RunSaves as RunSaves
from tinkerflow.backend.journal.audit import AuditedEvent as AuditedEvent
from tinkerflow.backend.journal.audit import actor_of_key as actor_of_key
from tinkerflow.backend.journal.audit import command_line_actor as command_line_actor
from tinkerflow.backend.journal.base_models import BaseModelView as BaseModelView
from tinkerflow.backend.journal.checkpoint_search import CheckpointQuery as CheckpointQuery
from tinkerflow.backend.journal.checkpoints import CheckpointSaved as CheckpointSaved
from tinkerflow.backend.journal.checkpoints import CheckpointView as CheckpointView
from tinkerflow.backend.journal.checkpoints import access_hash as access_hash
from tinkerflow.backend.journal.curves import Curve as Curve
from tinkerflow.backend.journal.curves import StepFigures as StepFigures
from tinkerflow.backend.journal.curves import Trained as Trained
from tinkerflow.backend.journal.custom_losses import NewCustomLoss as NewCustomLoss
from tinkerflow.backend.journal.custom_losses import SequencesRecorded as SequencesRecorded
from tinkerflow.backend.journal.database import AWAY as AWAY
from tinkerflow.backend.journal.effects import ModelEnded as ModelEnded
from tinkerflow.backend.journal.effects import ModelLive as ModelLive
from tinkerflow.backend.journal.effects import StepMade as StepMade
from tinkerflow.backend.journal.history import HistoryRules as HistoryRules
from tinkerflow.backend.journal.journal import Journal as Journal
from tinkerflow.backend.journal.keys import KeyView as KeyView
from tinkerflow.backend.journal.leases import LEASE_SECONDS as LEASE_SECONDS
from tinkerflow.backend.journal.leases import ProcessView as ProcessView
from tinkerflow.backend.journal.migrate import NoTablesError as NoTablesError
from tinkerflow.backend.journal.migrate import migrate as migrate
from tinkerflow.backend.journal.notify import Notifier as Notifier
from tinkerflow.backend.journal.quotas import Limits as Limits
from tinkerflow.backend.journal.recovery import Executed as Executed
from tinkerflow.backend.journal.recovery import SnapshotTaken as SnapshotTaken
from tinkerflow.backend.journal.recovery import SnapshotView as SnapshotView
from tinkerflow.backend.journal.requests import NewRequest as NewRequest
from tinkerflow.backend.journal.requests import Pending as Pending
from tinkerflow.backend.journal.results import Completions as Completions
from tinkerflow.backend.journal.results import Effect as Effect
from tinkerflow.backend.journal.results import LossMeasured as LossMeasured
from tinkerflow.backend.journal.results import Outcome as Outcome
from tinkerflow.backend.journal.results import Result as Result
from tinkerflow.backend.journal.results import StepMeasured as StepMeasured
from tinkerflow.backend.journal.results import Used as Used
from tinkerflow.backend.journal.run_events import RunEvent as RunEvent
from tinkerflow.backend.journal.run_metrics import Metric as Metric
from tinkerflow.backend.journal.run_table import RunQuery as RunQuery
from tinkerflow.backend.journal.run_values import Extent as Extent
from tinkerflow.backend.journal.samplers import NewSampler as NewSampler
from tinkerflow.backend.journal.samplers import SamplerLoaded as SamplerLoaded
from tinkerflow.backend.journal.samplers import SamplerOpened as SamplerOpened
from tinkerflow.backend.journal.samplers import SamplerView as SamplerView
from tinkerflow.backend.journal.samples import SampleView as SampleView
from tinkerflow.backend.journal.samples import WholeSample as WholeSample
from tinkerflow.backend.journal.service_metrics import ServiceFigures as ServiceFigures
from tinkerflow.backend.journal.sessions import NewSession as NewSession
from tinkerflow.backend.journal.sessions import SessionFailure as SessionFailure
from tinkerflow.backend.journal.sessions import SessionQuery as SessionQuery
from tinkerflow.backend.journal.sessions import SessionSummary as SessionSummary
from tinkerflow.backend.journal.sessions import Timed as Timed
from tinkerflow.backend.journal.sessions import plain_metadata as plain_metadata
from tinkerflow.backend.journal.subscriptions import ResultSubscriptions as ResultSubscriptions
from tinkerflow.backend.journal.tables import ModelState as ModelState
from tinkerflow.backend.journal.tables import SamplerState as SamplerState
from tinkerflow.backend.journal.tables import SessionState as SessionState
from tinkerflow.backend.journal.tables import UsageKind as UsageKind
from tinkerflow.backend.journal.training_runs import ModelView as ModelView
from tinkerflow.backend.journal.training_runs import NewModel as NewModel
from tinkerflow.backend.journal.training_runs import RunView as RunView
from tinkerflow.backend.journal.upkeep import Retention as Retention
from tinkerflow.backend.journal.uploads import NewUpload as NewUpload
from tinkerflow.backend.journal.uploads import UploadView as UploadView
from tinkerflow.backend.journal.usage import StoredUsage as StoredUsage
from tinkerflow.backend.journal.usage import Usage as Usage
from tinkerflow.backend.spec.history import Kind as Kind

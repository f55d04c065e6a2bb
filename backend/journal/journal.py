"""The journal: the open database, its notifier, and the aggregates that read and write its rows.

Every method of an aggregate is one short transaction, and publishes its topics after the commit. Methods are
synchronous and thread-safe; asynchronous callers use asyncio.to_thread. `owner` filters rows: for an owner, the rows of
other owners do not exist (NotFoundError). The owner None is the service, which has access to all rows.
"""

from __future__ import annotations

from typing import Self

from tinkerflow.backend.core.clock import Clock, SystemClock
from tinkerflow.backend.journal.ancestry import Ancestries
from tinkerflow.backend.journal.assets import Assets
from tinkerflow.backend.journal.audit import Audit
from tinkerflow.backend.journal.base_models import BaseModels
from tinkerflow.backend.journal.checkpoint_search import CheckpointSearch
from tinkerflow.backend.journal.checkpoints import SavedCheckpoints, Shares
from tinkerflow.backend.journal.curves import Curves
from tinkerflow.backend.journal.custom_losses import CustomLosses
from tinkerflow.backend.journal.database import Database
from tinkerflow.backend.journal.feedback import FeedbackGiven
from tinkerflow.backend.journal.history import Histories
from tinkerflow.backend.journal.imports import Imports
from tinkerflow.backend.journal.keys import Keys
from tinkerflow.backend.journal.leases import Leases
from tinkerflow.backend.journal.migrate import check_revision
from tinkerflow.backend.journal.notify import RECHECK_SECONDS, Notifier
from tinkerflow.backend.journal.project_limits import ProjectLimits
from tinkerflow.backend.journal.queue import Queue
from tinkerflow.backend.journal.recovery import Recovery
from tinkerflow.backend.journal.requests import Requests
from tinkerflow.backend.journal.results import Results
from tinkerflow.backend.journal.run_deletion import RunDeletions
from tinkerflow.backend.journal.run_events import RunEvents
from tinkerflow.backend.journal.run_metrics import RunMetrics
from tinkerflow.backend.journal.run_table import RunTable
from tinkerflow.backend.journal.run_values import RunValues
from tinkerflow.backend.journal.samplers import Samplers
from tinkerflow.backend.journal.samples import Samples
from tinkerflow.backend.journal.service_metrics import ServiceMetrics
from tinkerflow.backend.journal.sessions import Sessions
from tinkerflow.backend.journal.streams import Streams, TokenSubscriptions
from tinkerflow.backend.journal.subscriptions import ResultSubscriptions
from tinkerflow.backend.journal.training_runs import Runs
from tinkerflow.backend.journal.upkeep import Upkeep
from tinkerflow.backend.journal.uploads import Uploads
from tinkerflow.backend.journal.usage import UsageReports


class Journal:
    """The open journal, with one attribute per aggregate."""

    def __init__(self, database: Database, clock: Clock, notifier: Notifier) -> None:
        """Use `open`."""
        self._database = database
        self.notifier = notifier
        parts = (database, clock, notifier.publish)
        self.requests = Requests(*parts)
        self.queue = Queue(*parts)
        self.results = Results(*parts)
        self.streams = Streams(*parts)
        self.feedback = FeedbackGiven(*parts)
        self.sessions = Sessions(*parts)
        self.models = Runs(*parts)
        self.samplers = Samplers(*parts)
        self.custom_losses = CustomLosses(*parts)
        self.curves = Curves(*parts)
        self.run_events = RunEvents(*parts)
        self.ancestries = Ancestries(*parts)
        self.run_metrics = RunMetrics(*parts)
        self.run_table = RunTable(*parts)
        self.run_deletions = RunDeletions(*parts)
        self.run_values = RunValues(*parts)
        self.samples = Samples(*parts)
        self.checkpoints = SavedCheckpoints(*parts)
        self.checkpoint_search = CheckpointSearch(*parts)
        self.shares = Shares(*parts)
        self.imports = Imports(*parts)
        self.uploads = Uploads(*parts)
        self.assets = Assets(*parts)
        self.upkeep = Upkeep(*parts)
        self.usage = UsageReports(*parts)
        self.keys = Keys(*parts)
        self.project_limits = ProjectLimits(*parts)
        self.audit = Audit(*parts)
        self.base_models = BaseModels(*parts)
        self.recovery = Recovery(*parts)
        self.histories = Histories(*parts)
        self.metrics = ServiceMetrics(*parts)
        self.leases = Leases(*parts)

    @classmethod
    def open(cls, url: str, *, clock: Clock | None = None) -> Self:
        """Open the migrated database `url`.

        ServerError: the database is not at the newest schema. NoTablesError: the database has no tables. UserError: the
        server refuses the URL.
        """
        database = Database(url)
        try:
            check_revision(database)
        except BaseException:
            database.close()
            raise
        return cls(database, clock or SystemClock(), Notifier(url))

    def result_subscriptions(self, *, recheck_seconds: float = RECHECK_SECONDS) -> ResultSubscriptions:
        """Wake clients that wait for answers. Returns an async context manager; see ResultSubscriptions."""
        return ResultSubscriptions(
            self.notifier,
            self.results.finished,
            self.results.last_completions,
            TokenSubscriptions(self.streams.last, self.streams.after),
            recheck_seconds=recheck_seconds,
        )

    def close(self) -> None:
        """Close all connections and the notifier."""
        self._database.close()
        self.notifier.close()

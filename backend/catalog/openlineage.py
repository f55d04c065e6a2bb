"""Sends training runs as OpenLineage events to catalogs such as Marquez and DataHub. Nothing waits for the receiver.

Events are made from the journal, with its times, and the id of a run is derived from our id. So an event that is sent
again after a crash equals the first event, unless the history of its data was deleted meanwhile. A file records the
sent events. https://openlineage.io/spec defines the events, and the library `openlineage-python` their classes.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import NAMESPACE_URL, uuid5

from tinkerflow.backend.catalog.card import TrainedData, saved_by
from tinkerflow.backend.catalog.history import past_requests
from tinkerflow.backend.core.errors import NotFoundError, StoreAwayError, StoreError, UserError
from tinkerflow.backend.core.ids import hub_name
from tinkerflow.backend.core.retry import Restarts
from tinkerflow.backend.journal import AWAY, CheckpointView, Journal, ModelState, ModelView, RunSaves
from tinkerflow.backend.spec.checkpoint import CheckpointPath
from tinkerflow.backend.store import Store
from tinkerflow.backend.tracking.journal_runs import ALL_SECONDS, LOOK_SECONDS, alone, look_at_runs
from tinkerflow.backend.tracking.mirror import TrackerError

if TYPE_CHECKING:
    from openlineage.client.event_v2 import InputDataset, OutputDataset, RunEvent
    from openlineage.client.transport import Transport

log = logging.getLogger(__name__)

NAMESPACE = "tinkerflow"
_MOST_READ = 16  # runs whose history is in memory; other histories are read again from their beginning
_PAGE = 500
_ENDS: Mapping[ModelState, str] = {ModelState.UNLOADED: "COMPLETE", ModelState.FAILED: "FAIL", ModelState.LOST: "FAIL"}


@dataclass(frozen=True)
class DataFacts:
    """The data of a run, up to a checkpoint or its end. version: a digest. loaded: the checkpoint that it began with.

    figures: numbers of rows, different rows, tokens and optimizer steps; none if only the digest is known.
    """

    version: str
    loaded: str | None
    figures: Mapping[str, int]


def data_facts(data: TrainedData) -> DataFacts:
    """The facts of data that were read from a history."""
    figures = {"rows": sum(data.rows.values()), "differentRows": len(data.rows), "tokens": data.tokens}
    return DataFacts(data.data_digest, data.loaded, figures | {"steps": data.steps})


@dataclass
class _ReadHistory:
    """A history up to request `seq_id`. saved: the data in each checkpoint, by its path."""

    seq_id: int = -1
    data: TrainedData = field(default_factory=TrainedData)
    saved: dict[str, DataFacts] = field(default_factory=dict)


class LineageMirror:
    """Sends the events of training runs to one receiver."""

    def __init__(self, url: str, journal: Journal, store: Store, folder: Path, projects: Collection[str] = ()) -> None:
        """Prepare to send events. UserError: the library is not installed.

        url: the receiver's URL: http://, https:// or file:///. journal, store: with the runs and their histories.
        folder: for the data of all trackers. projects: the projects of the sent runs; none = all projects.
        """
        self._transport = _transport(url)
        self._url, self._journal, self._store, self._projects = url, journal, store, projects
        self._folder = folder / "openlineage"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._sent = _Sent(self._folder / "sent.txt")
        self._seen: dict[str, RunSaves] = {}  # the state of each run when all its events had been sent
        self._read: dict[str, _ReadHistory] = {}
        self._live: set[str] = set()
        self._failures: dict[str, int] = {}
        self._all_at = -ALL_SECONDS

    def keep(self, stop: threading.Event) -> None:
        """Send new events until `stop` is set. UserError: another process is already sending them."""
        restarts = Restarts()
        with alone(self._folder):
            while not stop.is_set():
                pause = LOOK_SECONDS
                try:
                    self.turn()
                    restarts = Restarts()
                except AWAY as error:
                    log.warning("openlineage waits for the journal: %s", error)
                except (TrackerError, StoreError) as error:
                    pause = restarts.pause(steady=False)
                    log.warning("%s; trying again in %g s", error, pause)
                stop.wait(pause)
        self._transport.close()

    def once(self) -> None:
        """Send the journal's current events. UserError: as in `keep`. TrackerError or StoreError: a run failed."""
        with alone(self._folder):
            while True:
                failed = len(self._failures)
                try:
                    self.turn()
                    break
                except (TrackerError, StoreError):
                    if len(self._failures) == failed:  # all other runs were sent
                        raise
        self._transport.close()

    def turn(self) -> None:
        """Send new events. TrackerError or StoreError: a run failed, and the next turn sends the remaining events.

        Runs with failed events come last, so that an event that the receiver rejects does not block other runs.
        """
        now = time.monotonic()
        read = partial(self._journal.ancestries.saves, self._projects)
        found, every = look_at_runs(read, self._live, every=now - self._all_at >= ALL_SECONDS)
        for saves in sorted(found, key=lambda run: self._failures.get(run.id, 0)):
            if self._seen.get(saves.id) == saves:
                continue
            try:
                if self._send_run(saves.id):
                    self._seen[saves.id] = saves
            except NotFoundError as error:  # a person has deleted the run meanwhile
                log.info("events of run %s are not sent: %s", saves.id, error)
            except (TrackerError, StoreError):
                self._failures[saves.id] = self._failures.get(saves.id, 0) + 1
                raise
        self._live = {run.id for run in found if run.state not in _ENDS}
        if every:
            self._all_at = now

    def _send_run(self, run_id: str) -> bool:
        """Send the events of a run. Returns False if a checkpoint waits until its request is in the history."""
        run, name = self._journal.models.get(run_id, None), self._journal.models.label(run_id)
        checkpoints = sorted(self._checkpoints(run_id), key=lambda one: (one.created_at, one.path))
        end, complete = _ENDS.get(run.state, ""), True
        self._send(run, name, "START", "START", run.created_at)
        for saved in checkpoints:
            key = saved.attempt or saved.path
            if self._sent.has(run_id, key):
                continue
            facts = self._data(run, saved.path)
            by_request = CheckpointPath.parse(saved.path).step is None
            if facts is None and by_request and not end and self._journal.histories.exists(run_id):
                complete = False
                continue
            over = self._sent.has(run_id, "COMPLETE") or self._sent.has(run_id, "FAIL")
            self._send(run, name, key, "OTHER" if over else "RUNNING", saved.created_at, facts, saved)
        if end and complete:
            at = max([run.last_request_at, *(one.created_at for one in checkpoints)])
            self._send(run, name, end, end, at, self._data(run, None))
            self._read.pop(run_id, None)
        return complete

    def _send(
        self,
        run: ModelView,
        name: str,
        key: str,
        kind: str,
        at: datetime,
        data: DataFacts | None = None,
        saved: CheckpointView | None = None,
    ) -> None:
        """Send an event unless it has already been sent.

        run, name: the run with its name, "" if it has none. key: the event's key in the run. kind: OpenLineage's type.
        at: the time of the event. data: the run's data. saved: the checkpoint that the event is about.
        """
        if self._sent.has(run.id, key):
            return
        try:
            self._transport.emit(run_event(run, name, kind, at, data, saved, self._store.url))
        except Exception as error:
            why = " ".join(f"{type(error).__name__}: {error}".split())
            raise TrackerError(
                f"openlineage at {self._url}: event {kind} of run {run.id} was not sent: {why}"
            ) from error
        self._sent.note(run.id, key)

    def _checkpoints(self, run_id: str) -> list[CheckpointView]:
        found: list[CheckpointView] = []
        while page := self._journal.checkpoints.page(None, run_id=run_id, limit=_PAGE, offset=len(found)).rows:
            found += page
        return found

    def _data(self, run: ModelView, path: str | None) -> DataFacts | None:
        """The data in a checkpoint, or with path None in the whole run; None if they are not in the history."""
        if not self._journal.histories.exists(run.id):
            return None
        read = self._read.pop(run.id, None) or _ReadHistory()
        self._read[run.id] = read  # the newest is the last
        while len(self._read) > _MOST_READ:
            del self._read[next(iter(self._read))]
        try:
            for past in past_requests(self._journal, self._store, run.id, after=read.seq_id):
                read.seq_id = past.seq_id
                if past.error is None:
                    read.data.add(past.kind, past.payload)
                    if (made := saved_by(run.id, past.kind, past.payload)) is not None:
                        read.saved[made] = data_facts(read.data)
        except StoreAwayError:
            raise
        except StoreError as error:
            log.warning("the lineage of run %s is sent without its data: %s", run.id, error)
            return DataFacts("", run.origin, {})
        return data_facts(read.data) if path is None else read.saved.get(path)


class _Sent:
    """A file with the sent events: a line for each, with its run. A line that a crash cut off is ignored."""

    def __init__(self, path: Path) -> None:
        text = path.read_text() if path.exists() else ""
        self._path, self._lines = path, set(text.split("\n")[:-1])
        self._cut = bool(text) and not text.endswith("\n")

    def has(self, run_id: str, key: str) -> bool:
        return f"{run_id}\t{key}" in self._lines

    def note(self, run_id: str, key: str) -> None:
        line = f"{run_id}\t{key}"
        self._lines.add(line)
        with self._path.open("a") as file:
            file.write("\n" * self._cut + line + "\n")
        self._cut = False


def run_uuid(run_id: str) -> str:
    """The id of a training run in OpenLineage."""
    return str(uuid5(NAMESPACE_URL, f"tinker://{run_id}"))


def run_event(
    run: ModelView,
    name: str,
    kind: str,
    at: datetime,
    data: DataFacts | None,
    saved: CheckpointView | None,
    store_url: str,
) -> RunEvent:
    """The event of a run.

    run, name: the run with its name, "" if it has none. kind: START, RUNNING, COMPLETE, FAIL or OTHER. at: its time.
    data: the run's data, None if unknown. saved: a checkpoint, the event's output. store_url: the URL of the
    checkpoint's store.
    """
    from openlineage.client import event_v2 as events
    from openlineage.client import facet_v2 as facets

    pattern = facets.job_type_job.EmissionPattern(eventTrigger="EVENT_BASED", eventContentMode="ACCUMULATIVE")
    kind_of_job = _facet(
        facets.job_type_job.JobTypeJobFacet,
        processingType="BATCH",
        integration="TINKERFLOW",
        jobType="TRAINING_RUN",
        emissionPattern=pattern,
    )
    named = {"run": run.id, "rank": run.rank, "optimizer": run.optimizer, "seed": run.seed, **run.user_metadata}
    parameter = facets.execution_parameters_run.ExecutionParameter
    parameters = [parameter(key=key, value=str(value)) for key, value in named.items() if value is not None]
    run_facets = {
        "executionParameters": _facet(
            facets.execution_parameters_run.ExecutionParametersRunFacet, parameters=parameters
        ),
        "processing_engine": _facet(
            facets.processing_engine_run.ProcessingEngineRunFacet, name="tinkerflow", version=version("tinkerflow")
        ),
    }
    if kind == "FAIL":
        failure = facets.error_message_run.ErrorMessageRunFacet
        message = f"{run.state}: {run.detail}"
        run_facets["errorMessage"] = _facet(failure, message=message, programmingLanguage="Python")
    return events.RunEvent(
        eventType=events.RunState[kind],
        eventTime=at.isoformat(),
        run=events.Run(run_uuid(run.id), run_facets),
        job=events.Job(f"{NAMESPACE}/{run.owner}", name or run.id, {"jobType": kind_of_job}),
        inputs=_inputs(run, data),
        outputs=[] if saved is None else [_output(saved, store_url)],
        producer=_producer(),
    )


def _inputs(run: ModelView, data: DataFacts | None) -> list[InputDataset]:
    """The base model, the checkpoint that the run began with, and its data, if known."""
    from openlineage.client.event_v2 import InputDataset
    from openlineage.client.facet_v2 import datasource_dataset, input_statistics_input_dataset

    hub = hub_name(run.base_model)
    if hub is None:
        found = [InputDataset("file", run.base_model)]
    else:
        source = _facet(datasource_dataset.DatasourceDatasetFacet, name="Hugging Face", uri="https://huggingface.co")
        named = {"dataSource": source, **_version(hub[1])}
        found = [InputDataset("https://huggingface.co", hub[0], facets=named)]
    if (parent := data.loaded if data is not None else run.origin) is not None:
        found.append(InputDataset("tinker", parent.removeprefix("tinker://")))
    digest = data.version if data is not None else run.user_metadata.get("data", "")  # pipelines store a digest there
    if digest:
        statistics: dict[str, Any] = {}
        if data is not None and data.figures:
            rows = input_statistics_input_dataset.InputStatisticsInputDatasetFacet
            statistics["inputStatistics"] = _facet(rows, rowCount=data.figures["rows"])
            statistics["tinkerflow_trainedData"] = _trained(data.figures)
        found.append(InputDataset("tinker", f"{run.id}/data", facets=_version(digest), inputFacets=statistics))
    return found


def _trained(figures: Mapping[str, int]) -> Any:
    """Our own facet with figures of the trained data. Its schema is the generic one of facets."""
    from openlineage.client.generated.base import InputDatasetFacet

    return _facet(InputDatasetFacet).with_additional_properties(**figures)


def _output(saved: CheckpointView, store_url: str) -> OutputDataset:
    from openlineage.client.event_v2 import OutputDataset
    from openlineage.client.facet_v2 import datasource_dataset, output_statistics_output_dataset, storage_dataset

    facets = {
        "dataSource": _facet(datasource_dataset.DatasourceDatasetFacet, name="checkpoints", uri=store_url),
        "storage": _facet(storage_dataset.StorageDatasetFacet, storageLayer="tinkerflow", fileFormat="safetensors"),
        **_version(saved.attempt),
    }
    size = _facet(output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet, size=saved.size_bytes)
    name = saved.path.removeprefix("tinker://")
    return OutputDataset("tinker", name, facets=facets, outputFacets={"outputStatistics": size})


def _version(text: str) -> dict[str, Any]:
    from openlineage.client.facet_v2 import dataset_version_dataset

    return {"version": _facet(dataset_version_dataset.DatasetVersionDatasetFacet, datasetVersion=text)} if text else {}


def _facet(kind: Any, **values: Any) -> Any:
    return kind(**values, producer=_producer())


def _producer() -> str:
    return f"urn:tinkerflow:{version('tinkerflow')}"


def check_library(url: str) -> None:
    """Raise UserError if the library is not installed. url: the receiver's URL, for the error."""
    if find_spec("openlineage") is None:
        raise UserError(f"openlineage_url {url!r}: its library is not installed; pip install 'tinkerflow[openlineage]'")


def _transport(url: str) -> Transport:
    check_library(url)
    from openlineage.client.transport.file import FileConfig, FileTransport
    from openlineage.client.transport.http import ApiKeyTokenProvider, HttpConfig, HttpTransport, TokenProvider

    if url.startswith("file:"):
        return FileTransport(FileConfig(url, append=True))
    key = os.environ.get("OPENLINEAGE_API_KEY")  # the library's own variable
    access = ApiKeyTokenProvider({"apiKey": key}) if key else TokenProvider({})
    return HttpTransport(HttpConfig(url, auth=access, retry={"total": 0}))  # `keep` sends again

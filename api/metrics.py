"""Every metric of `/metrics`, declared once with its name, meaning and labels.

Each app has its own registry, so that one process can hold several apps. The app counts requests in plain numbers
(`Answered`), because prometheus_client's locked Counter and Histogram cost 4 us per request. Metrics from the journal
are read when the page is requested.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from tinkerflow.backend.catalog.model_card import public_name
from tinkerflow.backend.journal import BaseModelView, Kind, ProcessView, ServiceFigures, UsageKind
from tinkerflow.backend.spec.drift import DRIFT_FIGURES

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

_FAILED = "Operations that failed in the service and whose error a client read, by kind. Invalid requests do not count."
_WAITING = {
    "samples": "Sample requests that have no answer yet.",
    "models": "Models with an operation that can be executed now.",
}
_OLDEST = "Seconds since the oldest request without an answer was submitted, by kind: samples, training. 0: none waits."
_TOKENS = "Tokens of training, of prompts (computed, and found in the cache), and of samples."
_UNSAVED = "Seconds since the last recovery snapshot of the model whose changes have waited longest for one."
_GENERATION = "Number of the current worker group, which is one more than the number of earlier groups."
_STARTS = "Starts of the engine and of the API, including restarts by `tinkerflow up` or Kubernetes."
_MEMORY = "Reserved bytes of each device, by use."
# Fields of CompileStatus, counted since the worker group's start.
_PROGRAMS: dict[str, tuple[type[CounterMetricFamily] | type[GaugeMetricFamily], str]] = {
    "planned": (GaugeMetricFamily, "Programs that the warm-up compiles before they are needed."),
    "ready": (GaugeMetricFamily, "Planned programs that the warm-up has finished, including failed ones."),
    "failed": (GaugeMetricFamily, "Planned programs that could not be compiled."),
    "needed": (CounterMetricFamily, "Programs compiled for a waiting request before the warm-up had ended."),
    "late": (CounterMetricFamily, "Programs compiled for a waiting request after the warm-up had ended."),
}
_DRAFTS = "Drafted tokens of samples, accepted and rejected."
_PAGES = "Pages of the KV cache, used and free."


@dataclass
class Answered:
    """The answered requests of one operation: their number by status, and their durations.

    took: the number in each interval that ends at one of SECONDS, and last the number of longer ones. seconds: the sum.
    """

    statuses: Counter[int] = field(default_factory=Counter)
    took: list[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    seconds: float = 0.0


@dataclass(frozen=True)
class Known:
    """Metrics from the journal, for one page.

    bases: the served base models. waiting: the numbers of waiting `samples` and `models`. observed: the service's
    figures at the time `now`. parts: the last heartbeats.
    """

    bases: Sequence[BaseModelView]
    waiting: Mapping[str, int]
    observed: ServiceFigures
    parts: Sequence[ProcessView]
    now: datetime


class Metrics(Collector):
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.answered: dict[str, Answered] = {}
        # Operations, by kind. Counts start at 0, because Prometheus detects no increase in a new time series.
        self.failed: Counter[str] = Counter(dict.fromkeys(Kind, 0))
        self._known: Known | None = None
        self.registry.register(self)

    def page(self, known: Known) -> bytes:
        """The page in Prometheus's text format."""
        self._known = known
        return generate_latest(self.registry)

    def collect(self) -> Iterable[Metric]:
        """The metrics of the app's requests, and the metrics from the journal."""
        text = "HTTP requests answered, by operation and status code."
        requests = CounterMetricFamily("tinkerflow_requests", text, labels=("operation", "status"))
        text = "Seconds from a request's headers to the end of its answer. Long polls include the time they are held."
        seconds = HistogramMetricFamily("tinkerflow_request_seconds", text, labels=("operation",))
        for operation, answered in list(self.answered.items()):
            for status, count in list(answered.statuses.items()):
                requests.add_metric((operation, str(status)), count)
            bounds = (*(str(bound) for bound in SECONDS), "+Inf")
            buckets = list(zip(bounds, accumulate(answered.took), strict=True))
            seconds.add_metric((operation,), buckets, answered.seconds)
        failed = CounterMetricFamily("tinkerflow_operations_failed", _FAILED, labels=("operation",))
        for kind, count in list(self.failed.items()):
            failed.add_metric((kind,), count)
        yield from (requests, seconds, failed)
        if self._known is not None:
            yield from _of_journal(self._known)
            yield from _of_groups(self._known)


def _of_journal(known: Known) -> Iterable[Metric]:
    for name, meaning in _WAITING.items():
        yield GaugeMetricFamily(f"tinkerflow_waiting_{name}", meaning, known.waiting[name])
    observed = known.observed
    waits = observed.waiting_since.items()
    ages = [(kind, 0.0 if since is None else (known.now - since).total_seconds()) for kind, since in waits]
    yield _gauge("tinkerflow_oldest_wait_seconds", _OLDEST, "kind", ages)
    tokens = CounterMetricFamily("tinkerflow_tokens", _TOKENS, labels=("base_model", "kind"))
    saved = CounterMetricFamily("tinkerflow_checkpoints_saved", "Saved checkpoints.", labels=("base_model",))
    used = Counter[tuple[str, str]]()  # a moved data dir has its embedded model under several names
    for (base_model, kind), count in observed.used.items():
        used[public_name(base_model), kind] += count
    for (base_model, kind), count in used.items():
        if kind == UsageKind.CHECKPOINT:
            saved.add_metric((base_model,), count)
        else:
            tokens.add_metric((base_model, kind), count)
    yield from (tokens, saved)
    yield _by_base_model("tinkerflow_models_live", "Models that accept operations.", observed.live)
    unsaved = {name: (known.now - since).total_seconds() for name, since in observed.unsaved_since.items()}
    yield _by_base_model("tinkerflow_unsaved_seconds", _UNSAVED, unsaved)
    for figure in DRIFT_FIGURES:
        yield _by_base_model(f"tinkerflow_{figure.name}", figure.meaning, observed.drift.get(figure.name, {}))
    beats = [(part.name, (known.now - part.beat_at).total_seconds()) for part in known.parts]
    yield _gauge("tinkerflow_beat_age_seconds", "Seconds since the last heartbeat of a part.", "part", beats)
    starts = CounterMetricFamily("tinkerflow_part_starts", _STARTS, labels=("part",))
    for part in known.parts:
        starts.add_metric((part.name,), part.epoch)
    yield starts


def _gauge(name: str, meaning: str, label: str, values: Iterable[tuple[str, float]]) -> Metric:
    """A gauge with one label. values: pairs of a label's value and the gauge's."""
    gauge = GaugeMetricFamily(name, meaning, labels=(label,))
    for labeled, value in values:
        gauge.add_metric((labeled,), value)
    return gauge


def _by_base_model(name: str, meaning: str, values: Mapping[str, float]) -> Metric:
    """A gauge with the label `base_model`."""
    return _gauge(name, meaning, "base_model", {public_name(base): value for base, value in values.items()}.items())


def _of_groups(known: Known) -> Iterable[Metric]:
    generation = GaugeMetricFamily("tinkerflow_worker_group_generation", _GENERATION, labels=("base_model",))
    memory = GaugeMetricFamily("tinkerflow_device_memory_bytes", _MEMORY, labels=("base_model", "use"))
    for base in known.bases:
        if base.worker_group is not None:
            generation.add_metric((public_name(base.name),), base.worker_group["generation"])
            for use, size in base.worker_group.get("memory", {}).items():
                memory.add_metric((public_name(base.name), use), size)
    yield from (generation, memory)
    statuses = [
        (public_name(base.name), base.compile_status) for base in known.bases if base.compile_status is not None
    ]
    for number, (family, meaning) in _PROGRAMS.items():
        metric = family(f"tinkerflow_programs_{number}", meaning, labels=("base_model",))
        for name, status in statuses:
            metric.add_metric((name,), getattr(status, number))
        yield metric
    pages = GaugeMetricFamily("tinkerflow_kv_pages", _PAGES, labels=("base_model", "state"))
    for name, status in statuses:
        pages.add_metric((name, "used"), status.kv_pages_used)
        pages.add_metric((name, "free"), status.kv_pages - status.kv_pages_used)
    drafts = CounterMetricFamily("tinkerflow_draft_tokens", _DRAFTS, labels=("base_model", "result"))
    for name, status in statuses:
        drafts.add_metric((name, "accepted"), status.drafts_accepted)
        drafts.add_metric((name, "rejected"), status.drafted - status.drafts_accepted)
    yield from (pages, drafts)

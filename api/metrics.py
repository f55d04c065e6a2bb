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

Family = type[CounterMetricFamily] | type[GaugeMetricFamily]
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
_PROGRAMS: dict[str, tuple[Family, str]] = {
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

    took: the number of requests in each interval that ends at one of SECONDS, and last the number of longer requests.
    seconds: the sum of the durations.
    """

    statuses: Counter[int] = field(default_factory=Counter)
    took: list[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    seconds: float = 0.0


@dataclass(frozen=True)
class Known:
    """Metrics from the journal, for one page.

    bases: the served base models. waiting: the numbers of waiting `samples` and `models`. observed: the service's
    figures at the time `now`. parts: the last heartbeats of the service's parts.
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
        statuses = list[tuple[tuple[str, str], int]]()
        text = "Seconds from a request's headers to the end of its answer. Long polls include the time they are held."
        seconds = HistogramMetricFamily("tinkerflow_request_seconds", text, labels=("operation",))
        for operation, answered in list(self.answered.items()):
            statuses += [((operation, str(status)), count) for status, count in list(answered.statuses.items())]
            bounds = (*(str(bound) for bound in SECONDS), "+Inf")
            buckets = list(zip(bounds, accumulate(answered.took), strict=True))
            seconds.add_metric((operation,), buckets, answered.seconds)
        text = "HTTP requests answered, by operation and status code."
        yield _metric(CounterMetricFamily, "requests", text, ("operation", "status"), statuses)
        yield seconds
        failed = [((kind,), count) for kind, count in list(self.failed.items())]
        yield _metric(CounterMetricFamily, "operations_failed", _FAILED, ("operation",), failed)
        if self._known is not None:
            yield from _of_journal(self._known)
            yield from _of_groups(self._known)


def _of_journal(known: Known) -> Iterable[Metric]:
    for name, meaning in _WAITING.items():
        yield GaugeMetricFamily(f"tinkerflow_waiting_{name}", meaning, known.waiting[name])
    observed = known.observed
    waits = observed.waiting_since.items()
    ages = [((kind,), 0.0 if since is None else (known.now - since).total_seconds()) for kind, since in waits]
    yield _metric(GaugeMetricFamily, "oldest_wait_seconds", _OLDEST, ("kind",), ages)
    used = Counter[tuple[str, str]]()  # a moved data dir has its embedded model under several names
    for (base_model, kind), count in observed.used.items():
        used[public_name(base_model), kind] += count
    tokens = [(labels, count) for labels, count in used.items() if labels[1] != UsageKind.CHECKPOINT]
    yield _metric(CounterMetricFamily, "tokens", _TOKENS, ("base_model", "kind"), tokens)
    saved = [((base_model,), count) for (base_model, kind), count in used.items() if kind == UsageKind.CHECKPOINT]
    yield _metric(CounterMetricFamily, "checkpoints_saved", "Saved checkpoints.", ("base_model",), saved)
    yield _by_base_model("models_live", "Models that accept operations.", observed.live)
    unsaved = {name: (known.now - since).total_seconds() for name, since in observed.unsaved_since.items()}
    yield _by_base_model("unsaved_seconds", _UNSAVED, unsaved)
    for figure in DRIFT_FIGURES:
        yield _by_base_model(figure.name, figure.meaning, observed.drift.get(figure.name, {}))
    beats = [((part.name,), (known.now - part.beat_at).total_seconds()) for part in known.parts]
    yield _metric(
        GaugeMetricFamily, "beat_age_seconds", "Seconds since the last heartbeat of a part.", ("part",), beats
    )
    starts = [((part.name,), part.epoch) for part in known.parts]
    yield _metric(CounterMetricFamily, "part_starts", _STARTS, ("part",), starts)


def _metric(
    family: Family, name: str, meaning: str, labels: tuple[str, ...], values: Iterable[tuple[tuple[str, ...], float]]
) -> Metric:
    """The metric `tinkerflow_NAME`. values: pairs of the labels' values and the metric's."""
    metric = family(f"tinkerflow_{name}", meaning, labels=labels)
    for labeled, value in values:
        metric.add_metric(labeled, value)
    return metric


def _by_base_model(name: str, meaning: str, values: Mapping[str, float]) -> Metric:
    """A gauge with the label `base_model`."""
    named = {public_name(base): value for base, value in values.items()}
    return _metric(GaugeMetricFamily, name, meaning, ("base_model",), [((base,), named[base]) for base in named])


def _of_groups(known: Known) -> Iterable[Metric]:
    groups = [(public_name(base.name), base.worker_group) for base in known.bases if base.worker_group is not None]
    generations = [((name,), group["generation"]) for name, group in groups]
    yield _metric(GaugeMetricFamily, "worker_group_generation", _GENERATION, ("base_model",), generations)
    memory = [((name, use), size) for name, group in groups for use, size in group.get("memory", {}).items()]
    yield _metric(GaugeMetricFamily, "device_memory_bytes", _MEMORY, ("base_model", "use"), memory)
    statuses = [
        (public_name(base.name), base.compile_status) for base in known.bases if base.compile_status is not None
    ]
    for number, (family, meaning) in _PROGRAMS.items():
        counts = [((name,), getattr(status, number)) for name, status in statuses]
        yield _metric(family, f"programs_{number}", meaning, ("base_model",), counts)
    pages, drafts = list[tuple[tuple[str, str], int]](), list[tuple[tuple[str, str], int]]()
    for name, status in statuses:
        pages += [((name, "used"), status.kv_pages_used), ((name, "free"), status.kv_pages - status.kv_pages_used)]
        drafts.append(((name, "accepted"), status.drafts_accepted))
        drafts.append(((name, "rejected"), status.drafted - status.drafts_accepted))
    yield _metric(GaugeMetricFamily, "kv_pages", _PAGES, ("base_model", "state"), pages)
    yield _metric(CounterMetricFamily, "draft_tokens", _DRAFTS, ("base_model", "result"), drafts)

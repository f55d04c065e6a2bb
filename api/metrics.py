"""Every metric of `/metrics`, declared once: its name, what it counts, its labels. prometheus_client does the rest.

An app has a registry of its own, so that one process can hold several apps. What the app counts itself are plain
numbers (`Answered`), because a Counter and a Histogram of the library cost a request 4 us: they lock, and this is one
event loop. What the journal knows is read when the page is asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from tinkerflow.backend.commands import CompileStatus

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

_WAITING = {
    "samples": "Sample requests that have no answer yet.",
    "models": "Models with an operation that can be executed now.",
}
# The fields of CompileStatus, counted since the worker group's start.
_PROGRAMS: dict[str, tuple[type[CounterMetricFamily] | type[GaugeMetricFamily], str]] = {
    "planned": (GaugeMetricFamily, "Programs that the warm-up compiles before they are needed."),
    "ready": (GaugeMetricFamily, "Planned programs that the warm-up has finished, failed ones included."),
    "failed": (GaugeMetricFamily, "Planned programs that could not be compiled."),
    "needed": (CounterMetricFamily, "Programs compiled for a waiting request before the warm-up had ended."),
    "late": (CounterMetricFamily, "Programs compiled for a waiting request after the warm-up had ended."),
}


@dataclass
class Answered:
    """The requests of one operation that were answered: how many of each status, how long they took.

    took: how many took up to each of SECONDS (and no shorter one of them), the last: longer. seconds: all together.
    """

    statuses: Counter[int] = field(default_factory=Counter)
    took: list[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    seconds: float = 0.0


class Metrics(Collector):
    """The metrics of one app."""

    def __init__(self) -> None:
        """Nothing is counted yet."""
        self.registry = CollectorRegistry()
        self.answered: dict[str, Answered] = {}
        self._programs: Mapping[str, CompileStatus] = {}
        self._waiting: Mapping[str, int] = dict.fromkeys(_WAITING, 0)
        self.registry.register(self)

    def page(self, programs: Mapping[str, CompileStatus], waiting: Mapping[str, int] | None = None) -> bytes:
        """The page in the text format of Prometheus.

        programs: by base model, what its worker group has compiled. waiting: how many `samples` and `models` wait.
        """
        self._programs = programs
        self._waiting = waiting or self._waiting
        return generate_latest(self.registry)

    def collect(self) -> Iterable[Metric]:
        """The metrics of the app's requests, and those that come from the journal."""
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
        yield from (requests, seconds)
        for name, meaning in _WAITING.items():
            yield GaugeMetricFamily(f"tinkerflow_waiting_{name}", meaning, self._waiting[name])
        for number in fields(CompileStatus):
            family, meaning = _PROGRAMS[number.name]
            metric = family(f"tinkerflow_programs_{number.name}", meaning, labels=("base_model",))
            for base_model, programs in self._programs.items():
                metric.add_metric((base_model,), getattr(programs, number.name))
            yield metric

"""The metric families that the service reports, read from its page of metrics."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime

from tinkerflow.api.metrics import Answered, Known, Metrics
from tinkerflow.backend.journal import BaseModelView, ProcessView, ServiceFigures
from tinkerflow.backend.spec.commands import CompileStatus
from tinkerflow.backend.spec.drift import DRIFT_FIGURES


@dataclass(frozen=True)
class Family:
    """A metric: its name, its type, its description, and its labels."""

    name: str
    kind: str
    text: str
    labels: tuple[str, ...]


def families() -> list[Family]:
    """Every family of the page, in order, except for the creation times of counters, which no one queries."""
    metrics = Metrics()
    metrics.answered["x"] = Answered({200: 1})  # so that the page contains its lines
    now, status = datetime.now(UTC), CompileStatus(**dict.fromkeys(CompileStatus.__struct_fields__, 1))
    base = BaseModelView("a/b", "", now, status, {"generation": 1, "memory": {"weights": 1}})
    used = {("a/b", "sample"): 1, ("a/b", "checkpoint"): 1}
    drift = {figure.name: {"a/b": 0.0} for figure in DRIFT_FIGURES}
    observed = ServiceFigures(used, {"a/b": 1}, {"a/b": now}, {"samples": None}, drift)
    parts = [ProcessView("engine", 1, now, now)]
    page = metrics.page(Known([base], {"samples": 0, "models": 0}, observed, parts, now)).decode()
    found = []
    for name, text in re.findall(r"^# HELP (\S+) (.*)$", page, re.M):
        if not name.endswith("_created"):
            kind = re.findall(rf"^# TYPE {name} (\S+)$", page, re.M)[0]
            labels = re.findall(rf"^{name}(?:_count)?\{{(.*)\}} ", page, re.M)
            found.append(Family(name, kind, text, tuple(re.findall(r"(\w+)=", labels[0])) if labels else ()))
    return found

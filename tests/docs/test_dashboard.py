"""The dashboard for Grafana and the alerts for Prometheus query existing metrics and labels."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from tests.docs.metrics import families

FOLDER = resources.files("tinkerflow.deployments")
DOCS = Path(__file__).parents[2] / "docs"


def _known() -> Mapping[str, set[str]]:
    """The labels of every metric on the page, by metric."""
    known = {}
    for family in families():
        names = [family.name, *(f"{family.name}_{part}" for part in ("bucket", "count", "sum"))]
        known |= {name: {*family.labels, "le"} for name in names}
    return known


def _check(what: str, expression: str, text: str = "") -> None:
    """text: a legend or the summary of an alert, with labels in braces."""
    known, names = _known(), re.findall(r"tinkerflow_\w+", expression)
    assert set(names) <= set(known), what
    grouped = {label for group in re.findall(r"by \((.*?)\)", expression) for label in re.findall(r"\w+", group)}
    asked = {*re.findall(r"{{ ?(?:\$labels\.)?(\w+) ?}}", text), *re.findall(r"(\w+)=~", expression), *grouped}
    assert asked <= {label for name in names for label in known[name]}, what


def test_dashboard_queries_existing_metrics_and_labels() -> None:
    board = json.loads((FOLDER / "grafana.json").read_text())
    for panel in board["panels"]:
        for target in panel["targets"]:
            _check(panel["title"], target["expr"], target["legendFormat"])


def _alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((FOLDER / "prometheus-rules.yaml").read_text())["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def test_alerts_query_existing_metrics_and_labels() -> None:
    assert len({rule["alert"] for rule in _alerts()}) == len(_alerts())
    for rule in _alerts():
        _check(rule["alert"], rule["expr"], rule["annotations"]["summary"])


def test_the_page_of_monitoring_has_an_entry_for_each_alert() -> None:
    rows = re.findall(r"^\| `(Tinkerflow\w+)` \| (.+) \| (.+) \|$", (DOCS / "monitoring.md").read_text(), re.M)
    assert [name for name, _, _ in rows] == list(dict.fromkeys(name for name, _, _ in rows))
    assert {rule["alert"] for rule in _alerts()} == {name for name, _, _ in rows}

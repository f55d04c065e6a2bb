"""The dashboard for Grafana."""

from __future__ import annotations

import json
import re
from importlib import resources

from tests.docs.metrics import families


def test_the_dashboard_asks_for_metrics_and_labels_that_there_are() -> None:
    """grafana.json: every metric is a family of the page, and every label in a legend is one of its labels."""
    known = {}
    for family in families():
        names = [family.name, *(f"{family.name}_{part}" for part in ("bucket", "count", "sum"))]
        known |= {name: {*family.labels, "le"} for name in names}
    board = json.loads((resources.files("tinkerflow.deployments") / "grafana.json").read_text())
    for panel in board["panels"]:
        for target in panel["targets"]:
            (name,) = re.findall(r"tinkerflow_\w+", target["expr"])
            asked = re.findall(r"{{(\w+)}}", target["legendFormat"]) + re.findall(r"(\w+)=~", target["expr"])
            assert set(asked) <= known[name], (panel["title"], name)

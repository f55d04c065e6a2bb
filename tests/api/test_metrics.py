"""The page of metrics: well formed, whatever a base model is called."""

from __future__ import annotations

from tinkerflow.api.metrics import text_of
from tinkerflow.backend.commands import CompileStatus


def test_each_count_is_a_family_of_its_own_with_a_line_for_each_base_model() -> None:
    text = text_of([("a/b", CompileStatus(9, 4, 1, 2, 3)), ('odd "name"\\', CompileStatus(0, 0, 0, 5, 0))])
    lines = text.splitlines()
    assert 'tinkerflow_programs_planned{base_model="a/b"} 9' in lines
    assert 'tinkerflow_programs_late_total{base_model="a/b"} 3' in lines
    assert 'tinkerflow_programs_needed_total{base_model="odd \\"name\\"\\\\"} 5' in lines
    assert sum(line.startswith("# TYPE ") for line in lines) == 5 and text.endswith("\n")

"""Metrics in the text format of Prometheus (prometheus.io/docs/instrumenting/exposition_formats)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from tinkerflow.backend.commands import CompileStatus

_PROGRAMS = {
    "planned": ("gauge", "programs that the warm-up compiles before they are needed"),
    "ready": ("gauge", "of these, how many it is done with"),
    "failed": ("gauge", "of these, how many could not be compiled"),
    "needed": ("counter", "programs that were compiled for a request before the warm-up had ended"),
    "late": ("counter", "programs that were compiled for a request after it"),
}


def text_of(programs: Sequence[tuple[str, CompileStatus]]) -> str:
    """The page: `tinkerflow_programs_<which>{base_model="..."}`, counters with `_total`, since the group's start."""
    lines = []
    for field in fields(CompileStatus):
        kind, help_text = _PROGRAMS[field.name]
        name = f"tinkerflow_programs_{field.name}" + ("_total" if kind == "counter" else "")
        lines += [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]
        lines += [f'{name}{{base_model="{_escaped(of)}"}} {getattr(warmth, field.name)}' for of, warmth in programs]
    return "\n".join(lines) + "\n"


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

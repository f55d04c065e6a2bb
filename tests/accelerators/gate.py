"""Compiles programs for accelerators and holds their figures against the budgets.

python -m tests.accelerators.gate          every budget; writes figures.json, which docs/accelerators.md is made from
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

from tests.accelerators import environment
from tests.accelerators.budgets import BUDGETS, Case, Record

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
FIGURES = HERE / "figures.json"


class NotCompiledError(Exception):
    """A program was not compiled; the text says why."""


def compile_cases(cases: Iterable[Case]) -> Mapping[str, Record | str]:
    """The record of each case by its name, or the compiler's error. Every target has a process of its own."""
    found: dict[str, Record | str] = {}
    targets: dict[str, list[Case]] = {}
    for case in dict.fromkeys(cases):
        targets.setdefault(case.target, []).append(case)
    for target, of_target in targets.items():
        command = [environment.make(), HERE / "compile.py", environment.compiled()]
        done = subprocess.run(
            command,
            input=json.dumps([asdict(case) for case in of_target]),
            env={**os.environ, "PYTHONPATH": f"{ROOT / '.package'}:{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        for line in filter(lambda line: line.startswith("{"), done.stdout.splitlines()):
            answer = json.loads(line)
            found[answer["name"]] = answer.get("record") or answer["error"]
        for case in of_target:
            found.setdefault(case.name, f"compiling for {target} ended with {done.returncode}: {done.stderr[-2000:]}")
    return found


def main() -> int:
    """Compile the cases of all budgets, write their figures, and print what holds."""
    records = compile_cases(budget.case for budget in BUDGETS)
    for budget in BUDGETS:
        record = records[budget.case.name]
        if isinstance(record, str):
            print(f"FAILED   {budget.case.name}: {record}")
            continue
        value = budget.measure.of(record)
        kept = "holds" if budget.holds(value) else "BROKEN" if budget.met else "not yet"
        said = f"{budget.measure.name} {value:.4g} {budget.measure.unit}, limit {budget.limit}"
        print(f"{kept:8} {budget.case.name}: {said}")
    FIGURES.write_text(json.dumps(dict(sorted(records.items())), indent=1, sort_keys=True) + "\n")
    return any(isinstance(record, str) for record in records.values())


if __name__ == "__main__":
    sys.exit(main())

"""Compiles programs for accelerators, and compares their figures with the budgets.

python -m tests.accelerators.gate          every budget; writes figures.json, the source of docs/accelerators.md
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
ENVIRONMENT = {
    "PYTHONPATH": f"{ROOT / '.package'}:{ROOT}",
    "PYTHONDONTWRITEBYTECODE": "1",
    "JAX_PLATFORMS": "cpu",  # this variable and the next two hide the devices from JAX's plugins
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    "CUDA_VISIBLE_DEVICES": "-1",
}


def compile_cases(cases: Iterable[Case]) -> Mapping[str, Record | str]:
    """The record of each case by its name, or the compiler's error. Each target is compiled in its own process."""
    found: dict[str, Record | str] = {}
    targets: dict[str, list[Case]] = {}
    for case in dict.fromkeys(cases):
        targets.setdefault(case.target, []).append(case)
    for target, of_target in targets.items():
        command = [environment.make(), HERE / "compile.py", environment.compiled()]
        done = subprocess.run(
            command,
            input=json.dumps([asdict(case) for case in of_target]),
            env={**os.environ, **ENVIRONMENT},
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


def main(*words: str) -> int:
    """Compile the cases of the budgets, write their figures, and print which budgets hold.

    words: compile only cases with one of these words in their names, and keep the stored figures of other cases.
    """
    chosen = [budget for budget in BUDGETS if not words or any(word in budget.case.name for word in words)]
    records = compile_cases(budget.case for budget in chosen)
    failed = {name: record for name, record in records.items() if isinstance(record, str)}
    for budget in chosen:
        if (record := records[budget.case.name]) and not isinstance(record, str):
            value = budget.measure.of(record)
            kept = "holds" if budget.holds(value) else "BROKEN" if budget.met else "not yet"
            print(f"{kept:8} {budget.case.name}: {budget.describe(record)}")
    for name, error in failed.items():
        print(f"FAILED   {name}: {error}")
    old = json.loads(FIGURES.read_text()) if words else {}
    known = {budget.case.name for budget in BUDGETS} - set(failed)
    figures = {name: record for name, record in (old | dict(records)).items() if name in known}
    FIGURES.write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

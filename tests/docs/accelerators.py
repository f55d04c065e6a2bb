"""The tables of `docs/accelerators.md`: peaks of devices, budgets, and the compilers' analyses of the programs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial

from tests.accelerators.budgets import BUDGETS, FAULTS, MFU, Record
from tests.accelerators.efficiency import EFFICIENCIES, expected, expected_mfu
from tests.accelerators.gate import FIGURES

from tinkerflow.backend.compute.planning.topologies import DEVICES

Row = tuple[str, ...]


def devices() -> tuple[Row, list[Row]]:
    """Every device that `tinkerflow plan` knows, with its peaks."""
    rows = [
        (
            f"`{name}`",
            f"{device.flops / 1e12:.0f}",
            f"{device.memory / 1e9:.1f}",
            f"{device.bandwidth / 1e9:,.0f}",
            f"{device.link / 1e9:,.0f}",
            f"[{device.source.split('/')[2]}]({device.source})",
        )
        for name, device in DEVICES.items()
    ]
    return ("device", "TFLOP/s", "memory GB", "memory GB/s", "links GB/s", "source"), rows


def budgets() -> tuple[Row, list[Row]]:
    """Every budget with the figure of the last run of the gate."""
    found, rows = _figures(), []
    for budget in BUDGETS:
        record = found.get(budget.case.name)
        value = f"{budget.measure.of(record):.4g}" if record else "not compiled"
        bound = f"{'at most' if budget.measure.most else 'at least'} {budget.limit:g} {budget.measure.unit}"
        state = ("yes" if budget.met else "**not yet**") if record else "not known"
        where = "CI" if budget.quick else "by hand"
        rows.append((budget.case.name, budget.measure.name, bound.strip(), value, state, where))
    return ("program", "figure", "budget", "is", "met", "checked"), rows


def programs() -> tuple[Row, list[Row]]:
    """The compilers' figures for every program of a budget, on each device."""
    rows = [
        (
            name,
            *(f"{record[field] / 1e9:.2f}" for field in ("arguments", "temporaries", "bytes")),
            f"{record['flops'] / 1e12:.2f}",
            f"{record['seconds'] * 1e3:.1f}",
            _between(1e3, expected(record)),
            f"{100 * record['mfu']:.0f} %" if record["mfu"] else "",
            f"{_between(100, expected_mfu(record))} %" if record["mfu"] else "",
            f"{record['sent'] / 1e9:.2f}",
        )
        for name, record in sorted(_figures().items())
    ]
    head = (
        "program",
        "arguments GB",
        "temporaries GB",
        "accessed GB",
        "TFLOP",
        "roofline ms",
        "ms to expect",
        "MFU by roofline",
        "MFU to expect",
        "between devices GB",
    )
    return head, rows


def long_sequence() -> str:
    """The compilers' figures for one long sequence, split over eight GPUs and on one GPU."""
    eight, one = (_figures()[f"4B h100:{number} forward_backward 1x131072"] for number in (8, 1))
    return (
        f"For 131,072 tokens of Qwen3-4B on eight H100, the compiler plans {eight['temporaries'] / 1e9:.1f} GB of "
        f"temporaries on each\ndevice, compared with {one['temporaries'] / 1e9:.1f} GB on a single H100. The roofline "
        f"time is {eight['seconds']:.1f} s instead of {one['seconds']:.1f} s,\nnot counting the "
        f"{eight['sent'] / 1e9:.0f} GB that each device sends ([figures](accelerators.md#what-is-checked)). This has "
        "not been measured on a device."
    )


def kernels() -> tuple[Row, list[Row]]:
    """Our kernels, and XLA's that have a fault, in the programs whose kernels have a budget."""
    found, rows = _figures(), []
    for name in dict.fromkeys(budget.case.name for budget in BUDGETS if budget.measure is FAULTS):
        for kernel, one in found[name]["kernels"].items():
            faults = {"spills": "spilled", "serialized wgmma": "serialized", "idle multiprocessors": "idle"}
            said = ", ".join(fault for fault, field in faults.items() if one[field])
            sizes = (f"{one[field]:,}" for field in ("blocks", "resident", "registers"))
            rows.append((name, f"`{kernel}`", *sizes, f"{one['shared'] / 1e3:.0f}", said))
    return ("program", "kernel", "blocks", "at a time", "registers", "shared memory kB", "faults"), rows


def efficiencies() -> tuple[Row, list[Row]]:
    """The expected share of the peak for each kind of kernel."""
    rows = [(kind, _between(100, (one.low, one.high)), one.source) for kind, one in EFFICIENCIES.items()]
    return ("kind of kernel", "% of the peak", "source"), rows


def parts() -> tuple[Row, list[Row]]:
    """The parts of a training step's roofline time, for the programs that have a budget for MFU."""
    found = {budget.case.name: _figures().get(budget.case.name) for budget in BUDGETS if budget.measure is MFU}
    compiled = {name: record for name, record in found.items() if record}
    names = dict.fromkeys(name for record in compiled.values() for name in record["parts"])
    figures: dict[str, Callable[[Record], float]] = {
        "useful flops at the peak": lambda record: record["mfu"] * record["seconds"],
        **{name: partial(_part, name) for name in names},
        "all": lambda record: record["seconds"],
    }
    rows = [(name, *(f"{of(record) * 1e3:.1f}" for record in compiled.values())) for name, of in figures.items()]
    return ("roofline, ms", *compiled), rows


def _between(scale: float, figures: tuple[float, float]) -> str:
    low, high = (f"{scale * figure:,.{0 if scale * figure >= 10 else 1}f}" for figure in figures)
    return f"{low} to {high}"


def _part(name: str, record: Record) -> float:
    seconds: float = record["parts"].get(name, 0.0)
    return seconds


def _figures() -> Mapping[str, Record]:
    figures: Mapping[str, Record] = json.loads(FIGURES.read_text())
    return figures

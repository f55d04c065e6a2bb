"""The expected time of a compiled program: its roofline, divided by the shares of the peaks that its kernels reach.

Our kernels have not run on a device, so the shares are ranges, published for similar kernels or estimated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Efficiency:
    """The lowest and the highest expected share of a peak for a kind of kernel. source: where the shares are from."""

    low: float
    high: float
    source: str


_MEASURED = "[{}](https://arxiv.org/abs/2407.08608)"  # Shah et al., "FlashAttention-3", 2024
EFFICIENCIES = {  # by the parts of a record
    "matmuls of the base model": Efficiency(
        0.6, 0.8, f"the best matmuls reach {_MEASURED.format('80 to 90 %')} of an H100; estimated for other sizes"
    ),
    "attention": Efficiency(
        0.15,
        0.35,
        f"FlashAttention-2 reaches {_MEASURED.format('35 %')} of an H100; estimated for our kernels, of which a "
        "multiprocessor executes one block",
    ),
    "elementwise work and copies": Efficiency(0.75, 0.9, "estimated"),
    "adapters": Efficiency(0.4, 0.65, "estimated: matmuls with few columns"),
    "loss": Efficiency(0.5, 0.75, "estimated: one block on each multiprocessor"),
    "weights and sampling": Efficiency(
        0.3, 0.5, "estimated: a step starts 870 kernels one after the other, and some have few blocks"
    ),
    "attention over pages": Efficiency(0.4, 0.75, "estimated"),
}


def expected(record: Mapping[str, Any]) -> tuple[float, float]:
    """The shortest and the longest expected time in seconds.

    For the shortest, transfers between devices overlap completely with computations. For the longest, they do not.
    """
    parts, transfers = record["parts"].items(), record["transfers"]
    fast = sum(seconds / EFFICIENCIES[part].high for part, seconds in parts)
    slow = sum(seconds / EFFICIENCIES[part].low for part, seconds in parts)
    return max(fast, transfers), slow + transfers


def expected_mfu(record: Mapping[str, Any]) -> tuple[float, float]:
    """The lowest and the highest expected MFU."""
    fast, slow = expected(record)
    useful = record["mfu"] * record["seconds"]
    return useful / slow, useful / fast

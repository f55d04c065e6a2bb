"""The time to expect of a compiled program: its roofline, over the share of the peaks that each kind of kernel reaches.

No device has run our kernels, so the shares are a range: others' measurements of similar kernels, or our estimates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Efficiency:
    """The lowest and the highest share of a peak to expect of a kind of kernel. source: of the shares."""

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
    """The shortest and the longest time to expect, in seconds.

    Transfers between devices overlap with computations completely in the first, and not at all in the second.
    """
    parts, transfers = record["parts"].items(), record["transfers"]
    fast = sum(seconds / EFFICIENCIES[part].high for part, seconds in parts)
    slow = sum(seconds / EFFICIENCIES[part].low for part, seconds in parts)
    return max(fast, transfers), slow + transfers


def expected_mfu(record: Mapping[str, Any]) -> tuple[float, float]:
    """The lowest and the highest MFU to expect."""
    fast, slow = expected(record)
    useful = record["mfu"] * record["seconds"]
    return useful / slow, useful / fast

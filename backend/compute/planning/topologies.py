"""Accelerators by name with their peak rates, and their topologies in users' notation ("v6e:2x4", "h100:8")."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from tinkerflow.backend.compute.platforms import CUDA, MEMORY_SHARE, TPU, Platform
from tinkerflow.backend.core.errors import UserError


@dataclass(frozen=True)
class Device:
    """One accelerator.

    flops: the peak of dense bfloat16 matmuls, per second. memory: bytes that programs can use. bandwidth: bytes per
    second. link: bytes per second that a device sends to all others of its host or pod. source: the page that has these
    figures. float8: whether it computes with 8-bit floating-point numbers.
    """

    name: str
    platform: Platform
    flops: float
    memory: int
    bandwidth: float
    link: float
    source: str
    float8: bool = True

    @property
    def limit(self) -> int:
        """Bytes of memory that a worker group plans with."""
        return int(MEMORY_SHARE * self.memory) if self.platform.shares_memory else self.memory


_MOST_DEVICES = 2**16
_GCP = "https://cloud.google.com/tpu/docs/"
_NVIDIA = "https://www.nvidia.com/en-us/data-center/"
DEVICES = {
    device.name: device
    for device in (
        Device("v5e", TPU, 197e12, int(15.75 * 2**30), 819e9, 200e9, _GCP + "v5e"),
        Device("v5p", TPU, 459e12, int(95.74 * 2**30), 2765e9, 600e9, _GCP + "v5p"),
        Device("v6e", TPU, 918e12, int(31.25 * 2**30), 1640e9, 400e9, _GCP + "v6e"),
        Device("a100", CUDA, 312e12, 80 * 2**30, 2039e9, 300e9, _NVIDIA + "a100", float8=False),
        Device("h100", CUDA, 989e12, 84942979072, 3352e9, 450e9, _NVIDIA + "h100"),
        Device("h200", CUDA, 989e12, 151397597184, 4800e9, 450e9, _NVIDIA + "h200"),
        Device("b200", CUDA, 2250e12, 180 * 2**30, 8000e9, 900e9, _NVIDIA + "dgx-b200"),
        Device("l40s", CUDA, 362e12, 48 * 10**9, 864e9, 32e9, _NVIDIA + "l40s"),
        Device("l4", CUDA, 121e12, 24 * 10**9, 300e9, 32e9, _NVIDIA + "l4"),
    )
}


@dataclass(frozen=True)
class Topology:
    """Devices of one kind that work together. shape: the dimensions of a TPU slice, or hosts x GPUs of each host."""

    device: Device
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many devices."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.device.name}:{'x'.join(map(str, self.shape))}"


def parse_topology(text: str) -> Topology:
    """The topology that `text` names: "v6e:2x4" is a slice of 2 x 4 chips, "h100:8" one host, "h100:2x8" two hosts.

    UserError for an unknown device, and for a shape that is not a valid number of positive numbers, separated by x.
    """
    name, _, shape = text.lower().partition(":")
    if name not in DEVICES:
        raise UserError(f"topology {text!r}: device {name!r} is not known: must be one of {', '.join(DEVICES)}")
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape or "1"):
        raise UserError(f"topology {text!r}: shape {shape!r}: must be positive numbers with an x between them")
    device, dims = DEVICES[name], tuple(int(size) for size in (shape or "1").split("x"))
    if device.platform is CUDA and len(dims) > 2:
        raise UserError(f"topology {text!r}: shape {shape!r}: GPUs have at most two numbers, hosts and GPUs of each")
    most = 3 if device.name == "v5p" else 2
    if device.platform is TPU and len(dims) > most:
        raise UserError(f"topology {text!r}: shape {shape!r}: a slice of {device.name} has at most {most} dimensions")
    if math.prod(dims) > _MOST_DEVICES:
        raise UserError(f"topology {text!r}: shape {shape!r}: must have at most {_MOST_DEVICES} devices")
    return Topology(device, dims)

"""Accelerators by name with their peak rates, and their topologies in users' notation ("v6e:2x4", "h100:8")."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from tinkerflow.backend.compute.platforms import CUDA, MEMORY_SHARE, SMALL_CUDA, TPU, TURING, Platform
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.core.suggest import did_you_mean


@dataclass(frozen=True)
class Device:
    """One accelerator.

    flops: the peak of dense matmuls in bfloat16, or in float16 on Turing, per second. memory: bytes that programs can
    use. bandwidth: bytes per second. link: bytes per second that a device sends to all others of its host or pod.
    source: the page that gives these figures. float8: whether the device computes with 8-bit floating-point numbers.
    float32_flops: the peak of matmuls in float32, for a device that computes adapters and attention in float32;
    otherwise 0.
    """

    name: str
    platform: Platform
    flops: float
    memory: int
    bandwidth: float
    link: float
    source: str
    float8: bool = True
    float32_flops: float = 0.0

    @property
    def limit(self) -> int:
        """Bytes of memory that a worker group plans with."""
        return int(MEMORY_SHARE * self.memory) if self.platform.shares_memory else self.memory


_MOST_DEVICES = 2**16
_GCP = "https://cloud.google.com/tpu/docs/"
_RTX = "https://www.nvidia.com/en-us/"
_NVIDIA = _RTX + "data-center/"
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
        Device("l40s", SMALL_CUDA, 362e12, 48 * 10**9, 864e9, 32e9, _NVIDIA + "l40s"),
        # PyTorch finds this memory on a T4. The NVIDIA page says 16 GB.
        Device(
            "t4",
            TURING,
            65e12,
            int(14.56 * 2**30),
            320e9,
            32e9,
            _NVIDIA + "tesla-t4",
            float8=False,
            float32_flops=8.1e12,
        ),
        Device("l4", SMALL_CUDA, 121e12, 24 * 10**9, 300e9, 32e9, _NVIDIA + "l4"),
        Device("a100-40gb", CUDA, 312e12, 40 * 2**30, 1555e9, 300e9, _NVIDIA + "a100", float8=False),
        Device("a10", SMALL_CUDA, 125e12, 24 * 10**9, 600e9, 32e9, _NVIDIA + "products/a10-gpu", float8=False),
        Device(
            "a6000",
            SMALL_CUDA,
            154.8e12,
            48 * 10**9,
            768e9,
            32e9,
            _RTX + "design-visualization/rtx-a6000",
            float8=False,
        ),
        # GeForce cards add products of bfloat16 in float32 at half of the advertised rate.
        Device(
            "rtx3090",
            SMALL_CUDA,
            71e12,
            24 * 10**9,
            936e9,
            32e9,
            _RTX + "geforce/graphics-cards/30-series",
            float8=False,
        ),
        Device("rtx4090", SMALL_CUDA, 165.2e12, 24 * 10**9, 1008e9, 32e9, _RTX + "geforce/graphics-cards/40-series"),
        Device("rtx5090", SMALL_CUDA, 209.5e12, 32 * 10**9, 1792e9, 64e9, _RTX + "geforce/graphics-cards/50-series"),
    )
}
_NAMES = {name.replace("-", "").removeprefix("rtx"): name for name in DEVICES}  # rtx-3090 and 3090 are rtx3090
_TOO_OLD = {"v100": "Volta", "p100": "Pascal"}


@dataclass(frozen=True)
class Topology:
    """Devices of one kind that work together. shape: the dimensions of a TPU slice, or hosts x GPUs of each host."""

    device: Device
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """The number of devices."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.device.name}:{'x'.join(map(str, self.shape))}"


def parse_topology(text: str) -> Topology:
    """The topology that `text` names: "v6e:2x4" is a slice of 2 x 4 chips, "h100:8" one host, "h100:2x8" two hosts.

    UserError: the device is unknown, or the shape is not a supported number of positive numbers separated by x.
    """
    given, _, shape = text.lower().partition(":")
    if given in _TOO_OLD:
        raise UserError(
            f"topology {text!r}: CUDA 13 has dropped {_TOO_OLD[given]} GPUs; Turing and newer ones are served"
        )
    name = _NAMES.get(given.replace("-", "").removeprefix("rtx"), "")
    if not name:
        near = did_you_mean(given, DEVICES, likeness=0.75)  # an rtx2080ti is not close to an rtx5090
        known = f"{', '.join(DEVICES)}{near}"
        raise UserError(f"topology {text!r}: device {given!r} is unknown: must be one of {known}")
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape or "1"):
        raise UserError(f"topology {text!r}: shape {shape!r}: must be positive numbers with an x between them")
    device, dims = DEVICES[name], tuple(int(size) for size in (shape or "1").split("x"))
    if device.platform.name == CUDA.name and len(dims) > 2:
        raise UserError(f"topology {text!r}: shape {shape!r}: GPUs have at most two numbers, hosts and GPUs of each")
    most = 3 if device.name == "v5p" else 2
    if device.platform is TPU and len(dims) > most:
        raise UserError(f"topology {text!r}: shape {shape!r}: a slice of {device.name} has at most {most} dimensions")
    if math.prod(dims) > _MOST_DEVICES:
        raise UserError(f"topology {text!r}: shape {shape!r}: must have at most {_MOST_DEVICES} devices")
    return Topology(device, dims)

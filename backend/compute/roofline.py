"""Accelerators by name: what they can do, and topologies of them as users write them ("v6e:2x4", "h100:8")."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tinkerflow.backend.compute.config import ModelConfig
from tinkerflow.backend.compute.families import projections
from tinkerflow.backend.compute.platforms import CUDA, TPU, Platform
from tinkerflow.backend.compute.roofline_text import Work
from tinkerflow.backend.errors import UserError


@dataclass(frozen=True)
class Device:
    """One accelerator.

    flops: peak of dense bfloat16 matmuls, a second. memory: bytes of device memory. bandwidth: bytes a second of it.
    link: bytes a second that a device sends to others of its host or pod, in all. source: where these figures are from.
    """

    name: str
    platform: Platform
    flops: float
    memory: int
    bandwidth: float
    link: float
    source: str


_GCP = "https://cloud.google.com/tpu/docs/"
_NVIDIA = "https://www.nvidia.com/en-us/data-center/"
DEVICES = {
    device.name: device
    for device in (
        Device("v5e", TPU, 197e12, 16 * 2**30, 819e9, 200e9, _GCP + "v5e"),
        Device("v5p", TPU, 459e12, 95 * 2**30, 2765e9, 600e9, _GCP + "v5p"),
        Device("v6e", TPU, 918e12, 32 * 2**30, 1640e9, 400e9, _GCP + "v6e"),
        Device("a100", CUDA, 312e12, 80 * 2**30, 2039e9, 300e9, _NVIDIA + "a100"),
        Device("h100", CUDA, 989e12, 84942979072, 3352e9, 450e9, _NVIDIA + "h100"),
        Device("h200", CUDA, 989e12, 151397597184, 4800e9, 450e9, _NVIDIA + "h200"),
        Device("b200", CUDA, 2250e12, 180 * 2**30, 8000e9, 900e9, _NVIDIA + "dgx-b200"),
        Device("l40s", CUDA, 362e12, 48 * 10**9, 864e9, 32e9, _NVIDIA + "l40s"),
        Device("l4", CUDA, 121e12, 24 * 10**9, 300e9, 32e9, _NVIDIA + "l4"),
    )
}


@dataclass(frozen=True)
class Topology:
    """Devices of one kind that work together. shape: chips of a TPU slice by dimension; hosts and GPUs of each."""

    device: Device
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many devices."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.device.name}:{'x'.join(map(str, self.shape))}"


def parse_topology(text: str) -> Topology:
    """The topology that `text` names: "v6e:2x4" is a slice of 2 x 4 chips, "h100:8" one host, "h100:2x8" two.

    UserError when the device is not known, or the shape is not positive numbers with an x between them.
    """
    name, _, shape = text.lower().partition(":")
    if name not in DEVICES:
        raise UserError(f"topology {text!r}: device {name!r} is not known; it must be one of {', '.join(DEVICES)}")
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape or "1"):
        raise UserError(f"topology {text!r}: shape {shape!r}; it must be positive numbers with an x between them")
    device, dims = DEVICES[name], tuple(int(size) for size in (shape or "1").split("x"))
    if device.platform is CUDA and len(dims) > 2:
        raise UserError(f"topology {text!r}: shape {shape!r}; GPUs have at most two numbers, hosts and GPUs of each")
    return Topology(device, dims)


def seconds(work: Iterable[Work], device: Device) -> float:
    """Time of operations one after the other, each at the device's peak of flops or of bandwidth, whatever is slower.

    It is a lower bound: no kernel reaches either peak, and it counts no launches and no transfers between devices
    (Williams, Waterman and Patterson, "Roofline", 2009).
    """
    return sum(max(one.flops / device.flops, one.bytes / device.bandwidth) for one in work)


def useful_flops(cfg: ModelConfig, ranks: Mapping[str, int], length: int) -> float:
    """Flops for a token that forward_backward cannot do without; MFU is of these (Chowdhery et al., "PaLM", 2022).

    A matrix of the base model takes part in two products (its result, and the gradient of its input), those of an
    adapter in three (that of the matrix, too). Attention is causal: half of the keys; its backward pass has twice the
    products of its forward pass. Nothing that is computed again counts.

    cfg: the model. ranks: of the adapted projections, by their names. length: tokens of an example.
    """
    total = 6.0 * cfg.layers * cfg.heads * cfg.head_dim * length
    for name, matrix in projections(cfg).items():
        each = 4 * matrix.inputs * matrix.outputs + 6 * ranks.get(name, 0) * (matrix.inputs + matrix.outputs)
        total += each * (matrix.per_token * cfg.layers if matrix.stack else 1)
    return total

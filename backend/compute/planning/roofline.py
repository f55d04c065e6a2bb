"""Accelerators by name: what they can do, and topologies of them as users write them ("v6e:2x4", "h100:8")."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.families import projections
from tinkerflow.backend.compute.models.peft_names import matrix_rank, targets
from tinkerflow.backend.compute.planning.roofline_text import Work
from tinkerflow.backend.compute.platforms import CUDA, MEMORY_SHARE, TPU, Platform
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.spec.commands import GroupConfig, LoraSpec


@dataclass(frozen=True)
class Device:
    """One accelerator.

    flops: peak of dense bfloat16 matmuls, a second. memory: bytes that programs can have. bandwidth: bytes a second.
    link: bytes a second that a device sends to others of its host or pod, in all. source: where these figures are from.
    float8: whether it computes with numbers of that kind.
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

    UserError when the device is not known, or the shape is not positive numbers with an x between them, of which such
    devices have so many.
    """
    name, _, shape = text.lower().partition(":")
    if name not in DEVICES:
        raise UserError(f"topology {text!r}: device {name!r} is not known; it must be one of {', '.join(DEVICES)}")
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape or "1"):
        raise UserError(f"topology {text!r}: shape {shape!r}; it must be positive numbers with an x between them")
    device, dims = DEVICES[name], tuple(int(size) for size in (shape or "1").split("x"))
    if device.platform is CUDA and len(dims) > 2:
        raise UserError(f"topology {text!r}: shape {shape!r}; GPUs have at most two numbers, hosts and GPUs of each")
    most = 3 if device.name == "v5p" else 2
    if device.platform is TPU and len(dims) > most:
        raise UserError(f"topology {text!r}: shape {shape!r}; a slice of {device.name} has at most {most} dimensions")
    if math.prod(dims) > _MOST_DEVICES:
        raise UserError(f"topology {text!r}: shape {shape!r}; it must have at most {_MOST_DEVICES} devices")
    return Topology(device, dims)


def seconds(work: Iterable[Work], device: Device) -> float:
    """Time of operations one after the other, each at the device's peak of flops or of bandwidth, whatever is slower.

    It is a lower bound: no kernel reaches either peak, and it counts no launches and no transfers between devices
    (Williams, Waterman and Patterson, "Roofline", 2009).
    """
    return sum(max(one.flops / device.flops, one.bytes / device.bandwidth) for one in work)


def useful_flops(cfg: ModelConfig, spec: LoraSpec | None, length: int) -> float:
    """Flops for a token that forward_backward cannot do without; MFU is of these (Chowdhery et al., "PaLM", 2022).

    A matrix of the base model takes part in two products (its result, and the gradient of its input), those of an
    adapter in three (that of the matrix, too). Attention is causal: half of the keys, fewer with a window; its backward
    pass has twice the products of its forward pass. Nothing that is computed again counts.

    cfg: the model. spec: of the adapter; None: without one. length: tokens of an example;
    0: without attention.
    """
    total = 0.0
    for kind in cfg.layer_kinds:
        if kind.attends:
            window = min(length, kind.window or length)
            total += 3.0 * cfg.heads * sum(cfg.widths(kind)) * window * (2 - window / max(1, length))
    adapted = targets(cfg, spec) if spec else ()
    for name, matrix in projections(cfg).items():
        rank = matrix_rank(spec, matrix) if spec and name in adapted else 0
        each = 4 * matrix.inputs * matrix.outputs + 6 * rank * (matrix.inputs + matrix.outputs)
        total += each * (matrix.per_token * matrix.stack[0] if matrix.stack else 1)
    return total


@dataclass(frozen=True)
class Estimate:
    """How fast a step can be at most. limit: what sets the bound: "flops", "memory" (its bandwidth) or "links".

    tokens: of the whole step, on all devices. seconds: the step's.
    """

    tokens: int
    seconds: float
    limit: str

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


def _devices(config: GroupConfig) -> int:
    return config.fsdp * config.expert * config.tensor


def _bound(tokens: int, device: Device, *, flops: float, moved: float, sent: float) -> Estimate:
    """The bound of a step that does these on each device: everything at its peak, and all of it at the same time."""
    times = {"flops": flops / device.flops, "memory": moved / device.bandwidth, "links": sent / device.link}
    limit = max(times, key=lambda name: times[name])
    return Estimate(tokens, times[limit], limit)


def training_bound(
    cfg: ModelConfig, config: GroupConfig, device: Device, *, spec: LoraSpec, weights: int, tokens: int, kept: int
) -> Estimate:
    """The bound of forward_backward of one micro-batch.

    cfg: the model. config: the mesh. device: of the mesh. spec: of the adapter.
    weights: bytes of all base weights. tokens: of the micro-batch, on all devices, in rows of at most 1,024.
    kept: bytes of activations that a device keeps for the backward pass.
    """
    own = weights / config.tensor / config.expert
    flops = useful_flops(cfg, spec, min(1024, tokens)) * tokens / _devices(config)
    sent = 2 * own * (config.fsdp - 1) / config.fsdp  # gathered for the forward and for the backward pass
    return _bound(tokens, device, flops=flops, moved=2 * own + 2 * kept, sent=sent)


def decode_bound(
    cfg: ModelConfig, config: GroupConfig, device: Device, *, weights: float, slots: int, positions: int, cell: float
) -> Estimate:
    """The bound of one decode step, a token for each slot.

    cfg: the model. config: the mesh. device: of the mesh. weights: bytes that a step reads of all base weights
    (`device_bytes.read_bytes`). slots: sequences. positions: of each in the KV cache. cell: bytes of one position on
    each device.
    """
    own, parts = weights / _devices(config), config.fsdp * config.tensor
    flops = useful_flops(cfg, None, 0) / 2 * slots / _devices(config)
    # The results of attention and of the MLP are summed over the devices, and every device gets the sums.
    sent = 4 * cfg.layers * slots * cfg.hidden * (4 if config.dtype == "float32" else 2) * (parts - 1) / parts
    return _bound(slots, device, flops=flops, moved=own + slots * positions * cell, sent=sent)

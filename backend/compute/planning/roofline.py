"""Upper bounds on the speed of training and decoding, in closed form: a step's flops and bytes at a device's peaks.

Kernels reach only a part of the peaks. `Estimate.expected` is the range that we expect. No device has confirmed it.

Roofline: Williams, Waterman and Patterson, "Roofline: An Insightful Visual Performance Model", 2009.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tinkerflow.backend.compute.mesh import FSDP, expert_axes
from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.families import projections
from tinkerflow.backend.compute.models.layers import EXPERT_MATRICES
from tinkerflow.backend.compute.models.peft_names import matrix_rank, targets
from tinkerflow.backend.compute.planning.array_sizes import abstract_mesh
from tinkerflow.backend.compute.planning.topologies import Device
from tinkerflow.backend.spec.commands import GroupConfig, LoraSpec

_ROW = 1024  # tokens of an example, in estimates of training
# Shares of a bound. tests/accelerators/efficiency.py lists them for each kind of kernel, and a test compares them.
TRAINING_SHARE, DECODE_SHARE, SHARE_WITHOUT_KERNELS = (0.2, 0.4), (0.3, 0.5), (0.1, 0.2)


def useful_flops(cfg: ModelConfig, spec: LoraSpec | None, length: int) -> float:
    """The flops that forward_backward needs for a token. MFU counts these (Chowdhery et al., "PaLM", 2022).

    A matrix of the base model takes part in two products: for its result and for the gradient of its input. A matrix of
    an adapter takes part in a third, for its own gradient. Attention is causal: half of the keys, fewer with a window.
    Its backward pass has twice the products of its forward pass. Recomputation does not count.

    cfg: the model. spec: the adapter; None = no adapter. length: tokens of an example; 0 = without attention.
    """
    total = 0.0
    for attention in cfg.attentions:
        window = min(length, attention.window or length)
        total += 3.0 * cfg.heads * sum(attention.widths) * window * (2 - window / max(1, length))
    adapted = targets(cfg, spec) if spec else ()
    for name, matrix in projections(cfg).items():
        rank = matrix_rank(spec, matrix) if spec and name in adapted else 0
        each = 4 * matrix.inputs * matrix.outputs + 6 * rank * (matrix.inputs + matrix.outputs)
        total += each * (matrix.per_token * matrix.stack[0] if matrix.stack else 1)
    return total


@dataclass(frozen=True)
class Estimate:
    """The highest possible speed of a step.

    tokens: the step's tokens on all devices. seconds: the least time of the step. limit: the resource that sets the
    bound: "flops", "memory" (bandwidth) or "links" (between devices). share: the lowest and the highest share of the
    bound to expect.
    """

    tokens: int
    seconds: float
    limit: str
    share: tuple[float, float]

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    @property
    def expected(self) -> tuple[float, float]:
        """The range of tokens a second to expect."""
        low, high = self.share
        return low * self.rate, high * self.rate


def _devices(config: GroupConfig) -> int:
    return config.fsdp * config.expert * config.tensor


def _bound(
    tokens: int, device: Device, share: tuple[float, float], *, flops: float, moved: float, sent: float
) -> Estimate:
    """The bound of a step that needs this much of each device, if all resources run at their peak at the same time."""
    times = {"flops": flops / device.flops, "memory": moved / device.bandwidth, "links": sent / device.link}
    limit = max(times, key=lambda name: times[name])
    return Estimate(tokens, times[limit], limit, share if device.platform.kernels else SHARE_WITHOUT_KERNELS)


def training_bound(
    cfg: ModelConfig, config: GroupConfig, device: Device, *, spec: LoraSpec, weights: int, tokens: int, kept: int
) -> Estimate:
    """The bound of forward_backward of one micro-batch.

    cfg: the model. config: the mesh. device: the mesh's devices. spec: the adapter. weights: bytes of all base weights.
    tokens: the micro-batch's tokens on all devices, in rows of at most 1,024. kept: bytes of activations that a device
    keeps for the backward pass.
    """
    own = weights / config.tensor / config.expert
    each = useful_flops(cfg, spec, min(_ROW, tokens))
    if device.float32_flops:
        each += (each - useful_flops(cfg, None, 0)) * (device.flops / device.float32_flops - 1)
    flops = each * tokens / _devices(config)
    gathered = own * (config.fsdp - 1) / config.fsdp
    sent = 2 * (gathered + _of_experts(cfg, config, gathered, tokens))  # for the forward and for the backward pass
    return _bound(tokens, device, TRAINING_SHARE, flops=flops, moved=2 * own + 2 * kept, sent=sent)


def _of_experts(cfg: ModelConfig, config: GroupConfig, gathered: float, tokens: int) -> float:
    """The bytes that a mixture of experts adds to those that a device receives in one pass; negative = it saves bytes.

    gathered: the bytes of all matrices that a device gathers over fsdp. tokens: the tokens of all devices. The device
    receives the tokens along the expert axis. It also gathers experts, or receives all tokens (`training_expert_axes`).
    """
    if not cfg.experts:
        return 0.0
    sizes = {name: math.prod(one.stack) * one.inputs * one.outputs for name, one in projections(cfg).items()}
    experts = gathered * sum(sizes[name] for name in EXPERT_MATRICES) / sum(sizes.values())
    exchanged = cfg.layers * tokens * cfg.hidden * ((4 if config.dtype == "float32" else 2) + 4)  # sums are float32
    along = exchanged / config.fsdp * (1 - 1 / config.expert)
    if FSDP not in expert_axes(abstract_mesh(config), cfg.experts):
        return along
    return min(along, exchanged * (1 - 1 / config.fsdp / config.expert) - experts)


def decode_bound(
    cfg: ModelConfig, config: GroupConfig, device: Device, *, weights: float, slots: int, positions: int, cell: float
) -> Estimate:
    """The bound of one decode step, a token for each slot.

    cfg: the model. config: the mesh. device: the mesh's devices. weights: bytes of the base weights that a step reads
    (`array_sizes.read_bytes`). slots: sequences. positions: the positions of each sequence in the KV cache. cell: bytes
    of one position on each device.
    """
    own, parts = weights / _devices(config), config.fsdp * config.tensor
    flops = useful_flops(cfg, None, 0) / 2 * slots / _devices(config)
    # The results of attention and of the MLP are summed over the devices, and each device gets the sums.
    sent = 4 * cfg.layers * slots * cfg.hidden * (4 if config.dtype == "float32" else 2) * (parts - 1) / parts
    return _bound(slots, device, DECODE_SHARE, flops=flops, moved=own + slots * positions * cell, sent=sent)

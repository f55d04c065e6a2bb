"""The size of a training step: the tokens of a micro-batch, and the activations that are kept for the backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.families import layers_with, projections
from tinkerflow.backend.compute.models.layer_loop import kept_carries
from tinkerflow.backend.compute.models.layers import DELTA
from tinkerflow.backend.compute.models.transformer import Keep
from tinkerflow.backend.compute.platforms import on_cpu, platform
from tinkerflow.backend.spec.packing import Grid

_AT_ONCE = {Keep.RESULTS: 0, Keep.INPUTS: 4096, Keep.GROUPS: 1024}  # tokens, 0 = all; 4096 as in a micro-batch


@dataclass(frozen=True)
class Budget:
    """The limits of a training step.

    microbatch_tokens: padded tokens that are trained on together. kept_bytes: the activations that a device may keep
    for a backward pass. If the layers would keep more, each layer is recomputed. input_bytes: the layers' inputs that a
    device may keep in that case. If there are more, groups of layers are recomputed (`transformer.Keep`). None = no
    limit. context_parallel: the maximum number of devices that a long row is split over (`spec.packing.Grid`).
    """

    microbatch_tokens: int
    kept_bytes: int
    input_bytes: int | None = None
    context_parallel: int = 1

    def grid(self, row_multiple: int) -> Grid:
        """The shapes of micro-batches whose number of rows is a multiple of `row_multiple` (`mesh.row_parts`)."""
        return Grid(self.microbatch_tokens, row_multiple, self.context_parallel, platform().few_shapes)


def choose_keep(cfg: ModelConfig, ranks: int, tokens: int, dtype: Any, budget: Budget) -> Keep:
    """The activations that a step keeps for its backward pass: as many as the budget allows.

    cfg, ranks, tokens, dtype: the arguments of `kept_bytes`.
    """
    if kept_bytes(cfg, ranks, tokens, dtype) <= budget.kept_bytes:
        return Keep.RESULTS
    inputs = kept_bytes(cfg, ranks, tokens, dtype, Keep.INPUTS)
    return Keep.INPUTS if budget.input_bytes is None or inputs <= budget.input_bytes else Keep.GROUPS


def tokens_at_a_time(keep: Keep) -> int:
    """How many tokens of a device pass through the token-wise parts of a layer at a time; 0 = all."""
    return 0 if on_cpu() else _AT_ONCE[keep]


def kept_bytes(cfg: ModelConfig, ranks: int, tokens: int, dtype: Any, keep: Keep = Keep.RESULTS) -> int:
    """The bytes that all layers keep for a backward pass. RESULTS are the layers' inputs and `transformer.kept_names`.

    cfg: the model. ranks: their sum over the matrices that a token passes through in one layer. tokens: of a device.
    dtype: of the activations. keep: the kind of activations that are kept.
    """
    if keep is not Keep.RESULTS:
        inputs = cfg.layers if keep is Keep.INPUTS else kept_carries(cfg.decoder_layers)
        return inputs * tokens * cfg.hidden * jnp.dtype(dtype).itemsize
    # A layer's input, `attended`, results and `low`; in layers with attention also `log_totals`, float32.
    numbers = cfg.layers * (cfg.hidden + ranks) + attended_width(cfg) + result_width(cfg)
    return int(tokens * (numbers * jnp.dtype(dtype).itemsize + 4 * cfg.heads * len(cfg.attentions)))


def result_width(cfg: ModelConfig, *, mixers: bool = False, experts: bool = False) -> int:
    """The width of all kept results of matmuls, in numbers per token.

    mixers: only matmuls before mixers. experts: only matmuls of experts.
    """
    matrices, homes = projections(cfg), layers_with(cfg)
    kept = [
        name
        for name, matrix in matrices.items()
        if matrix.kept and (matrix.before_mixing or not mixers) and (matrix.of_experts or not experts)
    ]
    return sum(matrices[name].outputs * matrices[name].per_token * len(homes[name]) for name in kept)


def attended_width(cfg: ModelConfig) -> int:
    """The width of the results of all layers' mixers, in numbers per token."""
    delta = 0 if cfg.delta is None else cfg.delta.values * len(cfg.numbers(DELTA))
    return delta + cfg.heads * sum(attention.widths[1] for attention in cfg.attentions)

"""The size of a training step: how many tokens are trained on together, and how much is kept for the backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.families import layers_with, projections
from tinkerflow.backend.compute.models.layer_loop import kept_carries
from tinkerflow.backend.compute.models.transformer import Keep
from tinkerflow.backend.compute.platforms import on_cpu

_AT_ONCE = {Keep.RESULTS: 0, Keep.INPUTS: 4096, Keep.GROUPS: 1024}  # tokens, 0 = all; 4096 as those of a micro-batch


@dataclass(frozen=True)
class Budget:
    """microbatch_tokens: padded tokens that are trained on together.

    kept_bytes: what a device may keep of them for a backward pass. Where the layers would keep more, each layer is
    computed again instead. input_bytes: what it may keep of the layers' inputs then. Where these are more, groups of
    layers are computed again (`transformer.Keep`). None: all inputs are kept.
    """

    microbatch_tokens: int
    kept_bytes: int
    input_bytes: int | None = None


def what_is_kept(cfg: ModelConfig, ranks: int, tokens: int, dtype: Any, budget: Budget) -> Keep:
    """What a backward pass of `tokens` tokens a device has of the forward pass: as much as the budget allows.

    cfg, ranks, tokens, dtype: as of `kept_bytes`.
    """
    if kept_bytes(cfg, ranks, tokens, dtype) <= budget.kept_bytes:
        return Keep.RESULTS
    inputs = kept_bytes(cfg, ranks, tokens, dtype, Keep.INPUTS)
    return Keep.INPUTS if budget.input_bytes is None or inputs <= budget.input_bytes else Keep.GROUPS


def at_once(keep: Keep) -> int:
    """How many tokens of a device go through the token-wise parts of a layer at a time; 0 = all."""
    return 0 if on_cpu() else _AT_ONCE[keep]


def kept_bytes(cfg: ModelConfig, ranks: int, tokens: int, dtype: Any, keep: Keep = Keep.RESULTS) -> int:
    """What all layers keep of `tokens` tokens for a backward pass, in bytes.

    RESULTS are those of `transformer.kept_names`, and the layers' inputs.

    cfg: the model. ranks: the sum over the matrices that a token goes through in one layer. tokens: of a device. dtype:
    of the activations. keep: what there is for the backward pass.
    """
    if keep is not Keep.RESULTS:
        inputs = cfg.layers if keep is Keep.INPUTS else kept_carries(cfg.decoder_layers)
        return inputs * tokens * cfg.hidden * jnp.dtype(dtype).itemsize
    # A layer's input, `attended`, results, `low`; and of attention `log_totals`, float32.
    numbers = cfg.layers * (cfg.hidden + ranks) + attended_width(cfg) + result_width(cfg)
    return int(tokens * (numbers * jnp.dtype(dtype).itemsize + 4 * cfg.heads * len(cfg.attentions)))


def result_width(cfg: ModelConfig, *, mixers: bool = False) -> int:
    """What the matmuls of all layers give that is kept, in numbers of one token. mixers: only those before mixers."""
    matrices, homes = projections(cfg), layers_with(cfg)
    kept = [name for name, matrix in matrices.items() if matrix.kept and (matrix.before_mixing or not mixers)]
    return sum(matrices[name].outputs * matrices[name].per_token * len(homes[name]) for name in kept)


def attended_width(cfg: ModelConfig) -> int:
    """What the mixers of all layers give, in numbers of one token."""
    delta = 0 if cfg.delta is None else cfg.delta.values * len(cfg.numbers("delta"))
    return delta + cfg.heads * sum(attention.widths[1] for attention in cfg.attentions)

"""What training takes of each device's memory: the models in training, and the steps that they make.

Counted from sizes alone, as the plan in `memory.py` needs it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from tinkerflow.backend.compute.kernels.flash import on_gpus
from tinkerflow.backend.compute.models import lora, lora_weights
from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.families import layers_with, projections
from tinkerflow.backend.compute.models.layers.delta_rule import chunk_tokens
from tinkerflow.backend.compute.models.lora import Lora
from tinkerflow.backend.compute.models.transformer import Keep
from tinkerflow.backend.compute.models.vision_tower import tower_bytes
from tinkerflow.backend.compute.planning.device_bytes import abstract_mesh, held_bytes, share, state_heads, weight_bytes
from tinkerflow.backend.compute.platforms import RANK_COLUMNS, SCORED_ROWS, TPU, platform
from tinkerflow.backend.compute.sampler.snapshot_cache import usual_spec
from tinkerflow.backend.compute.training import full
from tinkerflow.backend.compute.training.attention import score_bytes
from tinkerflow.backend.compute.training.budget import (
    Budget,
    at_once,
    attended_width,
    kept_bytes,
    result_width,
    what_is_kept,
)
from tinkerflow.backend.compute.warming import like
from tinkerflow.backend.spec.commands import GroupConfig, LoraSpec, Optimizer
from tinkerflow.backend.spec.optimizers import OPTIMIZERS
from tinkerflow.backend.spec.packing import SHORTEST_ROW, bucket

_LEAST_TOKENS = 1024  # per device of the fsdp axis: fewer leave it idle
MOST_TOKENS = 4096  # more make sample requests wait
_KEPT_ON_CPUS = 2**30  # bytes: writing out more costs more than computing it again

# Shares of what the weights leave free.
TRAINING = 0.35  # the most that a training step takes by choice
_KEPT = 0.3  # of these, the most that is kept for the backward pass

_IN_FLIGHT = 2  # commands that the devices compute and that are read, at the same time
_BESIDE_LOGIT = 1.25  # bytes of each logit, beside its gradient: of its softmax, and of an adapter's gradient, by parts


def budget_for(cfg: ModelConfig, dtype: Any, fsdp: int, free_bytes: int | None, microbatch_tokens: int = 0) -> Budget:
    """The budget of training on devices of this size.

    cfg: the model. dtype: of its activations. fsdp: devices that rows are split over. free_bytes: what the weights
    leave of each device's memory; None on CPUs, where the budget does not depend on the machine. microbatch_tokens: the
    size to use, 0 = choose.
    """
    if free_bytes is None:
        return Budget(microbatch_tokens or _LEAST_TOKENS, _KEPT_ON_CPUS)
    kept, tokens = int(_KEPT * free_bytes), _LEAST_TOKENS
    while tokens < MOST_TOKENS and kept_bytes(cfg, _ranks(cfg), 2 * tokens, dtype) <= kept:
        tokens *= 2
    return Budget(microbatch_tokens or tokens * fsdp, kept, kept)


def budget_within(cfg: ModelConfig, config: GroupConfig, free: int) -> Budget:
    """The largest micro-batches whose step takes no more than training's share, and what a step of any size may keep.

    Where a step would take more, each layer is computed again, and where that is too much as well, groups of layers.
    """
    budget = budget_for(cfg, config.dtype, config.fsdp, free, config.microbatch_tokens)

    def fits(tokens: int) -> bool:
        return sum(_step(cfg, config, budget, tokens)) <= TRAINING * free

    sizes = step_sizes(config, budget, min(config.max_context, cfg.max_positions))
    while not config.microbatch_tokens and sizes[0] > _LEAST_TOKENS and not fits(sizes[0]):
        sizes = [sizes[0] // 2, *sizes]
    budget = replace(budget, microbatch_tokens=config.microbatch_tokens or sizes[0] * config.fsdp)
    # Groups only of long sequences: they would hardly make the smallest step smaller, and all training slower.
    for keep, limit, some in ((Keep.RESULTS, "kept_bytes", sizes), (Keep.INPUTS, "input_bytes", sizes[1:])):
        if (too_large := next((tokens for tokens in some if not fits(tokens)), None)) is not None:
            most = kept_bytes(cfg, _ranks(cfg), too_large, config.dtype, keep) - 1
            budget = replace(budget, **{limit: min(getattr(budget, limit), most)})
    return budget


def adapter_bytes(cfg: ModelConfig, config: GroupConfig, spec: LoraSpec, optimizer: Optimizer) -> int:
    """What an adapter in training takes of each device: weights, gradients and the optimizer's state, float32."""
    if spec.full:
        return _full_bytes(cfg, config, optimizer)
    return _shards_bytes(config, lora_weights.shapes(cfg, spec)) * (2 + len(OPTIMIZERS[optimizer].state))


def _full_bytes(cfg: ModelConfig, config: GroupConfig, optimizer: Optimizer) -> int:
    """What training all parameters takes of each device, with what a step takes beside that of an adapter's step.

    Float32: weights, gradients and the optimizer's state, and another of each while a state is loaded in their place.
    A step may take more than that: what the gradients were before, of commands in flight, the gradients that are added
    to them, and those of the unembedding before they are summed. And the weights in the dtype they compute in.
    """
    size, item = held_bytes(full.like(cfg, abstract_mesh(config))), jnp.dtype(config.dtype).itemsize
    step = 4 * share(cfg.vocab, config.tensor) * cfg.hidden + (size * item // 4 if item < 4 else 0)
    held = size * (2 + len(OPTIMIZERS[optimizer].state))
    return held + max(held, (_IN_FLIGHT + 1) * size + step)


def largest_step(
    cfg: ModelConfig, config: GroupConfig, budget: Budget, context: int, *, whole: bool = False
) -> tuple[int, int]:
    """Activations and temporaries of the training step that takes the most, in bytes of a device.

    cfg, config: the base model and its worker group. budget: as planned. context: tokens of the longest sequence.
    whole: all parameters are trained, not an adapter.
    """
    sizes = step_sizes(config, budget, context)
    return max((_step(cfg, config, budget, tokens, whole) for tokens in sizes), key=sum)


def step_sizes(config: GroupConfig, budget: Budget, context: int) -> list[int]:
    """Tokens a device, ascending: of a full micro-batch, and of longer sequences, which go alone."""
    sizes = [max(1, budget.microbatch_tokens // config.fsdp)]
    while sizes[-1] < bucket(context, SHORTEST_ROW):
        sizes.append(2 * sizes[-1])
    return sizes


def _step(cfg: ModelConfig, config: GroupConfig, budget: Budget, tokens: int, whole: bool = False) -> tuple[int, int]:
    """Activations and temporaries of a step of `tokens` tokens a device.

    An upper estimate of what the compilers report (tests/accelerators): at most one layer is differentiated at a time.
    whole: a step that trains all parameters, less what `_full_bytes` counts: it takes no groups and no chunks.
    """
    item = jnp.dtype(config.dtype).itemsize
    keep = what_is_kept(cfg, _ranks(cfg), tokens, config.dtype, replace(budget, input_bytes=None) if whole else budget)
    some = 0 if whole else at_once(keep)
    kept = kept_bytes(cfg, _ranks(cfg), tokens, config.dtype, keep)
    inside = share((attended_width(cfg) + result_width(cfg)) // cfg.layers, config.tensor)
    layer = min(tokens, some or tokens) * (3 * inside * item + 16 * cfg.hidden * max(1, cfg.experts_per_token))
    if some:  # what attention has of all tokens, and its gradients, and those of the layer's input and result
        mixed = share((attended_width(cfg) + result_width(cfg, mixers=True)) // cfg.layers, config.tensor)
        layer += tokens * item * (3 * mixed + 5 * cfg.hidden)
    chunks = 0
    if cfg.delta is not None:  # float32: what chunks solve for, forward and back, and the state before each of them
        heads, wide, chunk = state_heads(cfg.delta, config), cfg.delta.key_dim + cfg.delta.value_dim, chunk_tokens()
        state = cfg.delta.key_dim * cfg.delta.value_dim // chunk
        chunks = 4 * tokens * heads * (6 * wide + 4 * chunk + 2 * state)
    layer += _scores(cfg, config, tokens)
    ends = 3 * tokens * (cfg.hidden + cfg.layers * (cfg.layer_input.width if cfg.layer_input else 0)) * item
    before = 0
    if cfg.vision is not None:  # what stands in place of images; what sees them is done when the step begins
        before = tower_bytes(cfg.vision, min(config.max_context, cfg.max_positions), item)
        ends += tokens * cfg.vision.vectors * cfg.hidden * item
    vocab = share(cfg.vocab, config.tensor)
    logits = int(min(tokens, SCORED_ROWS) * vocab * (item + _BESIDE_LOGIT))
    gathered = 0
    if config.fsdp > 1:  # the unembedding, and the next layer's weights while the last one's are in use
        unsplit = replace(config, fsdp=1)
        gathered = vocab * cfg.hidden * item + 2 * weight_bytes(cfg, unsplit) // cfg.layers
    # The adapter in the dtype of the activations, its gradient, and what the gradient is added to; all of them whole.
    # And what the gradients were before, of a command that is computed and one that is read at the same time.
    usual = lora_weights.shapes(cfg, usual_spec(cfg, config.expert_rank))
    adapter = sum(leaf.size for leaf in jax.tree.leaves(usual))
    devices = config.fsdp * config.expert * config.tensor
    gradients = adapter * (8 + item) + (4 * adapter if devices > 1 else 0) + _IN_FLIGHT * _shards_bytes(config, usual)
    # The logits are gone before a layer is differentiated. But with all layers' inputs or results, and in layers with
    # experts or linear attention, the compilers need more than is counted here, so the logits are counted as well.
    counted = cfg.experts or cfg.delta is not None or keep is not Keep.GROUPS
    most = layer + max(chunks, logits) if counted else max(layer, logits)
    return kept, max(before, most + ends + gathered + gradients)


def _scores(cfg: ModelConfig, config: GroupConfig, tokens: int) -> int:
    """What the scores of a layer take, of one sequence of `tokens` tokens, where no kernel of GPUs takes the layer.

    TPUs have a kernel for all of them.
    """
    if platform() is TPU:
        return 0
    heads = share(cfg.heads, config.tensor)
    left = [one.window for one in cfg.attentions if not on_gpus(tokens, one.window, max(one.widths))]
    return max((score_bytes(tokens, window, heads) for window in left), default=0)


def _ranks(cfg: ModelConfig) -> int:
    """The ranks that a token goes through in a layer with an adapter of rank 32, on average."""
    homes = layers_with(cfg)
    matrices = [(matrix.per_token, name) for name, matrix in projections(cfg).items() if name != "unembed"]
    return RANK_COLUMNS * sum(per_token * len(homes[name]) for per_token, name in matrices) // cfg.layers


def _shards_bytes(config: GroupConfig, adapter: Lora) -> int:
    """What an adapter, which needs no values, takes of each device."""
    return held_bytes(jax.tree.map(like, adapter, lora.shardings(abstract_mesh(config), adapter)))

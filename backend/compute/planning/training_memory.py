"""The memory of each device that training needs: for models in training, and for a training step.

The memory is computed only from sizes, for the plan in `memory_plan`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from tinkerflow.backend.compute.kernels.flash import on_gpus
from tinkerflow.backend.compute.models import lora, lora_weights
from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.families import layers_with, projections
from tinkerflow.backend.compute.models.layers.delta_rule import chunk_tokens
from tinkerflow.backend.compute.models.layers.step import SPARE_ROWS
from tinkerflow.backend.compute.models.transformer import Keep
from tinkerflow.backend.compute.models.vision_tower import tower_bytes
from tinkerflow.backend.compute.planning.array_sizes import (
    abstract_mesh,
    held_bytes,
    row_devices,
    share,
    state_heads,
    weight_bytes,
)
from tinkerflow.backend.compute.platforms import RANK_COLUMNS, SCORED_ROWS, TPU, TURING, platform
from tinkerflow.backend.compute.sampler.snapshot_cache import usual_spec
from tinkerflow.backend.compute.training import full_parameters
from tinkerflow.backend.compute.training.attention import score_bytes
from tinkerflow.backend.compute.training.budget import (
    Budget,
    attended_width,
    choose_keep,
    kept_bytes,
    result_width,
    tokens_at_a_time,
)
from tinkerflow.backend.compute.training.logprobs import MOST_LOGITS_OF_GPUS
from tinkerflow.backend.compute.warming import like
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.spec.commands import GroupConfig, LoraSpec, Optimizer
from tinkerflow.backend.spec.optimizers import OPTIMIZERS
from tinkerflow.backend.spec.packing import bucket
from tinkerflow.backend.spec.supports import MOST_SUPPORTED

_LEAST_TOKENS = 1024  # per device of the fsdp axis; fewer leave the device idle
_MOST_TOKENS = 4096  # more make sample requests wait
_KEPT_ON_CPUS = 2**30  # bytes; recomputing is cheaper than writing more

# Shares of the memory that the weights leave free.
TRAINING = 0.35  # for a training step, unless sequences would be too short
_KEPT = 0.3  # for activations that are kept for the backward pass

_IN_FLIGHT = 2  # commands: the current one on the devices, and the previous one, whose reply is read
_MORE_PER_LOGIT = 1.25  # bytes for each logit in addition to its gradient: softmax, and parts of adapters' gradients


def check_context_parallel(cfg: ModelConfig, config: GroupConfig, rows: int) -> None:
    """Raise UserError unless long training rows can be split over `config.context_parallel` devices.

    cfg, config: the base model and its worker group. rows: devices that rows are split over (`mesh.row_parts`).
    """
    size, heads = config.context_parallel, math.gcd(*(attention.heads for attention in cfg.attentions))
    rule = ""
    if size & (size - 1):
        rule = "must be a power of two"
    elif size > 1 and cfg.delta is not None:
        rule = "must be 1 for models with linear attention"
    elif rows % size:
        rule = f"must divide the {rows} device(s) that rows of training are split over"
    elif config.expert % size and size % config.expert:
        rule = f"must divide expert_parallel {config.expert}, or be a multiple of it"
    elif size > 1 and heads % (size * config.tensor):
        rule = f"its product with tensor_parallel {config.tensor} must divide the {heads} attention heads"
    if rule:
        raise UserError(f"base model {config.model_path!r}: context_parallel {size}; {rule}")


def budget_for(cfg: ModelConfig, config: GroupConfig, free_bytes: int | None) -> Budget:
    """The budget of training on devices of this size.

    cfg, config: the model and its worker group. free_bytes: the memory of each device without the weights; None on
    CPUs, where the budget does not depend on the machine.
    """
    if free_bytes is None:
        size = config.microbatch_tokens or _LEAST_TOKENS
        return Budget(size, _KEPT_ON_CPUS, context_parallel=config.context_parallel)
    kept, tokens = int(_KEPT * free_bytes), _LEAST_TOKENS
    while tokens < _MOST_TOKENS and kept_bytes(cfg, _ranks(cfg), 2 * tokens, config.dtype) <= kept:
        tokens *= 2
    return Budget(config.microbatch_tokens or tokens * row_devices(config), kept, kept, config.context_parallel)


def budget_within(cfg: ModelConfig, config: GroupConfig, free: int) -> Budget:
    """The largest micro-batches whose step fits training's share of `free` bytes, and the activations to keep.

    If a step would take more, each layer is recomputed. If that is still too much, groups of layers are recomputed.
    """
    budget = budget_for(cfg, config, free)

    def fits(tokens: int) -> bool:
        return sum(_step(cfg, config, budget, tokens)) <= TRAINING * free

    sizes = step_sizes(config, budget, min(config.max_context, cfg.max_positions))
    while not config.microbatch_tokens and sizes[0] > _LEAST_TOKENS and not fits(sizes[0]):
        sizes = [sizes[0] // 2, *sizes]
    budget = replace(budget, microbatch_tokens=config.microbatch_tokens or sizes[0] * row_devices(config))
    # Groups of layers are only for long sequences. For short sequences, they save little memory and make training
    # slower.
    for keep, limit, some in ((Keep.RESULTS, "kept_bytes", sizes), (Keep.INPUTS, "input_bytes", sizes[1:])):
        if (too_large := next((tokens for tokens in some if not fits(tokens)), None)) is not None:
            most = kept_bytes(cfg, _ranks(cfg), too_large, config.dtype, keep) - 1
            budget = replace(budget, **{limit: min(getattr(budget, limit), most)})
    return budget


def adapter_bytes(cfg: ModelConfig, config: GroupConfig, spec: LoraSpec, optimizer: Optimizer) -> int:
    """The bytes of each device for an adapter in training: weights, gradients and the optimizer's state, float32."""
    if spec.full:
        return _full_bytes(cfg, config, optimizer)
    return _adapter_sizes(cfg, abstract_mesh(config), spec)[1] * (2 + len(OPTIMIZERS[optimizer].state))


def _full_bytes(cfg: ModelConfig, config: GroupConfig, optimizer: Optimizer) -> int:
    """The bytes of each device for training all parameters, and for a step beyond those of an adapter's step.

    Float32 weights, gradients and optimizer state take twice their size while a saved state is loaded. A step does not
    need the second copy. Instead it needs the earlier gradients of commands in flight and the gradients to add. It also
    needs the gradients of the unembedding before they are summed, and the weights in the dtype of the base model.
    """
    size, item = held_bytes(full_parameters.weights_like(cfg, abstract_mesh(config))), jnp.dtype(config.dtype).itemsize
    step = 4 * share(cfg.vocab, config.tensor) * cfg.hidden + (size * item // 4 if item < 4 else 0)
    held = size * (2 + len(OPTIMIZERS[optimizer].state))
    return held + max(held, (_IN_FLIGHT + 1) * size + step)


def largest_step(
    cfg: ModelConfig, config: GroupConfig, budget: Budget, context: int, *, full_parameters: bool = False
) -> tuple[int, int]:
    """Activations and temporaries of the largest training step, in bytes of a device.

    cfg, config: the base model and its worker group. budget: the plan's. context: tokens of the longest sequence.
    full_parameters: train all parameters instead of an adapter.
    """
    sizes = step_sizes(config, budget, context)
    return max((_step(cfg, config, budget, tokens, full_parameters) for tokens in sizes), key=sum)


def step_sizes(config: GroupConfig, budget: Budget, context: int) -> list[int]:
    """Tokens per device of a full micro-batch, then of longer sequences, which are trained on alone. Ascending.

    Sequences are split over devices (`context_parallel`) before a device gets more tokens than those of a micro-batch.
    """
    sizes = [max(1, budget.microbatch_tokens // row_devices(config))]
    shortest = budget.grid(row_devices(config)).shortest_row
    while sizes[-1] < bucket(context, shortest) // config.context_parallel:
        sizes.append(2 * sizes[-1])
    return sizes


def _step(
    cfg: ModelConfig, config: GroupConfig, budget: Budget, tokens: int, full_parameters: bool = False
) -> tuple[int, int]:
    """Activations and temporaries of a step of `tokens` tokens per device.

    This is an upper estimate of the compilers' figures (tests/accelerators). At most one layer is differentiated at a
    time. full_parameters: train all parameters, without groups of layers and chunks of tokens. `_full_bytes` counts the
    other arrays.
    """
    item = jnp.dtype(config.dtype).itemsize
    keep = choose_keep(
        cfg, _ranks(cfg), tokens, config.dtype, replace(budget, input_bytes=None) if full_parameters else budget
    )
    some = 0 if full_parameters else tokens_at_a_time(keep)
    kept = kept_bytes(cfg, _ranks(cfg), tokens, config.dtype, keep)
    if keep is Keep.RESULTS and cfg.experts and row_devices(config) > 1:
        kept += tokens * result_width(cfg, experts=True) * item // SPARE_ROWS
    inside = share((attended_width(cfg) + result_width(cfg)) // cfg.layers, config.tensor)
    layer = min(tokens, some or tokens) * (3 * inside * item + 16 * cfg.hidden * max(1, cfg.experts_per_token))
    if some:  # attention sees all tokens: its arrays and gradients, and the gradients of the layer's input and result
        mixed = share((attended_width(cfg) + result_width(cfg, mixers=True)) // cfg.layers, config.tensor)
        layer += tokens * item * (3 * mixed + 5 * cfg.hidden)
    chunks = 0
    if cfg.delta is not None:  # float32: the solutions of chunks, forward and backward, the state before each chunk
        heads, wide, chunk = state_heads(cfg.delta, config), cfg.delta.key_dim + cfg.delta.value_dim, chunk_tokens()
        state = cfg.delta.key_dim * cfg.delta.value_dim // chunk
        states = 3 if config.share_prefixes else 2  # and the kept state of `Branches`
        chunks = 4 * tokens * heads * (6 * wide + 4 * chunk + states * state)
    layer += _scores(cfg, config, tokens)
    ends = 3 * tokens * (cfg.hidden + cfg.layers * (cfg.layer_input.width if cfg.layer_input else 0)) * item
    if config.routing_replay:  # the recorded experts as int16, and as int32 for the layers
        ends += 6 * tokens * cfg.layers * cfg.experts_per_token
    if config.support_replay:  # the ids of recorded supports
        ends += 4 * tokens * MOST_SUPPORTED
    before = 0
    if cfg.vision is not None:  # the features of images; the tower ends before the step begins
        before = tower_bytes(cfg.vision, min(config.max_context, cfg.max_positions), item)
        ends += tokens * cfg.vision.vectors * cfg.hidden * item
    vocab = share(cfg.vocab, config.tensor)
    logits = int(min(tokens, SCORED_ROWS) * vocab * (item + _MORE_PER_LOGIT))
    if config.support_replay:  # without kernels: a chunk in float32, its softmax and its gradient
        logits = max(logits, 3 * 4 * MOST_LOGITS_OF_GPUS)
    if platform() is TURING:  # a chunk in float32, its softmax and its gradient; and the unembedding in float16
        logits = 3 * 4 * MOST_LOGITS_OF_GPUS + 2 * vocab * cfg.hidden
    gathered = 0
    if config.fsdp > 1:  # the unembedding, the weights of a layer in use, and those of the next layer
        unsplit = replace(config, fsdp=1)
        gathered = vocab * cfg.hidden * item + 2 * weight_bytes(cfg, unsplit) // cfg.layers
    widened = 0
    if config.base_weights in ("nf4", "mxfp4"):  # a layer's matrices, while it is differentiated
        packed = replace(config, fsdp=1)
        widened = (weight_bytes(cfg, replace(packed, base_weights="full")) - weight_bytes(cfg, packed)) // cfg.layers
    # The adapter in the dtype of the activations, its gradient and the sum of gradients, all of them gathered. In
    # addition, the earlier gradients of commands in flight.
    adapter, held = _adapter_sizes(cfg, abstract_mesh(config), usual_spec(cfg, config.expert_rank))
    devices = config.fsdp * config.expert * config.tensor
    gradients = adapter * (8 + item) + (4 * adapter if devices > 1 else 0) + _IN_FLIGHT * held
    # Logits are freed before a layer is differentiated. Where all layers' inputs or results are kept, and with experts
    # or linear attention, the compilers need more than is counted here, so logits are counted, too.
    counted = cfg.experts or cfg.delta is not None or keep is not Keep.GROUPS
    most = layer + max(chunks, logits) if counted else max(layer, logits)
    return kept, max(before, most + ends + gathered + widened + gradients)


def _scores(cfg: ModelConfig, config: GroupConfig, tokens: int) -> int:
    """The bytes of a layer's attention scores for a sequence, if no GPU kernel supports the layer.

    The TPU kernel supports all layers.
    """
    if platform() is TPU:
        return 0
    heads, tokens = share(cfg.heads, config.tensor * config.context_parallel), tokens * config.context_parallel
    left = [one.window for one in cfg.attentions if platform() is TURING or not on_gpus(max(one.widths))]
    return max((score_bytes(tokens, window, heads) for window in left), default=0)


def _ranks(cfg: ModelConfig) -> int:
    """The average sum of ranks that a token passes through in a layer, with an adapter of rank 32."""
    homes = layers_with(cfg)
    matrices = [(matrix.per_token, name) for name, matrix in projections(cfg).items() if name != "unembed"]
    return RANK_COLUMNS * sum(per_token * len(homes[name]) for per_token, name in matrices) // cfg.layers


@lru_cache(maxsize=256)  # as in `weight_bytes`
def _adapter_sizes(cfg: ModelConfig, mesh: Any, spec: LoraSpec) -> tuple[int, int]:
    """The numbers of an adapter, and the bytes that it takes on each device."""
    adapter = lora_weights.shapes(cfg, spec)
    sharded = jax.tree.map(like, adapter, lora.shardings(mesh, adapter))
    return sum(leaf.size for leaf in jax.tree.leaves(adapter)), held_bytes(sharded)

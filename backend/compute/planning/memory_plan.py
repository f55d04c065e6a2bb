"""The plan of the devices' memory: the bytes for each use, and the resulting sizes of training and sampling.

A plan depends on sizes alone: the model, the mesh, the settings and the memory of a device. It never depends on the
free memory, because commands that are replayed after a crash must be computed in the same micro-batches. `tinkerflow
plan` makes the same plan without a device.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.experimental import multihost_utils

from tinkerflow.backend.compute.mesh import heads_split
from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.layers import DELTA
from tinkerflow.backend.compute.models.params import params_like
from tinkerflow.backend.compute.planning.array_sizes import (
    abstract_mesh,
    held_bytes,
    row_devices,
    share,
    state_heads,
    weight_bytes,
)
from tinkerflow.backend.compute.planning.training_memory import (
    TRAINING,
    adapter_bytes,
    budget_for,
    budget_within,
    check_context_parallel,
    largest_step,
    step_sizes,
)
from tinkerflow.backend.compute.platforms import RANK_COLUMNS, on_cpu, platform
from tinkerflow.backend.compute.sampler.kv_cache import cache_dtype
from tinkerflow.backend.compute.sampler.pages import PAGE, pages_for
from tinkerflow.backend.compute.sampler.shapes import PREFILL_ROWS, make_shapes
from tinkerflow.backend.compute.sampler.snapshot_cache import usual_spec
from tinkerflow.backend.compute.training import full_parameters
from tinkerflow.backend.compute.training.budget import Budget
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.spec.commands import GroupConfig, LoraSpec
from tinkerflow.backend.spec.limits import MODEL_CONTEXT
from tinkerflow.backend.spec.optimizers import DEFAULT_OPTIMIZER

_CACHE_ON_CPUS = 0.2  # of the host's memory
_POSITIONS_A_SLOT = 1024  # on CPUs, which share the host's memory, and for full-parameter models
_FULL_MODEL_SEQUENCES = 8  # in the KV cache of a full-parameter model

# Advice for models with wider base weights.
_SMALLER = {"full": "TINKERFLOW_BASE_WEIGHTS=int8 or nf4, ", "int8": "TINKERFLOW_BASE_WEIGHTS=nf4, "}
# Shares of the memory that the weights leave free.
_SHORT_OF_MEMORY = 0.6  # for a training step, if sequences of `_USUAL` tokens would not fit otherwise
_ADAPTERS = 0.5  # for `_RESIDENT` adapters, before the sampler's part is taken
# Shares of the sampler's part.
_CACHE = 0.85  # for pages of the KV cache; the rest is for resident snapshots

_MORE_STATES = 10  # of short requests outside the batch, and of the prompt that is being computed
_LEAST_KEPT_STATES = 4
_RESIDENT = 16  # adapters of the usual rank that memory is reserved for
_FEWEST = 2  # the fewest of these adapters, if sequences of `_USUAL` tokens would not fit otherwise
_USUAL = 8192  # tokens; more adapters are worth more than a longer context
_ADAPTERS_WITH_FULL = 4  # adapters of the usual rank that fit together with full-parameter models
_FULL_ON_CPUS = 0.5  # of the host's memory, for full-parameter models and the base model's weights
_RESERVE = 0.04  # of the limit, for libraries and for memory that the allocator cannot use
_LOGITS_AND_TABLES = 20  # bytes per cell: logits before and after adjustments, biases, and two tables of seen tokens
GB = 10**9

Words = npt.NDArray[np.int32]
Gather = Callable[[Words], Words]  # from this process's array to the arrays of all processes, [processes, ...]


@dataclass(frozen=True)
class MemoryUses:
    """Bytes of each device by use. Their sum is at most the limit.

    weights: the base model. activations: kept by a training step for its backward pass. temporaries: all other arrays
    of a step, including the gradient that it adds to. kv_cache: the pages and states of all sequences and of cached
    prompts. logits: the logits of a step for all sequences, and the tables that adjust them. snapshots: adapters
    published for sampling, and the stack of adapters being sampled. adapters: weights, gradients and moments of the
    models in training. full_models: for sampling full-parameter models (`FullModelMemory`). reserve: unused.
    """

    weights: int
    activations: int
    temporaries: int
    kv_cache: int
    logits: int
    snapshots: int
    adapters: int
    reserve: int
    full_models: int = 0

    @property
    def total(self) -> int:
        """The sum of all uses."""
        return sum(getattr(self, each.name) for each in fields(self))


@dataclass(frozen=True)
class FullModelMemory:
    """Memory to sample one full-parameter model at a time: its weights and its KV cache.

    size: bytes of each device. pages: the pages of each shard of this cache, including the page of zeros.
    """

    size: int
    pages: int


@dataclass(frozen=True)
class MemoryPlan:
    """How a group uses its devices' memory.

    limit: bytes of each device that the group may use; None on CPUs, which share the host's memory. There `pages`,
    `cells`, `full` and `full_model` depend on the machine, and the sampler refuses prompts that exceed its pages.
    budget: the limits of a training step. context: the longest sequence that can be trained on and sampled, in tokens.
    pages: the pages of each shard of the KV cache (`sampling_config`), including the page of zeros. cells: positions in
    the pages of sequences, over the mesh. uses: None on CPUs. resident_adapters: the number of adapters of rank 32 that
    fit together; None on CPUs. states: the states of layers with linear attention in each shard; 0 without such layers.
    full: bytes of each device for full-parameter models in training, without their steps. full_model: memory to sample
    one of these models; None if it does not fit while one is trained.
    """

    limit: int | None
    budget: Budget
    context: int
    pages: int
    cells: int
    uses: MemoryUses | None = None
    resident_adapters: int | None = None
    states: int = 0
    full: int = 0
    full_model: FullModelMemory | None = None

    @property
    def snapshot_bytes(self) -> int | None:
        """Bytes of each device that resident snapshots may take; None on CPUs."""
        return None if self.uses is None else self.uses.snapshots

    @property
    def rule(self) -> str:
        """The limit that a longer sequence would exceed, for error messages."""
        if self.limit is None:
            return MODEL_CONTEXT
        return f"the most that fits this group's devices with {self.limit / GB:.3g} GB each"

    def by_use(self, cfg: ModelConfig, config: GroupConfig) -> dict[str, int]:
        """Bytes of each device by use. On CPUs only the weights and the KV cache are planned."""
        if self.uses is not None:
            return asdict(self.uses)
        cache = self.pages * _page_bytes(cfg, config) + _state_bytes(cfg, config)
        return {"weights": weight_bytes(cfg, config), "kv_cache": cache}

    def describe(self) -> str:
        """The plan as lines of text for people."""
        tokens = self.budget.microbatch_tokens
        lines = [f"micro-batches of {tokens} tokens, sequences of up to {self.context} tokens"]
        if self.uses is None or self.limit is None:
            return lines[0]
        rows = {each.name.replace("_", " "): getattr(self.uses, each.name) for each in fields(self.uses)}
        lines[0] += f", {self.cells} positions to sample in, {self.resident_adapters} adapters of rank {RANK_COLUMNS}"
        lines += [f"{name:<14}{size / GB:8.2f} GB" for name, size in rows.items() if size]
        lines.append(f"{'of':<14}{self.limit / GB:8.2f} GB a device")
        return "\n".join(lines)


def plan_group(cfg: ModelConfig, config: GroupConfig) -> MemoryPlan:
    """The plan of this process's group. Every process must call it, and all get the same plan.

    config: its fsdp must not be 0. Errors are those of `check_context_parallel` and `plan_memory`.
    """
    check_context_parallel(cfg, config, row_devices(config))
    limit = device_limit(config)
    if limit is None:
        longest = min(config.max_context, cfg.max_positions)
        shards = sampling_config(cfg, config).fsdp
        slots = -(-config.sample_slots // shards) * pages_for(min(longest, _POSITIONS_A_SLOT))
        shared, in_states = int(_host_bytes() * _CACHE_ON_CPUS), _state_bytes(cfg, config)
        fit = least(max(shared - in_states, shared // 2) // _page_bytes(cfg, config))
        pages = min(fit, max(slots, pages_for(longest)))
        budget = budget_for(cfg, config, None)
        states = state_count(cfg, config)
        full = max(0, least(int(_host_bytes() * _FULL_ON_CPUS)) - weight_bytes(cfg, config))
        plan = MemoryPlan(None, budget, longest, 1 + pages, pages * PAGE * shards, states=states, full=full)
        return _with_full_model(cfg, config, plan)
    return plan_memory(cfg, config, least(limit))


def plan_memory(cfg: ModelConfig, config: GroupConfig, limit: int) -> MemoryPlan:
    """The plan for a group that may use `limit` bytes of each device. It is made without a device.

    UserError: the weights leave too little memory to train and to sample.
    """
    weights, reserve = weight_bytes(cfg, config), int(_RESERVE * limit)
    free = limit - weights - reserve
    budget = budget_within(cfg, config, max(0, free))
    reference = adapter_bytes(cfg, config, usual_spec(cfg, config.expert_rank), DEFAULT_OPTIMIZER)
    page, longest = _page_bytes(cfg, config), min(config.max_context, cfg.max_positions)
    states, logits = _state_bytes(cfg, config), _logit_bytes(cfg, config)
    contexts = [pages_for(longest) * PAGE]
    while (half := contexts[-1] // 2 // PAGE * PAGE) >= PAGE:
        contexts.append(half)
    by_choice = [context for context in contexts if context >= min(contexts[0], _USUAL)]
    rest = [context for context in contexts if context <= _USUAL]
    for most, context in (*product([TRAINING], by_choice), *product([_SHORT_OF_MEMORY], rest)):
        step = largest_step(cfg, config, budget, context)
        # One device of the fsdp axis holds all pages of a sequence, and a page of zeros. Two sequences must fit, so
        # that they can form a batch.
        two = (2 * context // PAGE + 1) * page + states
        set_aside = min(_RESIDENT * reference, int(_ADAPTERS * max(0, free)))
        if context <= _USUAL:
            spare = free - sum(step) - logits - math.ceil(two / _CACHE)
            set_aside = min(set_aside, max(spare, _FEWEST * reference))
        sampling = min(free - sum(step) - set_aside, limit // 2) - logits
        cache = int(_CACHE * sampling)
        if sum(step) <= most * free and two <= cache:
            break
    else:
        tokens = step_sizes(config, budget, PAGE)[0]
        less = "a smaller TINKERFLOW_MICROBATCH_TOKENS, " if config.microbatch_tokens else ""
        if states:
            less += f"fewer TINKERFLOW_SAMPLE_SLOTS ({config.sample_slots} have states of {states / GB:.1f} GB), "
        if sum(step) > (room := most * max(0, free)):
            lack = f"a training step of {tokens} tokens takes {sum(step) / GB:.2f} GB and only {room / GB:.2f} are left"
        else:
            left = f"{max(0, cache) / GB:.2f}"
            lack = f"two samples of {context} tokens take {two / GB:.2f} GB, and a training step leaves {left}"
        raise UserError(
            f"base model {config.model_path!r}: its weights take {weights / GB:.1f} GB of the {limit / GB:.1f} GB of "
            f"each device. Too little is left to train and sample: {lack}. Use {less}more devices, "
            f"TINKERFLOW_TENSOR_PARALLEL, {_SMALLER.get(config.base_weights, '')}or devices with more memory"
        )
    pages = (cache - states) // page
    uses = MemoryUses(
        weights=weights,
        activations=step[0],
        temporaries=step[1],
        kv_cache=cache,
        logits=logits,
        snapshots=sampling - cache,
        adapters=free - sum(step) - sampling - logits,
        reserve=reserve,
    )
    cells = (pages - 1) * PAGE * sampling_config(cfg, config).fsdp
    resident = uses.adapters // reference
    more = max(0, sum(largest_step(cfg, config, budget, context, full_parameters=True)) - sum(step))
    plan = MemoryPlan(
        limit,
        budget,
        min(context, longest),
        pages,
        cells,
        uses,
        resident,
        states=state_count(cfg, config),
        full=max(0, uses.adapters - _ADAPTERS_WITH_FULL * reference - more),
    )
    return _with_full_model(cfg, config, plan)


def _with_full_model(cfg: ModelConfig, config: GroupConfig, plan: MemoryPlan) -> MemoryPlan:
    """The plan with memory to sample full-parameter models, if one can be trained at the same time.

    The memory is taken from the memory of models in training, so it is available in any order of models and samplers.
    """
    least_pages = 2 * pages_for(plan.context), _FULL_MODEL_SEQUENCES * pages_for(min(plan.context, _POSITIONS_A_SLOT))
    pages = 1 + min(plan.pages - 1, max(least_pages))
    weights = full_parameters.weights_like(cfg, abstract_mesh(config))
    largest = max(held_bytes(leaf) for leaf in jax.tree.leaves(weights))  # copied to the host in both dtypes
    size = 2 * largest + held_bytes(params_like(cfg, abstract_mesh(config), config.dtype))
    size += pages * _page_bytes(cfg, config) + _state_bytes(cfg, config) + _logit_bytes(cfg, config)
    if plan.full < size + adapter_bytes(cfg, config, LoraSpec(0), DEFAULT_OPTIMIZER):
        return plan
    plan = replace(plan, full=plan.full - size, full_model=FullModelMemory(size, pages))
    if plan.uses is None:
        return plan
    uses = replace(plan.uses, adapters=plan.uses.adapters - size, full_models=size)
    reference = adapter_bytes(cfg, config, usual_spec(cfg, config.expert_rank), DEFAULT_OPTIMIZER)
    return replace(plan, uses=uses, resident_adapters=uses.adapters // reference)


def state_count(cfg: ModelConfig, config: GroupConfig) -> int:
    """The number of states in a shard of the KV cache: for all sequences together, and for kept prompts."""
    if cfg.delta is None:
        return 0
    slots = -(-config.sample_slots // sampling_config(cfg, config).fsdp)
    return 1 + slots + PREFILL_ROWS[-1] + _MORE_STATES + max(_LEAST_KEPT_STATES, slots // 2)


def sampling_config(cfg: ModelConfig, config: GroupConfig) -> GroupConfig:
    """The configuration with the mesh axes of the KV cache (`mesh.cache_mesh`)."""
    heads = heads_split(abstract_mesh(config), cfg.split_heads)
    return replace(config, fsdp=config.fsdp * config.tensor // heads, tensor=heads)


def device_limit(config: GroupConfig) -> int | None:
    """Bytes of each device of this process that the group may use; None on CPUs, unless the settings give a number.

    UserError: the devices do not report their memory.
    """
    if config.device_memory:
        return int(config.device_memory * GB)
    if on_cpu():
        return None
    device = jax.local_devices()[0]
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        raise UserError(
            f"device_memory is 0, and {device.device_kind} does not report its memory: must be the GB of "
            "memory of each device"
        )
    return int(stats["bytes_limit"])


def least(value: int, gather: Gather | None = None) -> int:
    """The smallest `value` of all processes, which must all call it. gather: None = over the processes of the group."""
    if gather is None:
        if jax.process_count() == 1:
            return value
        gather = multihost_utils.process_allgather
    words = gather(np.array(divmod(value, 2**31), np.int32))  # two words, because JAX truncates 64 bits to 32
    return min(int(high) * 2**31 + int(low) for high, low in words)


def _logit_bytes(cfg: ModelConfig, config: GroupConfig) -> int:
    """Bytes of a device for the logits of all sequences while tokens are drawn, including their `AdjustedRows`."""
    shapes = make_shapes(max_slots=config.sample_slots, fsdp=sampling_config(cfg, config).fsdp)
    # `mesh.by_rows` replicates rows that the devices do not divide.
    rows = max(share(slots, config.fsdp * config.tensor) for slots in shapes.slots)
    return rows * cfg.vocab * _LOGITS_AND_TABLES


def _page_bytes(cfg: ModelConfig, config: GroupConfig) -> int:
    """Bytes of a page of the KV cache on the device that holds it."""
    cells = cfg.cached_cell // sampling_config(cfg, config).tensor
    return cells * jnp.dtype(cache_dtype(config.kv_cache, config.dtype)).itemsize * PAGE


def _state_bytes(cfg: ModelConfig, config: GroupConfig) -> int:
    """Bytes of a device for states, including the copies that a step takes out of their pool.

    Without kernels a step copies the states of all sequences. Otherwise it copies the states of one piece of prompts,
    before and after the step.
    """
    if cfg.delta is None:
        return 0
    config = sampling_config(cfg, config)
    each = state_bytes(cfg, config.dtype, state_heads(cfg.delta, config))
    prompts = PREFILL_ROWS[-1]
    copies = 2 * prompts if platform().kernels else max(prompts, -(-config.sample_slots // config.fsdp))
    return each * (state_count(cfg, config) + copies)


def state_bytes(cfg: ModelConfig, dtype: Any, heads: int | None = None) -> int:
    """Bytes of the states of one sequence in all layers. dtype: of activations. heads: value heads; None = all."""
    if cfg.delta is None:
        return 0
    heads = cfg.delta.value_heads if heads is None else heads
    conv = (cfg.delta.taps - 1) * cfg.delta.channels * jnp.dtype(dtype).itemsize
    return len(cfg.numbers(DELTA)) * (4 * heads * cfg.delta.key_dim * cfg.delta.value_dim + conv)


def _host_bytes() -> int:
    """The memory of this machine, divided by the number of the group's devices, because CPU devices share it."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.device_count()

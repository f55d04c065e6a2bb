"""One budget for the devices' memory: what everything takes, and out of it how much may be trained and sampled at once.

A plan depends on sizes alone (the model, the mesh, the settings, the memory of a device), never on what is free at the
moment: commands that are replayed after a crash must be computed in the same micro-batches, and `tinkerflow plan` makes
the same plan without a device.
"""

from __future__ import annotations

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
from tinkerflow.backend.compute.models.params import params_like
from tinkerflow.backend.compute.planning.device_bytes import abstract_mesh, held_bytes, share, state_heads, weight_bytes
from tinkerflow.backend.compute.planning.training_memory import (
    MOST_TOKENS,
    TRAINING,
    adapter_bytes,
    budget_for,
    budget_within,
    largest_step,
    step_sizes,
)
from tinkerflow.backend.compute.platforms import RANK_COLUMNS, on_cpu
from tinkerflow.backend.compute.sampler.kv_cache import cache_dtype
from tinkerflow.backend.compute.sampler.pages import PAGE, pages_for
from tinkerflow.backend.compute.sampler.shapes import PREFILL_ROWS, make_shapes
from tinkerflow.backend.compute.sampler.snapshot_cache import usual_spec
from tinkerflow.backend.compute.training import full
from tinkerflow.backend.compute.training.budget import Budget
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.spec.commands import GroupConfig, LoraSpec
from tinkerflow.backend.spec.limits import MODEL_CONTEXT
from tinkerflow.backend.spec.optimizers import DEFAULT_OPTIMIZER

_CACHE_ON_CPUS = 0.2  # of the host's memory
_POSITIONS_A_SLOT = 1024  # on CPUs, where the host's memory is everybody's, and beside the batch
_WHOLE_SEQUENCES = 8  # a model of which all parameters were trained has room for so many sequences

# Shares of what the weights leave free.
_SHORT_OF_MEMORY = 0.6  # the most that a training step takes where sequences of `MOST_TOKENS` would not fit otherwise
_ADAPTERS = 0.5  # the most that is set aside for `_RESIDENT` adapters before the sampler gets its part
# Shares of the sampler's part.
_CACHE = 0.85  # the pages of the KV cache; the rest is for resident snapshots

_BESIDE = 10  # states of short requests beside the batch, and of the prompt that is being computed
_LEAST_KEPT_STATES = 4
_RESIDENT = 16  # adapters of the usual rank that room is set aside for
_BESIDE_FULL = 4  # adapters of the usual rank that find room beside models of which all parameters are trained
_FULL_ON_CPUS = 0.5  # of the host's memory: such models and the base model's weights
_RESERVE = 0.04  # of the limit: what the allocator cannot use, and what libraries take
_LOGITS_AND_TABLES = 20  # bytes a cell: logits as they are and changed, biases, what was seen before a chunk and now
GB = 10**9

Words = npt.NDArray[np.int32]
Gather = Callable[[Words], Words]  # from the array of this process to those of all, [processes, ...]


@dataclass(frozen=True)
class MemoryUses:
    """Bytes of each device by what takes them. Together they are at most the limit.

    weights: the base model. activations: what a training step keeps for its backward pass. temporaries: what a step
    needs besides, the gradient that it adds to included. kv_cache: the pages and the states of all sequences, and of
    prompts that are kept for later requests. logits: of a step of all sequences, and the tables that change them.
    snapshots: adapters published for sampling, and the stack of those being sampled. adapters: weights, gradients and
    moments of the models in training. whole_models: for sampling models of which all parameters were trained (see
    `WholeRoom`). reserve: left alone.
    """

    weights: int
    activations: int
    temporaries: int
    kv_cache: int
    logits: int
    snapshots: int
    adapters: int
    reserve: int
    whole_models: int = 0

    @property
    def total(self) -> int:
        """The sum."""
        return sum(getattr(self, each.name) for each in fields(self))


@dataclass(frozen=True)
class WholeRoom:
    """Room to sample one model at a time of which all parameters were trained: its weights and a KV cache of its own.

    size: bytes of each device. pages: of each shard of that cache, the one of zeros included.
    """

    size: int
    pages: int


@dataclass(frozen=True)
class MemoryPlan:
    """How a group uses its devices' memory.

    limit: bytes of each device that the group may use; None on CPUs, which share the host's memory: there only `pages`
    depends on the machine, and a prompt for which they are too few is refused by the sampler. budget: of training.
    context: the longest sequence that can be trained on and sampled, in tokens. pages: of each shard of the KV cache
    (`sampling_config`), the one of zeros included. cells: positions of all pages that sequences may have, over the
    whole mesh. uses: None on CPUs. resident_adapters: how many adapters of rank 32 fit at the same time; None on CPUs.
    states: of sequences in layers with linear attention, of each shard; 0 in models without them.
    full: bytes of each device that models may take of which all parameters are trained, beside what their step takes.
    whole: room to sample such models; None: there is none beside the training of one.
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
    whole: WholeRoom | None = None

    @property
    def snapshot_bytes(self) -> int | None:
        """Bytes of each device that resident snapshots may take; None on CPUs."""
        return None if self.uses is None else self.uses.snapshots

    @property
    def rule(self) -> str:
        """Why no longer sequence is served, as an error says it."""
        if self.limit is None:
            return MODEL_CONTEXT
        return f"what fits this group's devices with {self.limit / GB:.3g} GB each"

    def by_use(self, cfg: ModelConfig, config: GroupConfig) -> dict[str, int]:
        """Bytes of each device by use; on CPUs, where nothing else is planned, of the weights and the KV cache."""
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
        lines += [f"{name:<14}{size / GB:8.2f} GB" for name, size in rows.items()]
        lines.append(f"{'of':<14}{self.limit / GB:8.2f} GB a device")
        return "\n".join(lines)


def plan_group(cfg: ModelConfig, config: GroupConfig) -> MemoryPlan:
    """The plan of this process's group. Every process must call it; all get the same."""
    limit = device_limit(config)
    if limit is None:
        longest = min(config.max_context, cfg.max_positions)
        shards = sampling_config(cfg, config).fsdp
        slots = -(-config.sample_slots // shards) * pages_for(min(longest, _POSITIONS_A_SLOT))
        shared, in_states = int(_host_bytes() * _CACHE_ON_CPUS), _state_bytes(cfg, config)
        fit = least(max(shared - in_states, shared // 2) // _page_bytes(cfg, config))
        pages = min(fit, max(slots, pages_for(longest)))
        budget = budget_for(cfg, config.dtype, config.fsdp, None, config.microbatch_tokens)
        states = state_count(cfg, config)
        whole = max(0, least(int(_host_bytes() * _FULL_ON_CPUS)) - weight_bytes(cfg, config))
        plan = MemoryPlan(None, budget, longest, 1 + pages, pages * PAGE * shards, states=states, full=whole)
        return _with_whole(cfg, config, plan)
    return plan_memory(cfg, config, least(limit))


def plan_memory(cfg: ModelConfig, config: GroupConfig, limit: int) -> MemoryPlan:
    """The plan for devices of which each has `limit` bytes for the group; no device is asked.

    UserError when the weights leave too little to train and to sample.
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
    by_choice = [context for context in contexts if context >= min(contexts[0], MOST_TOKENS)]
    for most, context in (*product([TRAINING], by_choice), *product([_SHORT_OF_MEMORY], contexts)):
        step = largest_step(cfg, config, budget, context)
        set_aside = min(_RESIDENT * reference, int(_ADAPTERS * max(0, free)))
        sampling = min(free - sum(step) - set_aside, limit // 2) - logits
        cache = int(_CACHE * sampling)
        # The pages of a sequence lie on one device of fsdp, beside one of zeros; a second sequence makes it a batch.
        if sum(step) <= most * free and (2 * context // PAGE + 1) * page + states <= cache:
            break
    else:
        tokens = step_sizes(config, budget, PAGE)[0]
        less = "a smaller TINKERFLOW_MICROBATCH_TOKENS, " if config.microbatch_tokens else ""
        if states:
            less += f"fewer TINKERFLOW_SAMPLE_SLOTS ({config.sample_slots} have states of {states / GB:.1f} GB), "
        raise UserError(
            f"base model {config.model_path!r}: its weights take {weights / GB:.1f} GB of the {limit / GB:.1f} GB of "
            f"each device. Too little is left to train and sample: a training step of {tokens} tokens takes "
            f"{sum(step) / GB:.1f} GB and may take {most * max(0, free) / GB:.1f}. Use {less}more devices, "
            "TINKERFLOW_TENSOR_PARALLEL, TINKERFLOW_BASE_WEIGHTS=int8, or devices with more memory"
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
    beside = max(0, sum(largest_step(cfg, config, budget, context, whole=True)) - sum(step))
    plan = MemoryPlan(
        limit,
        budget,
        min(context, longest),
        pages,
        cells,
        uses,
        resident,
        states=state_count(cfg, config),
        full=max(0, uses.adapters - _BESIDE_FULL * reference - beside),
    )
    return _with_whole(cfg, config, plan)


def _with_whole(cfg: ModelConfig, config: GroupConfig, plan: MemoryPlan) -> MemoryPlan:
    """The plan with room to sample models of which all parameters were trained, if one in training fits beside it.

    Taken from the room of models in training: so it is there in any order in which models and samplers come.
    """
    least_pages = 2 * pages_for(plan.context), _WHOLE_SEQUENCES * pages_for(min(plan.context, _POSITIONS_A_SLOT))
    pages = 1 + min(plan.pages - 1, max(least_pages))
    trained = full.like(cfg, abstract_mesh(config))
    largest = max(held_bytes(leaf) for leaf in jax.tree.leaves(trained))  # copied to the host in both dtypes
    size = 2 * largest + held_bytes(params_like(cfg, abstract_mesh(config), config.dtype))
    size += pages * _page_bytes(cfg, config) + _state_bytes(cfg, config) + _logit_bytes(cfg, config)
    if plan.full < size + adapter_bytes(cfg, config, LoraSpec(0), DEFAULT_OPTIMIZER):
        return plan
    plan = replace(plan, full=plan.full - size, whole=WholeRoom(size, pages))
    if plan.uses is None:
        return plan
    uses = replace(plan.uses, adapters=plan.uses.adapters - size, whole_models=size)
    reference = adapter_bytes(cfg, config, usual_spec(cfg, config.expert_rank), DEFAULT_OPTIMIZER)
    return replace(plan, uses=uses, resident_adapters=uses.adapters // reference)


def state_count(cfg: ModelConfig, config: GroupConfig) -> int:
    """How many states a shard of the KV cache has: of all sequences at once, and of prompts that are kept."""
    if cfg.delta is None:
        return 0
    slots = -(-config.sample_slots // sampling_config(cfg, config).fsdp)
    return 1 + slots + PREFILL_ROWS[-1] + _BESIDE + max(_LEAST_KEPT_STATES, slots // 2)


def sampling_config(cfg: ModelConfig, config: GroupConfig) -> GroupConfig:
    """The configuration with the axes that the KV cache has: those of `mesh.cache_mesh`."""
    heads = heads_split(abstract_mesh(config), cfg.split_heads)
    return replace(config, fsdp=config.fsdp * config.tensor // heads, tensor=heads)


def device_limit(config: GroupConfig) -> int | None:
    """Bytes of each device of this process that the group may use; None on CPUs, unless the settings name a number.

    UserError where the devices do not say how much they have.
    """
    if config.device_memory:
        return int(config.device_memory * GB)
    if on_cpu():
        return None
    device = jax.local_devices()[0]
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        raise UserError(
            f"device_memory is 0, and {device.device_kind} does not say how much memory it has: must be the GB of "
            "memory of each device"
        )
    return int(stats["bytes_limit"])


def least(value: int, gather: Gather | None = None) -> int:
    """The smallest value that any process calls it with. gather: None = over all processes of the group."""
    if gather is None:
        if jax.process_count() == 1:
            return value
        gather = multihost_utils.process_allgather
    words = gather(np.array(divmod(value, 2**31), np.int32))  # two, because JAX makes 32 bits of 64
    return min(int(high) * 2**31 + int(low) for high, low in words)


def _logit_bytes(cfg: ModelConfig, config: GroupConfig) -> int:
    """What the logits of all sequences take of a device while tokens are drawn, with `AdjustedRows` for each."""
    shapes = make_shapes(max_slots=config.sample_slots, fsdp=sampling_config(cfg, config).fsdp)
    # `mesh.by_rows` leaves all rows on each device where these do not divide them.
    rows = max(share(slots, config.fsdp * config.tensor) for slots in shapes.slots)
    return rows * cfg.vocab * _LOGITS_AND_TABLES


def _page_bytes(cfg: ModelConfig, config: GroupConfig) -> int:
    """What a page of the KV cache takes of the device that holds it."""
    cells = cfg.cached_cell // sampling_config(cfg, config).tensor
    return cells * jnp.dtype(cache_dtype(config.kv_cache, config.dtype)).itemsize * PAGE


def _state_bytes(cfg: ModelConfig, config: GroupConfig) -> int:
    """What states take of a device, and those that a dispatch has taken out of their pool.

    These are of a step of all sequences; on GPUs and TPUs of a piece of prompts alone, as they were and as they become.
    """
    if cfg.delta is None:
        return 0
    config = sampling_config(cfg, config)
    one = state_bytes(cfg, config.dtype, state_heads(cfg.delta, config))
    prompts = PREFILL_ROWS[-1]
    taken = max(prompts, -(-config.sample_slots // config.fsdp)) if on_cpu() else 2 * prompts
    return one * (state_count(cfg, config) + taken)


def state_bytes(cfg: ModelConfig, dtype: Any, heads: int | None = None) -> int:
    """What the states of one sequence take, in all layers. dtype: of activations. heads: of values; None = all."""
    if cfg.delta is None:
        return 0
    heads = cfg.delta.value_heads if heads is None else heads
    conv = (cfg.delta.taps - 1) * cfg.delta.channels * jnp.dtype(dtype).itemsize
    return len(cfg.numbers("delta")) * (4 * heads * cfg.delta.key_dim * cfg.delta.value_dim + conv)


def _host_bytes() -> int:
    """The memory of this machine for each device of the group: CPU devices share it."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.device_count()

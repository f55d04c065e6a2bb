"""`tinkerflow plan`: whether a base model fits a machine, what it could do there, and how fast at most.

It reads `config.json` alone, loads no weights and needs no accelerator. With `compile` it asks the accelerator's own
compiler, too, if that is installed.
"""

from __future__ import annotations

from dataclasses import replace

from tinkerflow.backend.catalog.model_card import context_of
from tinkerflow.backend.catalog.model_source import find_model
from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.families import parse_config
from tinkerflow.backend.compute.models.lora import check_spec
from tinkerflow.backend.compute.planning.device_bytes import step_weights, weight_bytes
from tinkerflow.backend.compute.planning.memory import GB, MemoryPlan, plan_memory, sampling_config
from tinkerflow.backend.compute.planning.roofline import (
    Estimate,
    Topology,
    decode_bound,
    parse_topology,
    training_bound,
)
from tinkerflow.backend.compute.planning.training_memory import adapter_bytes
from tinkerflow.backend.compute.platforms import compiling_for
from tinkerflow.backend.compute.weights.files import read_object
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.settings import Settings
from tinkerflow.backend.spec.commands import GroupConfig, LoraSpec
from tinkerflow.backend.spec.optimizers import DEFAULT_OPTIMIZER
from tinkerflow.backend.spec.ranks import expert_rank
from tinkerflow.flows.groups import group_config

CONFIG = "config.json"
_ROW = 1024  # tokens of the examples that training is estimated for


def describe_plan(settings: Settings, base_model: str, topology: str, *, rank: int, compiled: bool) -> str:
    """The plan in lines of text.

    settings: as the service would have them. base_model: as of `find_model`. topology: such as "v6e:2x4" or "h100:8".
    rank: of adapters. compiled: ask the accelerator's compiler.

    UserError names a device, a shape or a config that is not known, a mesh that does not fit the devices, a rank or a
    context out of range, and a model that does not fit.
    """
    target = parse_topology(topology)
    cfg = parse_config(read_object(find_model(base_model, [CONFIG]) / CONFIG, base_model), name=base_model)
    context = context_of(base_model, cfg, settings.max_context)
    config = _on_devices(group_config(settings, base_model, context), target)
    if config.kv_cache == "float8" and not target.device.float8:
        raise UserError(f"kv_cache is 'float8', and {target.device.name} does not compute with such numbers")
    if not rank:
        raise UserError("rank 0: must be 1 or more; the plan of any rank says what training all parameters takes")
    spec = check_spec(LoraSpec(rank, expert_rank=expert_rank(rank, cfg.experts_per_token, settings.expert_rank)))
    with compiling_for(target.device.platform):
        plan = plan_memory(cfg, config, int(config.device_memory * GB) or target.device.limit)
    assert plan.uses is not None  # an accelerator
    undivided = replace(config, fsdp=1, tensor=1, expert=1)
    training = training_bound(
        cfg,
        config,
        target.device,
        spec=spec,
        weights=weight_bytes(cfg, undivided),
        tokens=plan.budget.microbatch_tokens,
        kept=plan.uses.activations,
    )
    residents = plan.uses.adapters // adapter_bytes(cfg, config, spec, DEFAULT_OPTIMIZER)
    axes = f"fsdp {config.fsdp}, expert {config.expert}, tensor {config.tensor}"
    lines = [
        f"{base_model} on {target}, {target.count} device(s) of {target.device.memory / GB:.1f} GB: mesh {axes}",
        f"fits: {plan.describe()}",
        f"adapters of rank {rank} in training at the same time: {residents}",
        f"all parameters in training (rank 0): {_full(cfg, config, plan)}",
        f"training, examples of {_ROW} tokens: at most {_rate(training)}",
    ]
    for positions in sorted({min(_ROW, plan.context), plan.context}):
        slots = _slots(sampling_config(cfg, config), plan, positions)
        decode = decode_bound(
            cfg,
            config,
            target.device,
            weights=step_weights(cfg, undivided, slots),
            slots=slots,
            positions=positions,
            cell=plan.uses.kv_cache / plan.cells,
        )
        lines.append(f"decode, {decode.tokens} sequence(s) of {positions} tokens: at most {_rate(decode)}")
    lines.append("These rates are bounds: every operation at its peak, all at the same time. Expect about half.")
    if config.dtype == "float32":
        lines.append("The peaks are those of matmuls in bfloat16: in float32 expect several times less.")
    return "\n".join([*lines, *(_compiled(cfg, config, target, plan, rank) if compiled else ())])


def _slots(config: GroupConfig, plan: MemoryPlan, positions: int) -> int:
    """How many sequences of so many positions decode together."""
    return max(config.fsdp, min(config.sample_slots, plan.cells // positions))


def _on_devices(config: GroupConfig, target: Topology) -> GroupConfig:
    """The configuration with the mesh laid over all devices of `target`, as the workers lay it."""
    split = config.tensor * config.expert
    if target.count % split:
        raise UserError(
            f"topology {str(target)!r}: {target.count} devices; tensor_parallel {config.tensor} x expert_parallel "
            f"{config.expert} must divide them"
        )
    dtype = target.device.platform.dtype if config.dtype == "auto" else config.dtype
    return replace(config, fsdp=target.count // split, dtype=dtype)


def _full(cfg: ModelConfig, config: GroupConfig, plan: MemoryPlan) -> str:
    """Whether all parameters can be trained, and how much memory that takes."""
    needed = adapter_bytes(cfg, config, LoraSpec(0), DEFAULT_OPTIMIZER)
    does = "fits" if needed <= plan.full else "does not fit"
    sampled = "cannot be sampled" if plan.whole is None else f"sampled in {plan.whole.size / GB:.1f} GB more"
    return f"{does}: {needed / GB:.1f} GB of each device, of {plan.full / GB:.1f} GB for that; {sampled}"


def _rate(bound: Estimate) -> str:
    limits = {"flops": "matmuls", "memory": "memory bandwidth", "links": "links between devices"}
    return f"{bound.rate:,.0f} tokens/s, limited by {limits[bound.limit]}"


def _compiled(cfg: ModelConfig, config: GroupConfig, target: Topology, plan: MemoryPlan, rank: int) -> list[str]:
    """What the accelerator's compiler says about the programs of this plan."""
    # Imported here: it loads the compilers' plugins.
    from tinkerflow.backend.compute.planning.roofline_programs import Programs

    programs = Programs(cfg, str(target), rank, config.tensor, config.expert, config.kv_cache)
    rows = max(config.fsdp, plan.budget.microbatch_tokens // _ROW)
    each = plan.budget.microbatch_tokens // rows
    slots, chunk = _slots(sampling_config(cfg, config), plan, plan.context), config.decode_chunk
    made = {
        f"forward_backward of {rows}x{each} tokens": (programs.forward_backward(rows, each), rows * each),
        f"forward_backward of {config.fsdp}x{plan.context} tokens": (
            programs.forward_backward(config.fsdp, plan.context),
            config.fsdp * plan.context,
        ),
        f"decode, {slots} slots of {plan.context}": (
            programs.decode(slots, plan.context, chunk=chunk, unknown_trips=chunk),
            slots * chunk,
        ),
    }
    return [
        f"{name}, by the compiler: {figures.peak / GB:.1f} GB of each device, of it temporaries "
        f"{figures.temporaries / GB:.1f}; {figures.counts.flops / 1e12:.2f} TFLOP, {figures.counts.bytes / GB:.1f} GB "
        f"accessed; at most {tokens / figures.seconds:,.0f} tokens/s"
        for name, (figures, tokens) in made.items()
    ]

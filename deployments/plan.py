"""`tinkerflow plan`: whether a base model fits a machine, which batch and context it allows, and its highest speed.

It reads `config.json` alone, loads no weights and needs no accelerator. `python -m tests.accelerators.plan` of the
repository also compiles the programs of a plan with the accelerator's compiler.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tinkerflow.backend.catalog.model_card import context_of
from tinkerflow.backend.catalog.model_source import find_model
from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.families import parse_config
from tinkerflow.backend.compute.models.lora_weights import check_spec
from tinkerflow.backend.compute.planning.array_sizes import step_weights, weight_bytes
from tinkerflow.backend.compute.planning.memory_plan import GB, MemoryPlan, plan_memory, sampling_config
from tinkerflow.backend.compute.planning.roofline import Estimate, decode_bound, training_bound
from tinkerflow.backend.compute.planning.topologies import Topology, parse_topology
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
ROW = 1024  # tokens of the examples that training is estimated for


@dataclass(frozen=True)
class ServicePlan:
    """A base model on a topology.

    name: of the base model, as the user wrote it. cfg: the model. config: of its worker group, with the mesh laid out.
    target: the devices. spec: of the adapters. memory: the plan of each device's memory.
    """

    name: str
    cfg: ModelConfig
    config: GroupConfig
    target: Topology
    spec: LoraSpec
    memory: MemoryPlan

    def slots(self, positions: int) -> int:
        """How many sequences of so many positions are decoded together."""
        config = sampling_config(self.cfg, self.config)
        return max(config.fsdp, min(config.sample_slots, self.memory.cells // positions))


def plan_service(settings: Settings, base_model: str, topology: str, *, rank: int) -> ServicePlan:
    """The plan that a service with these settings would make.

    base_model: as of `find_model`. topology: such as "v6e:2x4" or "h100:8". rank: of adapters. UserError names an
    unknown device, shape or config, a wrong mesh, a rank or context out of range, or a model without room.
    """
    target = parse_topology(topology)
    cfg = parse_config(read_object(find_model(base_model, [CONFIG]) / CONFIG, base_model), name=base_model)
    context = context_of(base_model, cfg, settings.max_context)
    config = _on_devices(group_config(settings, base_model, context), target)
    if config.kv_cache == "float8" and not target.device.float8:
        raise UserError(f"kv_cache is 'float8', and {target.device.name} does not compute with such numbers")
    if not rank:
        raise UserError("rank 0: must be 1 or more; the plan of any rank includes training all parameters")
    spec = check_spec(LoraSpec(rank, expert_rank=expert_rank(rank, cfg.experts_per_token, settings.expert_rank)))
    with compiling_for(target.device.platform):
        memory = plan_memory(cfg, config, int(config.device_memory * GB) or target.device.limit)
    return ServicePlan(base_model, cfg, config, target, spec, memory)


def describe_plan(plan: ServicePlan) -> str:
    """The plan in lines of text: the sizes that fit, and upper bounds of the speed of training and decoding."""
    cfg, config, target, memory = plan.cfg, plan.config, plan.target, plan.memory
    assert memory.uses is not None  # an accelerator
    undivided = replace(config, fsdp=1, tensor=1, expert=1)
    training = training_bound(
        cfg,
        config,
        target.device,
        spec=plan.spec,
        weights=weight_bytes(cfg, undivided),
        tokens=memory.budget.microbatch_tokens,
        kept=memory.uses.activations,
    )
    residents = memory.uses.adapters // adapter_bytes(cfg, config, plan.spec, DEFAULT_OPTIMIZER)
    axes = f"fsdp {config.fsdp}, expert {config.expert}, tensor {config.tensor}"
    lines = [
        f"{plan.name} on {target}, {target.count} device(s) of {target.device.memory / GB:.1f} GB: mesh {axes}",
        f"fits: {memory.describe()}",
        f"adapters of rank {plan.spec.rank} in training at the same time: {residents}",
        f"all parameters in training (rank 0): {_full(cfg, config, memory)}",
        f"training, examples of {ROW} tokens: at most {_rate(training)}",
    ]
    for positions in sorted({min(ROW, memory.context), memory.context}):
        slots = plan.slots(positions)
        decode = decode_bound(
            cfg,
            config,
            target.device,
            weights=step_weights(cfg, undivided, slots),
            slots=slots,
            positions=positions,
            cell=memory.uses.kv_cache / memory.cells,
        )
        lines.append(f"decode, {decode.tokens} sequence(s) of {positions} tokens: at most {_rate(decode)}")
    lines.append("These rates are bounds: every operation at its peak, all at the same time. Expect about half.")
    if config.dtype == "float32":
        lines.append("The peaks are those of matmuls in bfloat16: in float32 expect several times less.")
    return "\n".join(lines)


def _on_devices(config: GroupConfig, target: Topology) -> GroupConfig:
    """The configuration with the mesh laid over all devices of `target`, as in the workers."""
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
    sampled = "cannot be sampled" if plan.full_model is None else f"sampled in {plan.full_model.size / GB:.1f} GB more"
    return f"{does}: {needed / GB:.1f} GB of each device, of {plan.full / GB:.1f} GB for that; {sampled}"


def _rate(bound: Estimate) -> str:
    limits = {"flops": "matmuls", "memory": "memory bandwidth", "links": "links between devices"}
    return f"{bound.rate:,.0f} tokens/s, limited by {limits[bound.limit]}"

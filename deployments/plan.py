"""`tinkerflow plan`: whether a base model fits a machine, which batch and context it allows, and its highest speed.

It reads only `config.json`, which this package includes for popular models. It loads no weights and needs no
accelerator. `python -m tests.accelerators.plan` in the repository also compiles the programs of a plan with the
accelerator's compiler.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tinkerflow.backend.catalog.known_models import known_models
from tinkerflow.backend.catalog.model_card import context_of
from tinkerflow.backend.catalog.model_source import find_model
from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.families import parse_config
from tinkerflow.backend.compute.models.lora_weights import check_spec
from tinkerflow.backend.compute.planning.array_sizes import row_devices, step_weights, weight_bytes
from tinkerflow.backend.compute.planning.memory_plan import GB, MemoryPlan, plan_memory, sampling_config
from tinkerflow.backend.compute.planning.roofline import Estimate, decode_bound, training_bound
from tinkerflow.backend.compute.planning.topologies import Topology, parse_topology
from tinkerflow.backend.compute.planning.training_memory import adapter_bytes, check_context_parallel
from tinkerflow.backend.compute.platforms import CUDA, TPU, TURING, compiling_for
from tinkerflow.backend.compute.weights.files import read_object
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.core.ids import hub_name
from tinkerflow.backend.core.suggest import did_you_mean
from tinkerflow.backend.settings import Settings
from tinkerflow.backend.spec.commands import GroupConfig, LoraSpec
from tinkerflow.backend.spec.optimizers import DEFAULT_OPTIMIZER
from tinkerflow.backend.spec.ranks import expert_rank
from tinkerflow.flows.groups import group_config

CONFIG = "config.json"
ROW = 1024  # tokens of an example in the training estimate
_WIDTH = 44  # width of the column with the kind of work
_WORTHWHILE = 1.2  # least gain of the training rate
_HOST_GPUS = 8


class DoesNotFitError(UserError):
    """The devices have too little memory for the base model."""


@dataclass(frozen=True)
class ServicePlan:
    """A base model on a topology.

    name: the base model's name, as the user wrote it. cfg: the model. config: its worker group's configuration, with
    the mesh laid out. target: the devices. spec: the adapters' shape. memory: the plan of each device's memory.
    """

    name: str
    cfg: ModelConfig
    config: GroupConfig
    target: Topology
    spec: LoraSpec
    memory: MemoryPlan

    def slots(self, positions: int) -> int:
        """How many sequences of `positions` positions are decoded together."""
        config = sampling_config(self.cfg, self.config)
        return max(config.fsdp, min(config.sample_slots, self.memory.cells // positions))


def plan_service(settings: Settings, base_model: str, topology: str, *, rank: int) -> ServicePlan:
    """The plan that a service with these settings would make.

    base_model: as for `find_model`. topology: such as "v6e:2x4" or "h100:8". rank: the adapters' rank. UserError: an
    unknown device, shape or config, a wrong mesh, or a rank or context out of range. DoesNotFitError: too little
    memory.
    """
    target = parse_topology(topology)
    cfg = parse_config(_config(base_model), name=base_model)
    context = context_of(base_model, cfg, settings.max_context)
    config = _on_devices(group_config(settings, base_model, context, experts=cfg.experts > 0), target)
    check_context_parallel(cfg, config, row_devices(config))
    if config.kv_cache == "float8" and not target.device.float8:
        raise UserError(f"kv_cache is 'float8', and {target.device.name} does not support that type")
    if not rank:
        raise UserError("rank 0: must be 1 or more; the plan of any rank includes training all parameters")
    spec = check_spec(LoraSpec(rank, expert_rank=expert_rank(rank, cfg.experts_per_token, settings.expert_rank)))
    with compiling_for(target.device.platform):
        try:
            memory = plan_memory(cfg, config, int(config.device_memory * GB) or target.device.limit)
        except UserError as error:
            raise DoesNotFitError(error.message) from error
    return ServicePlan(base_model, cfg, config, target, spec, memory)


def _config(base_model: str) -> Mapping[str, Any]:
    """The content of the model's config.json. UserError: it cannot be read."""
    if base_model in known_models() and not Path(base_model).is_dir():
        return known_models()[base_model][0]
    try:
        return read_object(find_model(base_model, [CONFIG]) / CONFIG, base_model)
    except UserError as error:
        near = "" if hub_name(base_model) is None else did_you_mean(base_model, known_models())
        raise UserError(f"{error.message}{near}") from error


def what_fits(settings: Settings, base_model: str, topology: str, *, rank: int) -> str:
    """A hint for a model that does not fit: an option with which it fits; "" if none was found."""
    for option, changed, place in _larger(settings, topology):
        try:
            plan_service(changed, base_model, place, rank=rank)
        except UserError:
            continue
        return f"; it fits with {option}"
    return ""


def _larger(settings: Settings, topology: str) -> Iterator[tuple[str, Settings, str]]:
    target = parse_topology(topology)
    for kind in ("mxfp4", "int8", "nf4"):  # mxfp4 is only for gpt-oss
        yield f"--base-weights {kind}", settings.model_copy(update={"base_weights": kind}), topology
    for count in (2, 4, 8):
        if target.device.platform.name == CUDA.name and len(target.shape) == 1 and count > target.count:
            place = f"{target.device.name}:{count}"
            yield f"--for {place}", settings, place
            if settings.base_weights != "nf4":
                smaller = settings.model_copy(update={"base_weights": "nf4"})
                yield f"--base-weights nf4 --for {place}", smaller, place


def command_of(plan: ServicePlan, settings: Settings) -> str:
    """The command that serves the base model as planned. For GPUs on several hosts: the command of the first host."""
    planned = ("max_context", "base_weights", "tensor_parallel", "expert_parallel", "context_parallel")
    changed = [name for name in planned if getattr(settings, name) != Settings.model_fields[name].default]
    words = [f"TINKERFLOW_{name.upper()}={getattr(settings, name)}" for name in changed]
    words += ["tinkerflow", "up", "--base-model", shlex.quote(plan.name)]
    if hosts := _hosts(plan.target):
        words += ["--processes", str(hosts), "--group", "ADDRESS:7000"]
    return " ".join(words)


def _hosts(target: Topology) -> int:
    """The number of hosts with GPUs; 0 for a single host, and for TPUs, since their shapes do not name hosts."""
    several = target.device.platform is not TPU and len(target.shape) == 2 and target.shape[0] > 1
    return target.shape[0] if several else 0


def about_hosts(target: Topology) -> list[str]:
    """Lines about GPUs on several hosts: the command of the other hosts, and a limit of the plan."""
    if _hosts(target):
        return [
            "and on each host: tinkerflow worker --group ADDRESS:7000 --secret-file group.secret "
            "(docs/many-hosts.md); ADDRESS is that of the first host",
            "Links between hosts count as local links. The network is often slower, and so are the rates above.",
        ]
    if target.device.platform is not TPU and target.count > _HOST_GPUS:
        return [f"{target} is one host. Most hosts have at most {_HOST_GPUS} GPUs: {target.device.name}:2x8 is two."]
    return []


def with_expert_axis(plan: ServicePlan, settings: Settings) -> str:
    """A line about placing whole experts on each device of a host, if this trains faster; else ""."""
    size = math.gcd(plan.cfg.experts, plan.target.shape[-1] // plan.config.tensor)
    if plan.config.expert > 1 or size < 2:
        return ""
    changed = settings.model_copy(update={"expert_parallel": size})
    try:
        other = plan_service(changed, plan.name, str(plan.target), rank=plan.spec.rank)
    except UserError:
        return ""
    before, after = _training(plan).rate, _training(other).rate
    if after < _WORTHWHILE * before:
        return ""
    length = min(ROW, plan.memory.context, other.memory.context)
    decodes = f"{_decode(other, length).rate:,.0f} tokens/s instead of {_decode(plan, length).rate:,.0f}"
    positions = f"{other.memory.cells} positions to sample in instead of {plan.memory.cells}"
    training = f"{after:,.0f} tokens/s instead of {before:,.0f}"
    return f"with --expert-parallel {size}: training at most {training}, decode at most {decodes}, {positions}"


def describe_plan(plan: ServicePlan, price: float = 0.0) -> str:
    """The plan in lines of text: a verdict, the sizes that fit, and upper bounds of the speed.

    price: US dollars per hour for all devices, to show the cost of tokens; 0 = unknown.
    """
    cfg, config, target, memory = plan.cfg, plan.config, plan.target, plan.memory
    assert memory.uses is not None  # the target is an accelerator
    residents = memory.uses.adapters // adapter_bytes(cfg, config, plan.spec, DEFAULT_OPTIMIZER)
    axes = f"fsdp {config.fsdp}, expert {config.expert}, tensor {config.tensor}"
    lines = [
        f"yes: {plan.name} fits, with sequences of up to {memory.context} tokens",
        f"{plan.name} on {target}, {target.count} device(s) of {target.device.memory / GB:.1f} GB: mesh {axes}",
        f"fits: {memory.describe()}",
        f"adapters of rank {plan.spec.rank} in training at the same time: {residents}",
        f"all parameters in training (rank 0): {_full(cfg, config, memory)}",
        f"{f'training, examples of {ROW} tokens:':<{_WIDTH}}{_rate(_training(plan), price)}",
    ]
    for positions in sorted({min(ROW, memory.context), memory.context}):
        decode = _decode(plan, positions)
        work = f"decode, {decode.tokens} sequence(s) of {positions} tokens:"
        lines.append(f"{work:<{_WIDTH}}{_rate(decode, price)}")
    lines.append("At most: every operation at its peak, all at the same time. Expect: our estimate for dense models.")
    if cfg.experts:
        lines.append("A mixture of experts may be slower than this estimate.")
    lines.append("No rate was measured: no GPU or TPU has run Tinkerflow yet.")
    if price:
        lines.append(f"The costs are those of the rates to expect, at {price:g} US dollars an hour for all devices.")
    if config.dtype == "float32":
        lines.append("The peaks are those of matmuls in bfloat16: in float32 expect several times less.")
    return "\n".join(lines)


def _computes_in_halves(plan: ServicePlan) -> bool:
    """Whether a step writes and reads the matrices in float16."""
    return plan.target.device.platform is TURING and plan.config.dtype == "bfloat16"


def _training(plan: ServicePlan) -> Estimate:
    assert plan.memory.uses is not None
    return training_bound(
        plan.cfg,
        plan.config,
        plan.target.device,
        spec=plan.spec,
        weights=weight_bytes(plan.cfg, replace(plan.config, fsdp=1, tensor=1, expert=1)),
        tokens=plan.memory.budget.microbatch_tokens,
        kept=plan.memory.uses.activations,
    )


def _decode(plan: ServicePlan, positions: int) -> Estimate:
    """The bound of a decode step for sequences of `positions` positions."""
    assert plan.memory.uses is not None
    undivided = replace(plan.config, fsdp=1, tensor=1, expert=1)
    slots, weights = plan.slots(positions), 0.0
    if _computes_in_halves(plan):
        weights = 2 * weight_bytes(plan.cfg, replace(undivided, base_weights="full"))
    return decode_bound(
        plan.cfg,
        plan.config,
        plan.target.device,
        weights=step_weights(plan.cfg, undivided, slots) + weights,
        slots=slots,
        positions=positions,
        cell=plan.memory.uses.kv_cache / plan.memory.cells,
    )


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
    left = f"{plan.full / GB:.1f} GB are left" if plan.full > 0 else "none are left next to the base model"
    facts = f"it needs {needed / GB:.1f} GB of each device, and {left}"
    if needed > plan.full:
        return f"does not fit: {facts}"
    sampled = "cannot be sampled" if plan.full_model is None else f"sampled in {plan.full_model.size / GB:.1f} GB more"
    return f"fits: {facts}; {sampled}"


def _rate(bound: Estimate, price: float) -> str:
    limits = {"flops": "matmuls", "memory": "memory bandwidth", "links": "links between devices"}
    low, high = bound.expected
    most, least = (price / (rate * 3600) * 1e6 for rate in (low, high))
    cost = f"; ${least:.3g} to ${most:.3g} for a million tokens" if price else ""
    bounded = f"at most {bound.rate:,.0f} tokens/s, limited by {limits[bound.limit]}"
    return f"{bounded}; expect {low:,.0f} to {high:,.0f}{cost}"

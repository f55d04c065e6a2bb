"""A base model that is served: its card, its worker group, and how that group is set up."""

from __future__ import annotations

from dataclasses import dataclass

from tinkerflow.backend.commands import GroupConfig
from tinkerflow.backend.errors import UserError
from tinkerflow.backend.model_card import ModelCard
from tinkerflow.backend.pool import Pool
from tinkerflow.backend.settings import Settings
from tinkerflow.flows.sampling_runner import SamplingRunner
from tinkerflow.tasks.execution.context import ExecutionContext


@dataclass(frozen=True)
class ServedModel:
    """A base model with its worker group, and the lane of its samples."""

    card: ModelCard
    context: ExecutionContext
    pool: Pool
    sampling: SamplingRunner


def group_config(settings: Settings, card: ModelCard) -> GroupConfig:
    """What every process of the group for `card` is told.

    The mesh has one device per process, or `tensor_parallel` * `expert_parallel` of them if there are fewer processes.
    UserError when that product does not divide it.
    """
    split = settings.tensor_parallel * settings.expert_parallel
    devices = max(settings.processes, split)
    if devices % split or devices % settings.processes:
        raise UserError(
            f"processes is {settings.processes} and tensor_parallel is {settings.tensor_parallel} (times "
            f"expert_parallel {settings.expert_parallel}): one must be a multiple of the other"
        )
    return GroupConfig(
        model_path=card.path,
        dtype=settings.dtype,
        fsdp=devices // split,
        tensor=settings.tensor_parallel,
        max_context=card.max_context,
        microbatch_tokens=settings.microbatch_tokens,
        sample_slots=settings.sample_slots,
        decode_chunk=settings.decode_chunk,
        compile_cache_dir=str(settings.compile_cache),
        base_weights=settings.base_weights,
        warm_up=settings.warm_up,
        expert=settings.expert_parallel,
        resident_snapshots=settings.resident_snapshots,
    )

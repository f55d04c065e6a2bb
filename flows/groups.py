"""A served base model: its card, its worker group, and the configuration of the group."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from tinkerflow.backend.catalog.model_card import ModelCard
from tinkerflow.backend.pool import Pool
from tinkerflow.backend.settings import Settings
from tinkerflow.backend.spec.commands import GroupConfig
from tinkerflow.flows.sampling_runner import SamplingRunner
from tinkerflow.tasks.execution.operation import ExecutionContext


@dataclass(frozen=True)
class ServedModel:
    """A base model with its worker group, and the runner of its samples."""

    card: ModelCard
    context: ExecutionContext
    pool: Pool
    sampling: SamplingRunner


def group_config(
    settings: Settings, model_path: str, max_context: int, store_mark: str = "", *, experts: bool
) -> GroupConfig:
    """The configuration for every process of a group. model_path: the base model's folder.

    max_context: in tokens. store_mark: the store's mark (`Store.mark`); "" = the processes do not access the store.
    experts: whether the model has experts. If not, the size of the expert axis is 1.

    A field with the name of a setting holds that setting. The processes lay the mesh over the devices that they find.
    """
    names = {field.name for field in fields(GroupConfig)}
    values: dict[str, Any] = {name: getattr(settings, name) for name in Settings.model_fields if name in names}
    values |= {
        "model_path": model_path,
        "max_context": max_context,
        "fsdp": 0,
        "tensor": settings.tensor_parallel,
        "expert": settings.expert_parallel if experts else 1,
        "compile_cache_dir": str(settings.compile_cache),
        "store_url": settings.store_url if store_mark else "",
        "store_mark": store_mark,
    }
    return GroupConfig(**values)

"""The devices' memory for adapters: how much of it each adapter takes, and whether another adapter fits."""

from __future__ import annotations

import math

from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.lora_weights import check_spec
from tinkerflow.backend.compute.planning.memory_plan import GB, MemoryPlan
from tinkerflow.backend.compute.planning.training_memory import adapter_bytes
from tinkerflow.backend.compute.training import full_parameters
from tinkerflow.backend.core.errors import AllocationError, UserError
from tinkerflow.backend.spec.commands import GroupConfig, LoraSpec, Optimizer


class AdapterQuota:
    """The bytes of each device, by adapter.

    Only the sum is limited. So adapters that existed at the same time fit again, in whatever order a restored group
    creates them.
    """

    def __init__(self, cfg: ModelConfig, config: GroupConfig, plan: MemoryPlan) -> None:
        """Start with no adapters. cfg: the base model's config. config, plan: the group's."""
        self._cfg = cfg
        self._config = config
        self._plan = plan
        self._taken: dict[str, tuple[int, bool]] = {}  # bytes, and whether the adapter trains all parameters

    def check(self, adapter_id: str, spec: LoraSpec, optimizer: Optimizer) -> None:
        """Check that an adapter fits together with the others. An adapter with the same id counts as replaced.

        AllocationError: the adapter does not fit. UserError: training all parameters would not fit even alone, or
        `spec` or `optimizer` is invalid.
        """
        if check_spec(spec).full:
            full_parameters.check_optimizer(optimizer)
        needed = self._bytes_of(spec, optimizer)
        others = [taken for name, taken in self._taken.items() if name != adapter_id]
        quota = math.inf if self._plan.uses is None else self._plan.uses.adapters
        free = quota - sum(size for size, _ in others)
        of_full = sum(size for size, is_full in others if is_full)
        what, of, less = "the adapter", "adapters", "a smaller rank"
        if spec.full:
            quota, free = self._plan.full, min(free, self._plan.full - of_full)
            what, of, less = "training all parameters", "that", "1 or more"
        takes = f"lora rank {spec.rank}: {what} takes {needed / GB:.3g} GB of each device"
        if spec.full and needed > quota:  # waiting cannot help
            raise UserError(f"{takes}, and this group has {quota / GB:.3g} GB for that: must be {less}")
        if needed > free:
            used_by_full = f" (models that train all parameters take {of_full / GB:.3g} GB of it)" if of_full else ""
            raise AllocationError(
                f"{takes} with its gradients and optimizer state, and {max(0, free) / GB:.3g} GB are free of the "
                f"{quota / GB:.3g} GB for {of}{used_by_full}: must be {less}, or fewer models at the same time"
            )

    def count(self, adapter_id: str, spec: LoraSpec, optimizer: Optimizer) -> None:
        """Count an adapter that was created."""
        self._taken[adapter_id] = self._bytes_of(spec, optimizer), spec.full

    def release(self, adapter_id: str) -> None:
        """Stop counting an adapter."""
        self._taken.pop(adapter_id, None)

    def clear(self) -> None:
        """Stop counting all adapters."""
        self._taken.clear()

    def _bytes_of(self, spec: LoraSpec, optimizer: Optimizer) -> int:
        return adapter_bytes(self._cfg, self._config, spec, optimizer)

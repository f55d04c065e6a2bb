"""The unigram model, with gradients that JAX sums over all devices of the group."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy_executor import GRAD, Unigram

from tinkerflow.backend.spec.commands import Forward, ForwardResult, GroupConfig


class Joint(Unigram):
    """A Unigram whose gradients need all processes of the group."""

    uses_jax = True

    def __init__(self, config: GroupConfig, progress: Callable[[str], None], processes: int, rank: int) -> None:
        import jax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        super().__init__(config, progress, processes, rank)
        spec: Callable[..., PartitionSpec] = PartitionSpec
        mesh = Mesh(np.array(jax.devices()), ("fsdp",))
        self.devices = tuple(str(device) for device in jax.devices())
        self.split = NamedSharding(mesh, spec("fsdp"))
        self.sum = jax.jit(lambda shares_DV: shares_DV.sum(0), out_shardings=NamedSharding(mesh, spec()))

    def forward(self, command: Forward) -> ForwardResult:
        result = super().forward(command)
        if command.backward:
            state = self.adapters[command.adapter_id]
            total_V = self.reduce(state.moments[GRAD][:, 0])
            self.adapters[command.adapter_id] = state.copy_with(moments={**state.moments, GRAD: total_V[:, None]})
        return result

    def reduce(self, total_V: np.ndarray) -> np.ndarray:
        """Sum `total_V` over all devices, each of which contributes only its own entries."""
        import jax

        count = len(self.devices)
        shares_DV = np.zeros((count, len(total_V)), np.float32)
        for device in range(count):
            shares_DV[device, device::count] = total_V[device::count]
        made = jax.make_array_from_callback(shares_DV.shape, self.split, lambda index: shares_DV[index])
        return np.array(self.sum(made))

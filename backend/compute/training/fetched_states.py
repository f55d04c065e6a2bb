"""The tensors of stored states that this process has read, but that no command has used yet."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from jax.sharding import Mesh

from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.training.adapter_shards import GRADIENTS, are_shards, needed_shards
from tinkerflow.backend.compute.training.adapters import forget
from tinkerflow.backend.core.errors import ServerError
from tinkerflow.backend.spec.commands import AdapterState, FetchState, Float32, StoredState
from tinkerflow.backend.spec.optimizers import OPTIMIZERS


class FetchedStates:
    """Tensors by owner (an adapter or a snapshot) and folder of the store. Thread-safe, except for `take`."""

    def __init__(self, cfg: ModelConfig, mesh: Mesh) -> None:
        """Start empty. cfg: the base model's config. mesh: the group's mesh."""
        self._cfg = cfg
        self._mesh = mesh
        self._tensors: dict[tuple[str, str], Mapping[str, Float32]] = {}

    def needed_tensors(self, state: StoredState, shapes: Mapping[str, tuple[int, ...]]) -> Collection[str]:
        """The names of the stored tensors that this process needs. shapes: of all stored tensors."""
        return needed_shards(self._cfg, self._mesh, state.spec, shapes) if are_shards(shapes) else list(shapes)

    def keep(self, fetch: FetchState, tensors: Mapping[str, Float32]) -> None:
        """Keep the tensors until `take`."""
        self._tensors[fetch.owner, fetch.state.folder] = tensors

    def take(self, owner: str, state: AdapterState | StoredState) -> AdapterState:
        """The state with its tensors, from the command itself or as read before. ServerError: they were not read."""
        tensors = self._tensors.pop((owner, state.folder), None) if isinstance(state, StoredState) else None
        self.forget(owner)  # tensors that came too late for an earlier command
        if isinstance(state, AdapterState):
            return state
        if tensors is None:
            raise ServerError(f"the state of {owner!r} in {state.folder} was not fetched")
        sharded = are_shards(tensors)
        parts = tuple(f".{part}" for part in (*OPTIMIZERS[state.optimizer].state, GRADIENTS))
        weights = {name: array for name, array in tensors.items() if sharded or not name.endswith(parts)}
        moments = {name: array for name, array in tensors.items() if name not in weights}
        return AdapterState(state.spec, state.step, weights, moments, state.optimizer)

    def forget(self, owner: str) -> None:
        """Drop the tensors of this owner."""
        forget(self._tensors, owner)

    def clear(self) -> None:
        """Drop all tensors."""
        self._tensors.clear()

"""The adapters of a worker group: weights, gradients and moments on the devices, by id, and copies on the host.

A model that trains all parameters is stored like an adapter, with a `Params` instead of a `Lora` (`trained.Trained`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from tinkerflow.backend.compute.mesh import put, to_host, whole_to_host
from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.lora import Lora
from tinkerflow.backend.compute.models.lora_weights import (
    check_spec,
    from_peft,
    from_shared_scale,
    init_lora,
    to_peft,
    to_shared_scale,
)
from tinkerflow.backend.compute.training import full_parameters
from tinkerflow.backend.compute.training.adapter_shards import (
    GRADIENTS,
    WEIGHTS,
    are_shards,
    assemble_shards,
    shards_of,
)
from tinkerflow.backend.compute.training.optimizer import OptimizerState
from tinkerflow.backend.compute.training.trained import Trained, trained_shardings
from tinkerflow.backend.core.errors import OUT_OF_MEMORY, DevicesError, NotFoundError, ServerError, UserError
from tinkerflow.backend.spec.commands import AdapterKept, AdapterState, Float32, LoraSpec, Optimizer
from tinkerflow.backend.spec.optimizers import OPTIMIZERS

Tree = TypeVar("Tree")
T = TypeVar("T")


@dataclass
class PendingGradients:
    """Gradients that the devices may still be computing, or may fail to compute for lack of memory.

    before: the gradients before this computation, which are restored if it fails. None = zeros, or the reply was read,
    so the computation has succeeded.
    """

    before: Trained | None


@dataclass(frozen=True)
class Adapter:
    """One adapter on the devices.

    steps_before: optimizer steps made before the last one. last_norm: the last step's gradient norm, a device array
    that may still be computing; None = no step to wait for. pending: whether gradients wait for the next optimizer
    step. computing: the gradients until `AdapterStore.get` has waited for them, then None.
    """

    spec: LoraSpec
    lora: Trained
    grads: Trained
    state: OptimizerState
    steps_before: int = 0
    last_norm: jax.Array | None = None
    pending: bool = False
    computing: PendingGradients | None = None

    @property
    def step(self) -> int:
        """The number of steps. Waits for the last step, which does not count if its gradient norm is not finite."""
        return self.steps_before + int(self.last_norm is not None and np.isfinite(to_host(self.last_norm)))

    @property
    def parts(self) -> dict[str, Trained]:
        """The parts of a snapshot: weights, the optimizer's state, and gradients if they are pending."""
        return {WEIGHTS: self.lora, **self.state.parts, **({GRADIENTS: self.grads} if self.pending else {})}

    @property
    def optimizer(self) -> Optimizer:
        """The name of the adapter's optimizer."""
        return self.state.name


class AdapterStore:
    """Adapters by id, each shaped by its own rank and targets. An `Adapter` is immutable: a step stores a new one."""

    def __init__(self, cfg: ModelConfig, mesh: Mesh, folder: str) -> None:
        """Start with no adapters. folder: the base model's files."""
        self._cfg = cfg
        self._mesh = mesh
        self._folder = folder
        self._adapters: dict[str, Adapter] = {}
        self._kept: dict[tuple[str, str], dict[str, Float32]] = {}  # shards, by adapter and folder of the store

    def get(self, adapter_id: str) -> Adapter:
        """Return the adapter after its gradients are computed. NotFoundError: the id is unknown."""
        if adapter_id not in self._adapters:
            raise NotFoundError(
                f"adapter {adapter_id!r} is not in this worker group: it was never created, or it was dropped"
            )
        adapter = self._adapters[adapter_id]
        if adapter.computing is not None:
            before = adapter.computing.before
            adapter = replace(adapter, computing=None)
            if not _are_computed(adapter.grads):
                adapter = replace(adapter, grads=before or self._zeros_of(adapter.lora), pending=before is not None)
        elif not adapter.pending and any(leaf.is_deleted() for leaf in jax.tree.leaves(adapter.grads)):
            adapter = replace(adapter, grads=self._zeros_of(adapter.lora))  # donated to a pass that failed
        self.set(adapter_id, adapter)
        return adapter

    def set(self, adapter_id: str, adapter: Adapter) -> None:
        """Store an adapter under this id."""
        self._adapters[adapter_id] = adapter

    @property
    def shapes(self) -> frozenset[LoraSpec]:
        return frozenset(adapter.spec for adapter in self._adapters.values())

    def drop(self, adapter_id: str) -> None:
        """Forget the adapter and its kept copies, if it exists."""
        self._adapters.pop(adapter_id, None)
        forget(self._kept, adapter_id)

    def clear(self) -> None:
        """Forget all adapters."""
        self._adapters.clear()
        self._kept.clear()

    def create(self, adapter_id: str, spec: LoraSpec, seed: int, optimizer: Optimizer) -> None:
        """Store a fresh adapter, whose update is zero. Rank 0: a copy of the base model's weights."""
        if check_spec(spec).full:
            lora: Trained = full_parameters.load_weights(self._cfg, self._folder, self._mesh)
        else:
            lora = self._put(init_lora(self._cfg, spec, seed))
        self.set(adapter_id, self._fresh(spec, lora, optimizer))

    def clear_gradients(self, adapter_id: str) -> None:
        """Set the adapter's gradients to zero, even if their buffers were donated to a step that failed."""
        adapter = self.get(adapter_id)
        self.set(adapter_id, replace(adapter, grads=self._zeros_of(adapter.lora), pending=False))

    def export(self, adapter_id: str, *, optimizer: bool) -> AdapterState:
        """Copy the adapter to the host. optimizer: include the moments, and the gradients if they are pending."""
        adapter = self.get(adapter_id)
        host = whole_to_host(self._mesh, adapter.parts if optimizer else {WEIGHTS: adapter.lora})
        if isinstance(lora := host[WEIGHTS], Lora):
            host[WEIGHTS] = to_shared_scale(adapter.spec, lora)
        named = {part: self._named(trained) for part, trained in host.items()}
        weights = named.pop(WEIGHTS)
        moments = {f"{name}.{part}": array for part, arrays in named.items() for name, array in arrays.items()}
        return AdapterState(adapter.spec, adapter.step, weights, moments, adapter.optimizer)

    def keep(self, adapter_id: str, folder: str) -> AdapterKept:
        """Copy this process's shards of all parts to the host, for `take_kept` with the same folder."""
        adapter = self.get(adapter_id)
        forget(self._kept, adapter_id)
        self._kept[adapter_id, folder] = shards_of(adapter.parts)
        return AdapterKept(adapter.spec, adapter.step, adapter.optimizer)

    def take_kept(self, adapter_id: str, folder: str) -> dict[str, Float32]:
        """Remove and return the shards that `keep` copied for this folder. ServerError: there are none."""
        shards = self._kept.pop((adapter_id, folder), None)
        if shards is None:
            raise ServerError(f"adapter {adapter_id!r}: this process has no copy for {folder}")
        return shards

    def restore(self, adapter_id: str, state: AdapterState) -> None:
        """Store a saved adapter: the inverse of `export`.

        UserError: a tensor is missing, unknown or of the wrong shape. Without moments the optimizer starts at step 0,
        so `step` always matches AdamW's bias correction.
        """
        if are_shards(state.weights):
            self.set(adapter_id, self._from_shards(state))
            return
        lora = self._put(self.weights_of(state))
        if not state.moments:
            self.set(adapter_id, self._fresh(state.spec, lora, state.optimizer))
            return
        names = OPTIMIZERS[state.optimizer].state
        _refuse_others(state, names)
        trees = {name: self._put(self._read(state.spec, state.moments, f".{name}")) for name in names}
        pending = any(name.endswith(".grad") for name in state.moments)
        grads = self._put(self._read(state.spec, state.moments, ".grad")) if pending else None
        self.set(adapter_id, self._restored(state, lora, trees, grads))

    def weights_of(self, state: AdapterState) -> Trained:
        """The weights of a saved state, on the host. UserError unless they fit this model and the state's spec."""
        weights = self._read(check_spec(state.spec), state.weights, "")
        return from_shared_scale(state.spec, weights) if isinstance(weights, Lora) else weights

    def _from_shards(self, state: AdapterState) -> Adapter:
        spec, parts = check_spec(state.spec), [WEIGHTS, *OPTIMIZERS[state.optimizer].state]
        pending = any(name.startswith(f"{GRADIENTS}/") for name in state.weights)
        arrays = assemble_shards(self._cfg, self._mesh, spec, state.weights, [*parts, GRADIENTS] if pending else parts)
        lora, grads = arrays.pop(WEIGHTS), arrays.pop(GRADIENTS, None)
        return self._restored(state, lora, arrays, grads)

    def _restored(
        self, state: AdapterState, lora: Trained, parts: dict[str, Trained], grads: Trained | None
    ) -> Adapter:
        """The adapter of a saved state whose tensors are on the devices. grads: None = none were pending."""
        optimizer = OptimizerState(self._put(np.array(state.step, np.int32)), parts, state.optimizer)
        zeros_or_saved = self._zeros_of(lora) if grads is None else grads
        return Adapter(state.spec, lora, zeros_or_saved, optimizer, steps_before=state.step, pending=grads is not None)

    def _read(self, spec: LoraSpec, tensors: Mapping[str, Float32], end: str) -> Trained:
        """The arrays of the tensors whose names end with `end`. UserError as in `restore`."""
        used: set[str] = set()

        def read(name: str, shape: tuple[int, ...]) -> Float32:
            array = tensors.get(name + end)
            if array is None or array.shape != shape:
                fact = "is missing" if array is None else f"has shape {array.shape}"
                rule = f"this base model and rank {spec.rank} need {shape}"
                raise UserError(f"saved tensor {name + end!r} {fact}; {rule}")
            used.add(name + end)
            return np.asarray(array, np.float32)

        if spec.full:
            trained: Trained = full_parameters.from_files(self._cfg, self._mesh, read)
        else:
            trained = from_peft(self._cfg, spec, read)
        ends = end or ("" if spec.full else ".weight")
        unknown = sorted(name for name in tensors if name.endswith(ends) and name not in used)
        if unknown:
            raise UserError(f"saved tensor {unknown[0]!r} is not part of an adapter of {spec}")
        return trained

    def _named(self, trained: Trained) -> dict[str, Float32]:
        return (
            to_peft(self._cfg, trained) if isinstance(trained, Lora) else full_parameters.to_files(self._cfg, trained)
        )

    def _zeros_of(self, lora: Trained) -> Trained:
        if isinstance(lora, Lora):
            return self._put(jax.tree.map(_zeros, lora))
        return full_parameters.zero_gradients(self._cfg, self._mesh)

    def _fresh(self, spec: LoraSpec, lora: Trained, optimizer: Optimizer) -> Adapter:
        parts = {name: self._zeros_of(lora) for name in OPTIMIZERS[optimizer].state}
        state = OptimizerState(self._put(np.zeros((), np.int32)), parts, optimizer)
        return Adapter(spec=spec, lora=lora, grads=self._zeros_of(lora), state=state)

    def _put(self, tree: Tree) -> Tree:
        return put(tree, trained_shardings(self._cfg, self._mesh, tree))


def forget(tensors: dict[tuple[str, str], T], owner: str) -> None:
    """Drop the entries of `owner`, in any folder. Other threads may add or remove entries at the same time."""
    for key in list(tensors):
        if key[0] == owner:
            tensors.pop(key, None)


def _refuse_others(state: AdapterState, names: Sequence[str]) -> None:
    """Raise UserError for a tensor of another optimizer's state."""
    for name in sorted(state.moments):
        if not name.endswith(tuple(f".{part}" for part in (*names, "grad"))):
            raise UserError(f"saved tensor {name!r} does not belong to {state.optimizer}, the optimizer of this model")


def _are_computed(grads: Trained) -> bool:
    """Wait for gradients. False if the devices ran out of memory. DevicesError: computing failed for another reason."""
    try:
        jax.block_until_ready(grads)
    except Exception as error:
        if OUT_OF_MEMORY in str(error):
            return False
        raise DevicesError(f"computing gradients failed on the devices ({type(error).__name__}: {error})") from error
    return True


def _zeros(like: jax.Array | Float32) -> Float32:
    return np.zeros(like.shape, np.float32)

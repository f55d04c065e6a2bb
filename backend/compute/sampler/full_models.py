"""Sampling from models with all parameters trained, in addition to the base model and adapters.

Such a model has its own weights, so a batch cannot contain rows of several models. A second sampler, with its own KV
cache, holds the weights of one snapshot at a time. The other snapshots are on the host, in the dtype of the base
weights.

Requests wait in one queue, which projects share fairly by sequences (`FairQueue`). Requests for the weights on the
devices join the batch when it has a free slot, as long as no request waits for other weights. Otherwise the batch ends,
and the weights of the first request in the queue are loaded. A project waits for at most one batch of each other
project, however many requests they have. Each step of the group's sampler is a step of both samplers.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh

from tinkerflow.backend.compute.mesh import put, replicated, to_host
from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.transformer import Params
from tinkerflow.backend.compute.sampler.sampler import Sampler
from tinkerflow.backend.compute.training import full_parameters
from tinkerflow.backend.compute.training.trained import Trained
from tinkerflow.backend.core.errors import ConflictError, NotFoundError, UserError
from tinkerflow.backend.core.fairness import FairQueue
from tinkerflow.backend.spec.commands import (
    LoraSpec,
    SampleProgress,
    SampleRequest,
    SampleResult,
    SampleStep,
    SnapshotHeld,
)
from tinkerflow.backend.spec.ranks import NOT_SAMPLED

log = logging.getLogger(__name__)

_Shards = list[tuple[jax.Device, npt.NDArray[Any]]]  # the parts of an array on the devices of this process


@dataclass(eq=False)
class _HostWeights:
    """The weights of one snapshot on the host: the arrays of a `Params`, in order, and their optimizer steps."""

    arrays: list[_Shards]
    step: int

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for shards in self.arrays for _, part in shards)


@dataclass(eq=False)
class _Waiting:
    request: SampleRequest
    weights: _HostWeights


class FullModelSampler:
    """Snapshots of full models by id, the queue, and the sampler. All processes must make the same calls."""

    def __init__(self, cfg: ModelConfig, mesh: Mesh, base: Params, make: Callable[[Params], Sampler] | None) -> None:
        """Start without snapshots.

        cfg, mesh: the model's shape and its devices. base: the base model's weights, which determine the dtype and
        contain the weights that are never trained. make: makes a sampler of a model with other weights; None: the
        devices have no memory for a second sampler.
        """
        self._cfg, self._mesh, self._base, self._make = cfg, mesh, base, make
        self._snapshots: dict[str, _HostWeights] = {}
        self._queue: FairQueue[_Waiting] = FairQueue()
        self._sampler: Sampler | None = None
        self._weights: _HostWeights | None = None  # on the devices
        self._busy = False
        self._failed: list[SampleResult] = []

    def publish(self, snapshot_id: str, weights: Params, step: int = 0) -> None:
        """Keep a copy of float32 weights (on the devices or the host), after `step` optimizer steps.

        ConflictError: the id is used. UserError: a weight is not finite, or the group has no memory to sample.
        """
        if self._make is None:
            raise UserError(NOT_SAMPLED)
        if snapshot_id in self._snapshots:
            raise ConflictError(f"snapshot {snapshot_id!r} exists already; a snapshot never changes")
        copies: list[_Shards] = []
        trained, dtype = full_parameters.weights_like(self._cfg, self._mesh), self._base.embed_VD.dtype
        computed = jax.eval_shape(lambda tree: full_parameters.cast_weights(self._cfg, dtype, tree), trained)
        each = (jax.tree.leaves(tree) for tree in (weights, trained, computed))
        for array, like, kept in zip(*each, strict=True):
            placed = array if isinstance(array, jax.Array) else put(array, like.sharding)
            copy, finite = _frozen(like.sharding, kept.dtype, placed)  # one by one, because all would not fit there
            if not bool(to_host(finite)):
                raise UserError(
                    f"snapshot {snapshot_id!r}: a weight of its model is not finite; snapshots must be finite"
                )
            copies.append([(shard.device, np.asarray(shard.data)) for shard in copy.addressable_shards])
        self._snapshots[snapshot_id] = _HostWeights(copies, step)

    def has_snapshot(self, snapshot_id: str | None) -> bool:
        return snapshot_id in self._snapshots

    def snapshot_host_bytes(self, snapshot_id: str) -> int:
        return self._snapshots[snapshot_id].nbytes

    def rename_snapshot(self, snapshot_id: str, to_id: str) -> None:
        """Rename a snapshot, replacing any snapshot `to_id`. Requests for the old `to_id` continue with this one.

        Requests in the batch begin again with the tokens that they have. NotFoundError: there is no snapshot to rename.
        """
        if snapshot_id not in self._snapshots:
            raise NotFoundError(f"snapshot {snapshot_id!r} is not loaded; publish or load it first")
        new, old = self._snapshots.pop(snapshot_id), self._snapshots.get(to_id)
        self._snapshots[to_id] = new
        if old is not None:
            for ticket in self._queue:
                ticket.item.weights = new if ticket.item.weights is old else ticket.item.weights
            if self._weights is old and self._busy:
                self._load(new)

    def drop_snapshot(self, snapshot_id: str) -> None:
        """Forget a snapshot. Earlier requests for it finish. Unknown ids are ignored."""
        self._snapshots.pop(snapshot_id, None)
        self._free_devices()

    def clear(self) -> None:
        """Forget all snapshots and requests."""
        self._snapshots.clear()
        self._queue, self._failed, self._busy = FairQueue(), [], False
        self._free_devices()

    def step(self, admit: Sequence[SampleRequest], cancel: Collection[str], *, wait: bool) -> SampleProgress:
        """Execute one step. admit: requests for snapshots that exist. cancel: ids of requests to remove.

        wait: return after the devices have computed the step, as in `SampleStep`.
        """
        for ticket in self._queue:
            if ticket.item.request.request_id in cancel:
                self._queue.withdraw(ticket)
        known = {ticket.item.request.request_id for ticket in self._queue}
        known |= {*(self._sampler.request_ids if self._sampler is not None else ())} - {*cancel}
        for request in admit:
            if request.request_id not in known:  # otherwise it was sent twice, and one result answers both requests
                waiting = _Waiting(request, self._snapshots[str(request.snapshot_id)])
                self._queue.push(request.owner, waiting, request.num_samples)
        first, progress = self._queue.peek(), SampleProgress((), 0, 0)
        if first is not None and not self._busy and self._weights is not first.item.weights:
            self._load(first.item.weights)
        if self._sampler is not None:
            others_wait = any(ticket.item.weights is not self._weights for ticket in self._queue)
            joining = [] if self._busy and others_wait else self._serve(self._weights, self._sampler.free_slots)
            admitted = tuple(replace(request, snapshot_id=None) for request in joining)
            progress = self._sampler.step(SampleStep(admitted, tuple(cancel), wait=wait))
            self._busy = bool(progress.active or progress.waiting)
        failed, self._failed = tuple(self._failed), []
        self._free_devices()
        count = progress.waiting + len(self._queue)
        return progress.copy_with(finished=(*failed, *progress.finished), waiting=count)

    def _serve(self, weights: _HostWeights | None, free_slots: float = float("inf")) -> list[SampleRequest]:
        """Remove the first requests for these weights from the queue, while slots are free."""
        served: list[SampleRequest] = []
        for ticket in self._queue:
            if ticket.item.weights is weights and free_slots > 0:
                served.append(self._queue.serve(ticket).request)
                free_slots -= served[-1].num_samples
        return served

    def _load(self, weights: _HostWeights) -> None:
        """Replace the weights on the devices. If that fails, all requests for the new weights fail."""
        assert self._make is not None
        self._weights, like = weights, full_parameters.weights_like(self._cfg, self._mesh)
        leaves, tree = jax.tree.flatten(like)

        def load() -> Params:
            arrays = [
                jax.make_array_from_single_device_arrays(
                    leaf.shape, leaf.sharding, [jax.device_put(part, device, may_alias=True) for device, part in shards]
                )
                for leaf, shards in zip(leaves, weights.arrays, strict=True)
            ]
            return full_parameters.with_frozen(self._base, jax.tree.unflatten(tree, arrays))

        try:
            if self._sampler is None:
                self._sampler = self._make(load())
                self._sampler.admission.base.step = weights.step
            else:
                self._sampler.replace_weights(load, weights.step)
        except Exception as error:
            log.exception("weights to sample from cannot be put on the devices")
            text = f"the weights cannot be put on the devices ({type(error).__name__}: {error}); the same request may "
            failed = [request.request_id for request in self._serve(weights)]
            failed += self._sampler.request_ids if self._sampler is not None else []
            self._failed += [SampleResult(name, error=f"{text}work later", category="server") for name in failed]
            self._sampler, self._weights, self._busy = None, None, False

    def _free_devices(self) -> None:
        """Free the devices' memory if no request can arrive."""
        if not (self._snapshots or self._queue or self._busy):
            self._sampler, self._weights = None, None


@functools.partial(jax.jit, static_argnums=(0, 1))
def _frozen(where: Any, dtype: Any, array: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A copy in this dtype, and whether all its numbers are finite."""
    copy = jax.lax.with_sharding_constraint(jnp.array(array, dtype, copy=True), where)
    finite = jnp.all(jnp.isfinite(copy))
    return copy, jax.lax.with_sharding_constraint(finite, replicated(where.mesh))


class GroupSampler:
    """Both samplers. The snapshot of a request decides which one serves it. All processes must make the same calls."""

    def __init__(self, adapters: Sampler, full_models: FullModelSampler) -> None:
        """adapters: serves the base model and adapters. full_models: serves models with all parameters trained."""
        self.adapters, self._full_models = adapters, full_models

    def publish(self, snapshot_id: str, trained: Trained, spec: LoraSpec, step: int) -> None:
        """Keep a copy of an adapter or of a full model, after `step` optimizer steps.

        Errors: see `publish` of either sampler.
        """
        if isinstance(trained, Params):
            self._full_models.publish(snapshot_id, trained, step)
        else:
            self.adapters.publish(snapshot_id, trained, spec, step)

    def has_snapshot(self, snapshot_id: str) -> bool:
        return self._full_models.has_snapshot(snapshot_id) or snapshot_id in self.adapters.snapshots

    def snapshot_memory(self, snapshot_id: str) -> SnapshotHeld:
        if self._full_models.has_snapshot(snapshot_id):
            return SnapshotHeld(self._full_models.snapshot_host_bytes(snapshot_id), on_host=True)
        return SnapshotHeld(self.adapters.snapshot_host_bytes(snapshot_id))

    def rename_snapshot(self, snapshot_id: str, to_id: str, *, recompute: bool) -> None:
        """Rename a snapshot, replacing any snapshot `to_id`. NotFoundError: there is no snapshot to rename.

        recompute: see `Sampler.rename_snapshot`. Requests of full models always begin again.
        """
        if self._full_models.has_snapshot(snapshot_id):
            self._full_models.rename_snapshot(snapshot_id, to_id)
            self.adapters.drop_snapshot(to_id)
        else:
            self.adapters.rename_snapshot(snapshot_id, to_id, recompute=recompute)
            self._full_models.drop_snapshot(to_id)

    def drop_snapshot(self, snapshot_id: str) -> None:
        self._full_models.drop_snapshot(snapshot_id)
        self.adapters.drop_snapshot(snapshot_id)

    def clear(self) -> None:
        """Forget all snapshots and all requests."""
        self._full_models.clear()
        self.adapters.clear()

    def step(self, command: SampleStep) -> SampleProgress:
        """Execute a step of both samplers."""
        full_models = [each for each in command.admit if self._full_models.has_snapshot(each.snapshot_id)]
        others = tuple(each for each in command.admit if not self._full_models.has_snapshot(each.snapshot_id))
        first = self.adapters.step(command.copy_with(admit=others))
        second = self._full_models.step(full_models, command.cancel, wait=command.wait)
        return SampleProgress(
            first.finished + second.finished,
            first.active + second.active,
            first.waiting + second.waiting,
            first.streamed + second.streamed,
            first.answers,
        )

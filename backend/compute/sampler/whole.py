"""Sampling from models of which all parameters were trained, beside the base model and adapters.

Such a model has weights of its own, so no batch holds its rows beside those of others. A second sampler, with a KV
cache of its own, has the weights of one snapshot at a time. The other snapshots wait on the host, in the dtype of the
base weights.

Requests stand in one line, which owners share by sequences, as they share the slots of a batch (see `scheduler`).
Those for the weights that are on the devices join the batch when it has a slot for them, as long as nobody waits for
others; then the batch ends, and the weights change to those of the first in line. So an owner waits for at most one
batch of each other owner, however many requests these have. Each step of the group's sampler is a step of both.
"""

from __future__ import annotations

import bisect
import functools
import logging
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
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

_Pieces = list[tuple[jax.Device, npt.NDArray[Any]]]  # of an array: what each device of this process holds


@dataclass(eq=False)
class _Weights:
    """The weights of one snapshot, on the host: of each array of a `Params`, in their order."""

    arrays: list[_Pieces]

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for pieces in self.arrays for _, piece in pieces)


@dataclass(eq=False)
class _Waiting:
    start: int  # its place in line
    request: SampleRequest
    weights: _Weights


@dataclass
class _WholeLine:
    """Requests that wait for weights, by their starts, which are those of start-time fair queueing."""

    waiting: list[_Waiting] = field(default_factory=list)
    _now: int = 0  # the latest start of those that were taken
    _next: dict[str, int] = field(default_factory=dict)  # of owners that wait

    def add(self, request: SampleRequest, weights: _Weights) -> None:
        """Behind its owner's other requests, before what exceeds the share of other owners."""
        start = max(self._now, self._next.get(request.owner, 0))
        self._next[request.owner] = start + request.num_samples
        bisect.insort(self.waiting, _Waiting(start, request, weights), key=lambda one: one.start)

    def take(self, weights: _Weights | None, room: float = math.inf) -> list[SampleRequest]:
        """Remove the first requests for these weights, until no room is left for another sequence."""
        found: list[_Waiting] = []
        for one in self.waiting:
            if one.weights is weights and room > 0:
                found.append(one)
                room -= one.request.num_samples
        requests = [one.request for one in found]
        self._now = max([self._now, *(one.start for one in found)])
        self.remove({request.request_id for request in requests})
        return requests

    def remove(self, request_ids: Collection[str]) -> None:
        """Remove requests; unknown ids are fine."""
        if request_ids:
            self.waiting = [one for one in self.waiting if one.request.request_id not in request_ids]
            self._next = {one.request.owner: one.start + one.request.num_samples for one in self.waiting}


class WholeSampler:
    """Snapshots of whole models by id, the line, and the sampler. Call it on every process alike."""

    def __init__(self, cfg: ModelConfig, mesh: Mesh, base: Params, make: Callable[[Params], Sampler] | None) -> None:
        """No snapshots.

        cfg, mesh: the model's shape and its devices. base: the base model's weights, of which it has the dtype and
        what is frozen. make: a sampler of a model with other weights; None: there is no room for one.
        """
        self._cfg, self._mesh, self._base, self._make = cfg, mesh, base, make
        self._held: dict[str, _Weights] = {}
        self._line = _WholeLine()
        self._sampler: Sampler | None = None
        self._used: _Weights | None = None  # on the devices
        self._busy = False
        self._failed: list[SampleResult] = []

    def publish(self, snapshot_id: str, weights: Params) -> None:
        """Keep a copy of float32 weights (on the devices or the host).

        ConflictError when the id is taken; UserError when a weight is not finite, or the group has no room to sample.
        """
        if self._make is None:
            raise UserError(NOT_SAMPLED)
        if snapshot_id in self._held:
            raise ConflictError(f"snapshot {snapshot_id!r} exists already; a snapshot never changes")
        copies: list[_Pieces] = []
        trained, dtype = full_parameters.weights_like(self._cfg, self._mesh), self._base.embed_VD.dtype
        computed = jax.eval_shape(lambda own: full_parameters.cast_weights(self._cfg, dtype, own), trained)
        each = (jax.tree.leaves(tree) for tree in (weights, trained, computed))
        for array, place, kept in zip(*each, strict=True):
            own = array if isinstance(array, jax.Array) else put(array, place.sharding)
            copy, finite = _frozen(place.sharding, kept.dtype, own)  # one by one: the devices have no room for all
            if not bool(to_host(finite)):
                raise UserError(f"snapshot {snapshot_id!r}: a weight of its model is not finite; snapshots must be")
            copies.append([(shard.device, np.asarray(shard.data)) for shard in copy.addressable_shards])
        self._held[snapshot_id] = _Weights(copies)

    def holds(self, snapshot_id: str | None) -> bool:
        """Whether there is a snapshot of that id."""
        return snapshot_id in self._held

    def host_bytes(self, snapshot_id: str) -> int:
        """The host memory that a snapshot takes."""
        return self._held[snapshot_id].nbytes

    def move(self, snapshot_id: str, to_id: str) -> None:
        """Rename a snapshot, over the one called `to_id`: requests that sample the old `to_id` go on with this one.

        Those that are in the batch begin anew with the tokens they have. NotFoundError when there is none to rename.
        """
        if snapshot_id not in self._held:
            raise NotFoundError(f"snapshot {snapshot_id!r} is not here; publish or load it first")
        new, old = self._held.pop(snapshot_id), self._held.get(to_id)
        self._held[to_id] = new
        if old is not None:
            for one in self._line.waiting:
                one.weights = new if one.weights is old else one.weights
            if self._used is old and self._busy:
                self._use(new)

    def drop(self, snapshot_id: str) -> None:
        """Forget a snapshot; requests that came before finish. Unknown ids are fine."""
        self._held.pop(snapshot_id, None)
        self._rest()

    def clear(self) -> None:
        """Forget all snapshots and requests."""
        self._held.clear()
        self._line, self._failed, self._busy = _WholeLine(), [], False
        self._rest()

    def step(self, admit: Sequence[SampleRequest], cancel: Collection[str], *, wait: bool) -> SampleProgress:
        """One step. admit: requests for snapshots that are held. cancel: ids of requests that leave.

        wait: for what the devices are asked for, as of `SampleStep`.
        """
        self._line.remove(set(cancel))
        known = {one.request.request_id for one in self._line.waiting}
        known |= {*(self._sampler.requests if self._sampler is not None else ())} - {*cancel}
        for request in admit:
            if request.request_id not in known:  # else the one on its way answers both
                self._line.add(request, self._held[str(request.snapshot_id)])
        line, progress = self._line.waiting, SampleProgress((), 0, 0)
        if line and not self._busy and self._used is not line[0].weights:
            self._use(line[0].weights)
        if self._sampler is not None:
            others = any(one.weights is not self._used for one in self._line.waiting)
            joining = [] if self._busy and others else self._line.take(self._used, self._sampler.room)
            own = tuple(replace(request, snapshot_id=None) for request in joining)
            progress = self._sampler.step(SampleStep(own, tuple(cancel), wait=wait))
            self._busy = bool(progress.active or progress.waiting)
        failed, self._failed = tuple(self._failed), []
        self._rest()
        waiting = progress.waiting + len(self._line.waiting)
        return progress.copy_with(finished=(*failed, *progress.finished), waiting=waiting)

    def _use(self, weights: _Weights) -> None:
        """Put these weights in place of those that are on the devices; who waits for them fails if that fails."""
        assert self._make is not None
        self._used, like = weights, full_parameters.weights_like(self._cfg, self._mesh)
        leaves, tree = jax.tree.flatten(like)

        def load() -> Params:
            arrays = [
                jax.make_array_from_single_device_arrays(
                    leaf.shape, leaf.sharding, [jax.device_put(piece, device, may_alias=True) for device, piece in own]
                )
                for leaf, own in zip(leaves, weights.arrays, strict=True)
            ]
            return full_parameters.with_frozen(self._base, jax.tree.unflatten(tree, arrays))

        try:
            if self._sampler is None:
                self._sampler = self._make(load())
            else:
                self._sampler.use(load)
        except Exception as error:
            log.exception("weights to sample from cannot be put on the devices")
            text = f"the weights cannot be put on the devices ({type(error).__name__}: {error}); the same request may "
            gone = [request.request_id for request in self._line.take(weights)]
            gone += self._sampler.requests if self._sampler is not None else []
            self._failed += [SampleResult(name, error=f"{text}work later", category="server") for name in gone]
            self._sampler, self._used, self._busy = None, None, False

    def _rest(self) -> None:
        """Give the devices' memory back when no request can come."""
        if not (self._held or self._line.waiting or self._busy):
            self._sampler, self._used = None, None


@functools.partial(jax.jit, static_argnums=(0, 1))
def _frozen(where: Any, dtype: Any, array: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A copy in that dtype, and whether all of it is finite."""
    copy = jax.lax.with_sharding_constraint(jnp.array(array, dtype, copy=True), where)
    finite = jnp.all(jnp.isfinite(copy))
    return copy, jax.lax.with_sharding_constraint(finite, replicated(where.mesh))


class GroupSampler:
    """Both samplers as one: what is sampled decides which of them serves it. Call it on every process alike."""

    def __init__(self, adapters: Sampler, whole: WholeSampler) -> None:
        """adapters: serves the base model and adapters. whole: serves models of which all parameters were trained."""
        self.adapters, self.whole = adapters, whole

    def publish(self, snapshot_id: str, trained: Trained, spec: LoraSpec) -> None:
        """Keep a copy of an adapter or of a whole model; errors are those of either sampler."""
        if isinstance(trained, Params):
            self.whole.publish(snapshot_id, trained)
        else:
            self.adapters.publish(snapshot_id, trained, spec)

    def holds(self, snapshot_id: str) -> bool:
        """Whether there is a snapshot of that id."""
        return self.whole.holds(snapshot_id) or self.adapters.holds(snapshot_id)

    def held(self, snapshot_id: str) -> SnapshotHeld:
        """What a snapshot takes that is held."""
        if self.whole.holds(snapshot_id):
            return SnapshotHeld(self.whole.host_bytes(snapshot_id), on_host=True)
        return SnapshotHeld(self.adapters.host_bytes(snapshot_id))

    def move(self, snapshot_id: str, to_id: str) -> None:
        """Rename a snapshot, over the one called `to_id`; NotFoundError when there is none to rename."""
        mine, other = (self.whole, self.adapters) if self.whole.holds(snapshot_id) else (self.adapters, self.whole)
        mine.move(snapshot_id, to_id)
        other.drop(to_id)

    def drop(self, snapshot_id: str) -> None:
        """Forget a snapshot; requests already admitted with it finish. Unknown ids are fine."""
        self.whole.drop(snapshot_id)
        self.adapters.drop(snapshot_id)

    def clear(self) -> None:
        """Forget all snapshots and all requests."""
        self.whole.clear()
        self.adapters.clear()

    def step(self, command: SampleStep) -> SampleProgress:
        """A step of both."""
        theirs = [request for request in command.admit if self.whole.holds(request.snapshot_id)]
        own = tuple(request for request in command.admit if not self.whole.holds(request.snapshot_id))
        of_adapters = self.adapters.step(command.copy_with(admit=own))
        of_whole = self.whole.step(theirs, command.cancel, wait=command.wait)
        return SampleProgress(
            of_adapters.finished + of_whole.finished,
            of_adapters.active + of_whole.active,
            of_adapters.waiting + of_whole.waiting,
            of_adapters.streamed + of_whole.streamed,
        )

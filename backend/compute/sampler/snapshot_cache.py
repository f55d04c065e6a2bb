"""The snapshot cache: immutable copies of adapters, and the stack of the copies that the batch uses.

A snapshot never changes, but its id may pass to another snapshot (`rename`). The most recently used snapshots are on
the devices. The others are evicted to host memory until they are sampled again.

Adapters of any ranks are concatenated along the rank axis into one wide adapter, and each row of the batch uses only
its own columns (`stack_apply`). No matrices are gathered for each row, and a row of the base model uses no columns. A
new snapshot changes no shape as long as the stack has free columns for it. On a CPU with a wide stack, a row is
multiplied only by the blocks that contain its columns (`by_runs`). Matrices of experts have a divided rank, and fewer
columns by the same factor (`divisor_of`), unless the experts of a snapshot in the stack have the full rank.

Letters: L layers, R rank, K columns of the stack, B rows, T tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tinkerflow.backend.compute.kernels import adapter_gpu
from tinkerflow.backend.compute.kernels.grouped import Groups
from tinkerflow.backend.compute.kernels.matmul import IN_PLACE, OfLayer
from tinkerflow.backend.compute.mesh import Array, put, replicated, to_host
from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.families import projections
from tinkerflow.backend.compute.models.layers.matrices import Projection
from tinkerflow.backend.compute.models.lora import Lora, LoraApply, LoraPair, scale, shardings
from tinkerflow.backend.compute.platforms import RANK_COLUMNS, on_cpu
from tinkerflow.backend.compute.sampler.adapter_runs import by_runs
from tinkerflow.backend.compute.sampler.shapes import INVARIANT_COLUMNS, rank_columns
from tinkerflow.backend.core.errors import ConflictError, NotFoundError, UserError
from tinkerflow.backend.spec.commands import LoraSpec
from tinkerflow.backend.spec.ranks import RankRule, expert_rank

_FEW_COLUMNS = 128  # up to this number, CPUs multiply all rows by all columns, because runs would cost as much
_RANK_UNIT = 8  # ranks are padded to multiples, so that snapshots have few shapes
Widths = tuple[int, int]  # columns of most matrices, and of experts' matrices


@dataclass(eq=False)
class AdapterSnapshot:
    """One published adapter. A request with this snapshot continues to sample it after it is dropped from the cache.

    widths: the columns of the stack that it needs. lora: on the devices or on the host, with the scale folded into B,
    the rank padded with zeros to `widths`, in the dtype of the base weights. step: the optimizer steps of its weights.
    """

    snapshot_id: str
    widths: Widths
    lora: Lora
    step: int = 0

    @property
    def columns(self) -> int:
        """The columns of the stack that it needs for matrices other than those of experts."""
        return self.widths[0]

    @property
    def nbytes(self) -> int:
        """The number of its bytes on each device, or on the host."""
        return _bytes(self.lora)


@dataclass(frozen=True)
class Columns:
    """The columns [start, end) of a snapshot in the stack; (0, 0) is the base model, which has no columns."""

    start: int
    end: int


BASE = Columns(0, 0)


@dataclass
class _Stack:
    width: int = 0
    divisor: int = 1
    lora: Lora = field(default_factory=lambda: Lora(layers={}, unembed=None))
    places: dict[AdapterSnapshot, Columns] = field(default_factory=dict)


class SnapshotCache:
    """Snapshots by id, and the stack. All processes of a group make the same calls, so their caches are equal."""

    def __init__(
        self,
        cfg: ModelConfig,
        mesh: Mesh,
        dtype: str,
        *,
        by_layer: bool,
        most_resident: int | None = None,
        usual: LoraSpec | None = None,
        most_bytes: int | None = None,
        plain: bool = False,
        invariant: bool = False,
    ) -> None:
        """Create an empty cache.

        cfg: the base model of the adapters. mesh: every device has the whole stack. dtype: the name of the number
        format of snapshots. by_layer: whether the stack has separate arrays for each layer, like the weights
        (`params.by_layer`). most_resident: how many snapshots stay on the devices; None: all. most_bytes: the memory of
        each device for them and the stack, unless the batch needs more; None: unlimited. usual: the shape of most
        adapters, for an empty stack; None: their experts have the full rank. plain: the base model has programs without
        a stack, for batches without snapshots. invariant: the stack has the shape that each snapshot needs alone; see
        `fits`.
        """
        self._cfg, self._mesh, self._dtype, self._by_layer = cfg, mesh, dtype, by_layer
        self._usual = divisor_of(cfg, usual) if usual else 1
        self._snapshots: dict[str, AdapterSnapshot] = {}
        self._stack = _Stack()
        self.most_resident = most_resident
        self._most_bytes = most_bytes
        self._plain = plain and not invariant
        self._invariant = invariant
        self._unit = RANK_COLUMNS if invariant else 1  # a snapshot starts at a multiple of this, as it would alone
        # The cached snapshots on the devices, least recently used first.
        self._resident: dict[AdapterSnapshot, None] = {}

    def publish(self, snapshot_id: str, lora: Lora, spec: LoraSpec, step: int = 0) -> None:
        """Keep a copy of `lora` (of shape `spec`, on the devices or on the host, after `step` steps) as `snapshot_id`.

        ConflictError: the id is used, and snapshots never change. UserError: a weight is not finite, and in a shared
        batch would affect the rows of other requests.
        """
        if snapshot_id in self._snapshots:
            raise ConflictError(f"snapshot {snapshot_id!r} exists already; a snapshot never changes")
        if _on_host(lora):
            lora = put(lora, shardings(self._mesh, lora))
        widths = widths_of(self._cfg, spec)
        copy, finite = frozen(self._mesh, widths, self._dtype, lora)
        if not bool(to_host(finite)):
            raise UserError(
                f"snapshot {snapshot_id!r}: a weight of its adapter is not finite; snapshots must be finite"
            )
        snapshot = self._snapshots[snapshot_id] = AdapterSnapshot(snapshot_id, widths, copy, step)
        self._resident[snapshot] = None
        self._evict_except({snapshot, *self._stack.places})

    def __contains__(self, snapshot_id: str) -> bool:
        return snapshot_id in self._snapshots

    def rename(self, snapshot_id: str, to_id: str) -> AdapterSnapshot:
        """Rename a snapshot, replacing any snapshot `to_id`. NotFoundError: there is no snapshot to rename."""
        old = self.find(snapshot_id)
        moved = replace(old, snapshot_id=to_id)
        if old in self._resident:
            self._resident[moved] = None
        self.drop(snapshot_id)
        self.drop(to_id)
        self._snapshots[to_id] = moved
        return moved

    def drop(self, snapshot_id: str) -> None:
        """Forget a snapshot, if it exists. It stays in the stack until its columns are needed."""
        if (snapshot := self._snapshots.pop(snapshot_id, None)) is not None:
            self._resident.pop(snapshot, None)

    def clear(self) -> None:
        """Forget all snapshots."""
        self._snapshots.clear()
        self._resident.clear()

    def find(self, snapshot_id: str) -> AdapterSnapshot:
        """The snapshot with this id. NotFoundError: it was never published, or was dropped."""
        try:
            return self._snapshots[snapshot_id]
        except KeyError:
            raise NotFoundError(
                f"snapshot {snapshot_id!r} is not in the sampler's snapshot cache; publish or load it first"
            ) from None

    def alive(self, snapshot: AdapterSnapshot | None) -> bool:
        """Whether later requests may sample a snapshot: it was neither dropped nor replaced. Always true for None."""
        return snapshot is None or self._snapshots.get(snapshot.snapshot_id) is snapshot

    @property
    def resident(self) -> list[str]:
        """The ids of the snapshots on the devices, least recently used first."""
        return [snapshot.snapshot_id for snapshot in self._resident]

    @property
    def lora(self) -> Lora:
        """The stack: A [.., K, in] and B [.., K, out], or tuples of these by layer; without pairs while K is unset."""
        return self._stack.lora

    @property
    def width(self) -> int:
        """K, the columns of the stack; 0 before it is used."""
        return self._stack.width

    def columns(self, snapshot: AdapterSnapshot | None) -> Columns:
        """The columns of `snapshot` (None: the base model). The last call of `use` must have included it."""
        return BASE if snapshot is None else self._stack.places[snapshot]

    def fits(self, snapshots: Collection[AdapterSnapshot | None]) -> bool:
        """Whether an invariant batch may contain these snapshots (None: the base model).

        The batch's stack must have the shape that each snapshot needs alone, so that the bits of its rows are the same.
        """
        distinct = [snapshot for snapshot in dict.fromkeys(snapshots) if snapshot is not None]
        alone = [self._shape([snapshot]) for snapshot in distinct] + [self._shape([])] * (None in snapshots)
        return {*alone} <= {self._shape(distinct)}

    def use(self, wanted: Collection[AdapterSnapshot | None]) -> None:
        """Put every snapshot of `wanted` into the stack. Other snapshots stay while their columns are not needed.

        Without snapshots, the stack is empty, or absent if the base model has programs without a stack.
        """
        ordered = dict.fromkeys(snapshot for snapshot in wanted if snapshot is not None)
        if ordered or not self._plain:
            self._fill(list(ordered))
        for snapshot in ordered:
            if snapshot in self._resident:  # make it the most recently used
                del self._resident[snapshot]
                self._resident[snapshot] = None
        self._evict_except(ordered)

    def reset_stack(self) -> None:
        """Empty the stack when there are no requests, so that later shapes depend on later requests alone."""
        self._stack = _Stack()

    def _fill(self, ordered: list[AdapterSnapshot]) -> None:
        stack = self._stack
        missing = [snapshot for snapshot in ordered if snapshot not in stack.places]
        narrow = any(_divisor(snapshot.widths) < stack.divisor for snapshot in missing)
        if not stack.width or narrow or (self._invariant and (stack.width, stack.divisor) != self._shape(ordered)):
            self._rebuild(ordered)
            return
        for snapshot in missing:
            start = _gap(stack, snapshot.columns, self._unit)
            if start is None:
                stack.places = {held: place for held, place in stack.places.items() if held in ordered}
                start = _gap(stack, snapshot.columns, self._unit)
            if start is None:
                self._rebuild(ordered)
                return
            self._place(snapshot, start)

    def _rebuild(self, snapshots: list[AdapterSnapshot]) -> None:
        width, divisor = self._shape(snapshots)
        widths = width, width // divisor
        self._stack = _Stack()  # free its memory before the next stack is made
        stack = empty_stack(self._cfg, self._mesh, widths, self._dtype, self._by_layer, self._invariant)
        self._stack = _Stack(width, divisor, stack)
        start = 0
        for snapshot in snapshots:
            self._place(snapshot, start)
            start = _multiple(start + snapshot.columns, self._unit)

    def _shape(self, snapshots: list[AdapterSnapshot]) -> tuple[int, int]:
        """The columns and the divisor of a new stack for these snapshots."""
        columns = sum(_multiple(snapshot.columns, self._unit) for snapshot in snapshots)
        divisor = min((_divisor(snapshot.widths) for snapshot in snapshots), default=self._usual)
        return rank_columns(max(columns, INVARIANT_COLUMNS) if self._invariant else columns), divisor

    def _place(self, snapshot: AdapterSnapshot, start: int) -> None:
        stack = self._stack
        if _on_host(snapshot.lora):
            snapshot.lora = put(snapshot.lora, replicated(self._mesh))
            if self.alive(snapshot):
                self._resident[snapshot] = None
        stack.lora = placed(self._mesh, stack.lora, snapshot.lora, snapshot.columns, np.int32(start))
        stack.places[snapshot] = Columns(start, start + snapshot.columns)

    def _evict_except(self, used: Collection[AdapterSnapshot]) -> None:
        """Evict the least recently used snapshots outside `used`, until the others are within the limits."""
        if self.most_resident is None:
            return
        held = _bytes(self._stack.lora) + sum(snapshot.nbytes for snapshot in self._resident)
        for snapshot in [snapshot for snapshot in self._resident if snapshot not in used]:
            if len(self._resident) <= self.most_resident and held <= (self._most_bytes or held):
                return
            held -= snapshot.nbytes
            del self._resident[snapshot]
            snapshot.lora = to_host(snapshot.lora)


def _bytes(lora: Lora) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(lora))


def _on_host(lora: Lora) -> bool:
    return any(not isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(lora))


def widths_of(cfg: ModelConfig, spec: LoraSpec) -> Widths:
    """The columns of the stack that a snapshot of this shape needs: a multiple of `_RANK_UNIT`, divided for experts."""
    columns = _columns(spec)
    return columns, columns // divisor_of(cfg, spec)


def usual_spec(cfg: ModelConfig, rule: RankRule) -> LoraSpec:
    """The expected shape of most adapters of this model."""
    return LoraSpec(RANK_COLUMNS, expert_rank=expert_rank(RANK_COLUMNS, cfg.experts_per_token, rule))


def divisor_of(cfg: ModelConfig, spec: LoraSpec) -> int:
    """The factor by which an adapter has fewer columns for experts, a power of two.

    At most the number of a token's experts and _RANK_UNIT, and 1 if the rank of experts is divided by less.
    """
    power = 1 << min(cfg.experts_per_token, _RANK_UNIT).bit_length() >> 1
    return power if power and spec.expert_rank and spec.expert_rank * power <= _columns(spec) else 1


def _columns(spec: LoraSpec) -> int:
    return _multiple(spec.rank, _RANK_UNIT)


def _multiple(number: int, of: int) -> int:
    return -(-number // of) * of


def _divisor(widths: Widths) -> int:
    return widths[0] // widths[1]


def stack_apply(columns_B2: Array, width: int | None = None, *, one_device: bool = False) -> LoraApply:
    """The `LoraApply` in which row b uses columns [columns_B2[b, 0], columns_B2[b, 1]) of the stack's pairs.

    width: columns of the stack; None: as many as each pair has. A pair with a divided width has fewer columns by the
    same factor. one_device: the rows are not split over several devices. If so, and with a width, a pair may be
    `OfLayer`.
    """
    updates, in_place = None, None
    if width is not None and one_device:
        updates = by_runs(columns_B2, width) if width > _FEW_COLUMNS and on_cpu() else None
        in_place = adapter_gpu.in_place(columns_B2, width)

    def apply(x: jax.Array, pairs: tuple[Any, ...], groups: Groups | None = None) -> Sequence[jax.Array]:
        if updates is not None and groups is None and all(pair.blocks == 1 for pair in pairs):
            return updates(x, pairs)

        stacked = [pair for pair in pairs if isinstance(pair, OfLayer)]
        if in_place and groups is None and 0 < len(stacked) == len(pairs) and math.prod(x.shape[:-1]) <= IN_PLACE:
            return in_place(x, stacked)

        def update(pair: LoraPair | OfLayer) -> jax.Array:
            whole = pair.stack if isinstance(pair, OfLayer) else pair
            own_BK = own_columns(columns_B2, whole, width)
            # Not a product with 0, because an overflow in the columns of another row's adapter must not become NaN
            # here.
            if groups is None:
                own = pair.own if isinstance(pair, OfLayer) else pair
                own_BTK = jnp.where(own_BK[:, None, :], jnp.einsum("bti,ki->btk", x, own.A), 0)
                return own.multiply(lambda columns: own_BTK[..., columns] @ own.B[columns])
            A, B = (OfLayer(part, pair.layer) if isinstance(pair, OfLayer) else part for part in (whole.A, whole.B))
            own_MK = jnp.where(own_BK[groups.batch_M], groups.dot_transposed(x, A), 0)
            if isinstance(B, OfLayer):  # kernels add the columns in order, so zeros change no bit
                return groups.dot(own_MK, B)
            return whole.multiply(lambda columns: groups.dot(own_MK[:, columns], B[:, columns]))

        return tuple(update(pair) for pair in pairs)

    return apply


def own_columns(columns_B2: Array, pair: LoraPair, width: int | None = None) -> jax.Array:
    """Which of the pair's columns each row uses, bool [B, K]. columns_B2, width: see `stack_apply`."""
    columns = pair.A.shape[-2]
    place = jnp.arange(columns, dtype=jnp.int32) * ((width or columns) // columns)
    return (place >= columns_B2[:, :1]) & (place < columns_B2[:, 1:])


def _gap(stack: _Stack, columns: int, unit: int) -> int | None:
    """The first place in the stack with `columns` free columns, a multiple of `unit`."""
    start = 0
    for place in sorted(stack.places.values(), key=lambda place: place.start):
        if place.start - start >= columns:
            return start
        start = _multiple(place.end, unit)
    return start if stack.width - start >= columns else None


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def frozen(mesh: Mesh, widths: Widths, dtype: str, lora: Lora) -> tuple[Lora, jax.Array]:
    """Make the copy for a snapshot. Also returns whether all its weights are finite (bool scalar).

    widths: the padded ranks. dtype: the name of the copy's format. lora: an adapter on the devices, float32.
    """

    def freeze(pair: LoraPair) -> LoraPair:
        columns = widths[pair.A.ndim == 4]  # of [L, E, R, in], experts
        return LoraPair(
            A=_padded(jnp.asarray(pair.A), columns).astype(dtype),
            B=_padded(jnp.asarray(pair.B * scale(pair.A.shape[-2])), columns).astype(dtype),
        )

    copy = jax.tree.map(freeze, lora, is_leaf=lambda node: isinstance(node, LoraPair))
    copy = jax.lax.with_sharding_constraint(copy, replicated(mesh))
    finite = functools.reduce(
        jnp.logical_and, [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(copy)], jnp.bool_(True)
    )
    return copy, jax.lax.with_sharding_constraint(finite, replicated(mesh))


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4, 5))
def empty_stack(cfg: ModelConfig, mesh: Mesh, widths: Widths, dtype: str, by_layer: bool, invariant: bool) -> Lora:
    """A stack of zeros: an adapter of all parts of the model.

    cfg, mesh: the base model's shape, and the devices. widths: columns, K. dtype: the name of the number format.
    by_layer: whether each layer has separate arrays (`params.by_layer`). invariant: use blocks, see `LoraPair`.
    """

    def zeros(stack: tuple[int, ...], size: int) -> Any:  # an array, or by layer a tuple of arrays
        width = widths[len(stack) == 2]
        if by_layer and stack:
            return tuple(jnp.zeros((*stack[1:], width, size), dtype) for _ in range(stack[0]))
        return jnp.zeros((*stack, width, size), dtype)

    def pair(projection: Projection) -> LoraPair:
        A, B = (zeros(projection.stack, size) for size in (projection.inputs, projection.outputs))
        return LoraPair(A=A, B=B, blocks=widths[0] // RANK_COLUMNS if invariant else 1)

    layers = {name: pair(projection) for name, projection in projections(cfg).items()}
    unembed = layers.pop("unembed")
    return _pinned(mesh, Lora(layers=layers, unembed=unembed))


@functools.partial(jax.jit, static_argnums=(0, 3), donate_argnums=1)
def placed(mesh: Mesh, stack: Lora, snapshot: Lora, columns: int, start: jax.Array) -> Lora:
    """Put a snapshot into columns [start, start + columns), and return the stack, updated in place.

    mesh: every device has the whole stack. snapshot: made by `frozen`; projections that it does not adapt become zero
    in its columns. start: int32 scalar.
    """

    def put_pair(into: LoraPair, pair: LoraPair | None) -> LoraPair:
        def one(held: Any, new: Any) -> Any:
            if isinstance(held, tuple):
                return tuple(one(part, None if new is None else new[layer]) for layer, part in enumerate(held))
            divisor = width // held.shape[-2]
            shape = (*held.shape[:-2], columns // divisor, held.shape[-1])
            part = jnp.zeros(shape, held.dtype) if new is None else _padded(new, columns // divisor)
            return jax.lax.dynamic_update_slice_in_dim(held, part, start // divisor, axis=held.ndim - 2)

        return replace(into, A=one(into.A, pair.A if pair else None), B=one(into.B, pair.B if pair else None))

    assert stack.unembed is not None
    width = stack.unembed.A.shape[-2]
    layers = {name: put_pair(pair, snapshot.layers.get(name)) for name, pair in stack.layers.items()}
    return _pinned(mesh, Lora(layers=layers, unembed=put_pair(stack.unembed, snapshot.unembed)))


def width_of(stack: Lora) -> int | None:
    """The stack's columns, K; None before its first use."""
    return None if stack.unembed is None else int(stack.unembed.A.shape[-2])


def _padded(array: jax.Array, columns: int) -> jax.Array:
    """Pad [..., rank, size] with zeros to [..., columns, size]."""
    return jnp.pad(array, [(0, 0)] * (array.ndim - 2) + [(0, columns - array.shape[-2]), (0, 0)])


def _pinned(mesh: Mesh, lora: Lora) -> Lora:
    pinned: Lora = jax.lax.with_sharding_constraint(lora, replicated(mesh))
    return pinned

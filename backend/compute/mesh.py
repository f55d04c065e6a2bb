"""The device mesh of a worker group, and copies of arrays between the host and the mesh.

The mesh may span processes. `put` copies host arrays to the mesh: every process must hold the same values, and
transfers the part for its own devices. `to_host` copies replicated arrays back, `whole_to_host` all others.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from tinkerflow.backend.core.errors import UserError

FSDP, EXPERT, TENSOR = "fsdp", "expert", "tensor"
_ORDER = (EXPERT, TENSOR, FSDP)  # of a mesh's axes; TENSOR and FSDP together form a contiguous range of devices
WEIGHTS = (TENSOR, FSDP)  # the axes that base matrices are split over
ROWS = (FSDP, EXPERT)  # the axes that rows of training are split over
CONTEXT = ("context", "expert_context")  # the axes of `split_rows` that the tokens of a row are split over
PIECES = (FSDP, CONTEXT[0], EXPERT, CONTEXT[1])  # the axes of `split_rows` that the pieces of all rows are split over
Tree = TypeVar("Tree")
Array = jax.Array | npt.NDArray[Any]  # on the devices or on the host; always on the devices inside jitted functions
Scalar = jax.Array | np.number[Any] | np.bool


def make_mesh(fsdp: int, tensor: int, expert: int = 1) -> Mesh:
    """A mesh (fsdp, expert, tensor) over all devices of the group. fsdp: 0 = all devices that the other axes leave.

    UserError: the product of the axes does not equal the number of devices.
    """
    count = jax.device_count()
    if not fsdp and count % (expert * tensor):
        raise UserError(
            f"the group has {count} device(s) in {jax.process_count()} process(es), which tensor_parallel {tensor} x "
            f"expert_parallel {expert} must divide"
        )
    fsdp = fsdp or count // (expert * tensor)
    if fsdp * expert * tensor != count:
        raise UserError(
            f"mesh fsdp {fsdp} x expert {expert} x tensor {tensor}: the product must equal the group's {count} devices"
        )
    return over(jax.devices(), fsdp, tensor, expert)


def over(devices: Sequence[jax.Device], fsdp: int, tensor: int, expert: int) -> Mesh:
    """A mesh of these sizes over all of `devices`. Neighbors along the tensor axis are close to each other."""
    auto = (AxisType.Auto,) * 3
    near = jax.make_mesh((fsdp, expert, tensor), (FSDP, EXPERT, TENSOR), axis_types=auto, devices=devices)
    return Mesh(near.devices.transpose(1, 2, 0), _ORDER, axis_types=auto)


def sampling_mesh(mesh: Mesh) -> Mesh:
    """The same devices with all of WEIGHTS as the tensor axis, so that decoding gathers no matrices.

    The tensor axis splits matrices as `params` splits them over WEIGHTS, so both meshes use the same memory. For each
    token the devices exchange activations instead of matrices.
    """
    return _reshaped(mesh, 1)


def expert_axes(mesh: Mesh, experts: int) -> tuple[str, ...]:
    """The axes that split a layer's experts, so that each device stores its own. They divide the number of experts.

    Training gathers experts over FSDP. Experts are the first dimension of their matrices: XLA's GPU compiler would
    copy matrices that are gathered along another dimension. In sampling, each device computes the experts it stores.
    """
    divided = experts % (mesh.shape[EXPERT] * mesh.shape[FSDP]) == 0
    return (EXPERT, FSDP) if divided else (EXPERT,)


def cache_mesh(mesh: Mesh, kv_heads: int) -> Mesh:
    """The same devices with a tensor axis that divides the key-value heads. The other axis of WEIGHTS splits rows.

    So no two devices along WEIGHTS hold the same keys and values.
    """
    return _reshaped(mesh, mesh.shape[TENSOR] * mesh.shape[FSDP] // heads_split(mesh, kv_heads))


def heads_split(mesh: Mesh | AbstractMesh, kv_heads: int) -> int:
    """The number of devices that a sequence's key-value heads are split over."""
    return math.gcd(mesh.shape[TENSOR] * mesh.shape[FSDP], kv_heads)


@functools.cache
def _reshaped(mesh: Mesh, fsdp: int) -> Mesh:
    """The mesh with its fsdp axis resized to `fsdp`, and its tensor axis to match. Devices keep their order."""
    if mesh.shape[FSDP] == fsdp:
        return mesh
    return Mesh(mesh.devices.reshape(mesh.shape[EXPERT], -1, fsdp), _ORDER, axis_types=(AxisType.Auto,) * 3)


def sharding(mesh: Mesh, shape: tuple[int, ...], *axes: str | tuple[str, ...] | None) -> NamedSharding:
    """Shard dimension i of `shape` over `axes[i]`, or over all of several axes, if they divide it."""

    def divides(axis: str | tuple[str, ...], size: int) -> bool:
        names = (axis,) if isinstance(axis, str) else axis
        return size % math.prod(mesh.shape[name] for name in names) == 0

    spec = [axis if axis and divides(axis, size) else None for size, axis in zip(shape, axes, strict=False)]
    return NamedSharding(mesh, PartitionSpec(*spec))


def by_rows(mesh: Mesh, x: jax.Array) -> jax.Array:
    """`x` with its first dimension split over the axes of WEIGHTS, if they divide it."""
    return jax.lax.with_sharding_constraint(x, sharding(mesh, x.shape, WEIGHTS))


def row_parts(mesh: Mesh) -> int:
    """The number of parts that the rows of training are split into."""
    return math.prod(mesh.shape[axis] for axis in ROWS)


def in_pieces(mesh: Mesh, rows: int, tokens: int) -> tuple[int, int]:
    """The number of pieces that these training rows are cut into, and the tokens of each piece.

    If the number of rows divides the number of parts, rows are split so that every part has one piece. Otherwise a
    piece is a row.
    """
    parts = row_parts(mesh)
    return (rows, tokens) if rows > parts or parts % rows else (parts, tokens * rows // parts)


@functools.cache
def split_rows(mesh: Mesh, pieces: int) -> Mesh:
    """The same devices for rows of `pieces` pieces each: ROWS splits the rows, and CONTEXT the tokens of each row.

    PIECES splits all pieces in the way in which ROWS of `mesh` splits the same number of rows. pieces: divides the size
    of the expert axis, or is a multiple of it.
    """
    of_experts = math.gcd(pieces, mesh.shape[EXPERT])
    experts, tensor, fsdp = mesh.devices.shape
    sizes = experts // of_experts, of_experts, tensor, fsdp * of_experts // pieces, pieces // of_experts
    axes = EXPERT, CONTEXT[1], TENSOR, FSDP, CONTEXT[0]
    return Mesh(mesh.devices.reshape(sizes), axes, axis_types=(AxisType.Auto,) * 5)


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def put(tree: Tree, shardings: Any) -> Tree:
    """Copy a pytree of host arrays to the devices. `shardings` is one sharding for all leaves, or a pytree of them.

    The result shares no memory with the host arrays. The caller may change the host arrays, and jit may donate the
    result.
    """
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings, may_alias=False)
    if isinstance(shardings, NamedSharding):
        shardings = jax.tree.map(lambda _: shardings, tree)
    return jax.tree.map(_put_shards, tree, shardings)


def from_callback(
    shape: tuple[int, ...], where: NamedSharding, read: Callable[[tuple[slice, ...]], npt.NDArray[Any]]
) -> jax.Array:
    """An array of `shape`. `read(index)` returns the part for one of this process's devices, as a host array."""
    return jax.make_array_from_callback(shape, where, lambda index: read(tuple(index or ())))


def to_host(tree: Tree) -> Tree:
    """The same pytree as NumPy arrays, in one transfer. Every array must be replicated (or local to the process)."""
    return jax.device_get(tree)


def whole_to_host(mesh: Mesh, tree: Tree) -> Tree:
    """The same pytree as NumPy arrays, gathered one at a time if other processes hold parts of them.

    All processes must call it with the same pytree.
    """
    if jax.process_count() == 1:
        return to_host(tree)
    return jax.tree.map(lambda array: to_host(_gather(mesh, array)), tree)


@functools.partial(jax.jit, static_argnums=0)
def _gather(mesh: Mesh, array: jax.Array) -> jax.Array:
    whole: jax.Array = jax.lax.with_sharding_constraint(array, replicated(mesh))
    return whole


def _put_shards(array: npt.NDArray[Any], where: NamedSharding) -> jax.Array:
    # A copy, because a CPU device may use the memory of the host array.
    return jax.make_array_from_callback(array.shape, where, lambda index: np.array(array[index], copy=True))

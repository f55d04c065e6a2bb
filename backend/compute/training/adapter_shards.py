"""Adapters as pieces: what each process holds of every array, by name, and the arrays made of pieces again on any mesh.

A piece is called `<part>/<projection>.<A|B>@<start>,<start>,…`, or `<part>/<name>@<start>,…` where all parameters are
trained. The part is `weights`, `grad`, or one of the
optimizer's state; the starts say where in the whole array the piece's first element lies. So a process writes and reads
no more of an adapter than its devices hold.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
from jax.sharding import Mesh

from tinkerflow.backend.compute.mesh import from_callback
from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.training.full import Trained, by_name, from_names, shapes, shardings
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.spec.commands import Float32, LoraSpec

WEIGHTS, GRADIENTS = "weights", "grad"
Index = tuple[slice, ...]


def are_pieces(names: Collection[str]) -> bool:
    """Whether tensors of these names are pieces, and not tensors by PEFT's names."""
    return any("@" in name for name in names)


def pieces_of(parts: Mapping[str, Trained]) -> dict[str, Float32]:
    """Copies on the host of what this process holds of each part. Each element is in one process's pieces alone."""
    shards = {
        f"{part}/{name}@{','.join(str(one.start or 0) for one in shard.index)}": shard.data
        for part, lora in parts.items()
        for name, array in by_name(lora).items()
        for shard in array.addressable_shards
        if shard.replica_id == 0
    }
    for data in shards.values():
        data.copy_to_host_async()
    return {name: np.array(data) for name, data in shards.items()}


def wanted(cfg: ModelConfig, mesh: Mesh, spec: LoraSpec, found: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Those of the pieces `found` (their shapes by name) that hold something for a device of this process."""
    host = shapes(cfg, mesh, spec)
    places = by_name(shardings(cfg, mesh, host))
    indices = {
        name: list(places[name].addressable_devices_indices_map(leaf.shape).values())
        for name, leaf in by_name(host).items()
    }

    def is_wanted(piece: str, shape: tuple[int, ...]) -> bool:
        name, starts = _parsed(piece)
        return name not in indices or any(_overlap(index, starts, shape) for index in indices[name])

    return [piece for piece, shape in found.items() if is_wanted(piece, shape)]


def assembled(
    cfg: ModelConfig, mesh: Mesh, spec: LoraSpec, pieces: Mapping[str, Float32], parts: Collection[str]
) -> dict[str, Trained]:
    """Each of the `parts` on the devices; UserError names what is missing, or belongs to no such adapter.

    cfg, mesh, spec: the model, its devices, and the adapter's shape. pieces: those that `wanted` names, or more.
    """
    host = shapes(cfg, mesh, spec)
    arrays, places = by_name(host), by_name(shardings(cfg, mesh, host))
    found: dict[str, dict[str, list[tuple[tuple[int, ...], Float32]]]] = {part: {} for part in parts}
    for piece, array in pieces.items():
        name, starts = _parsed(piece)
        part = piece.partition("/")[0]
        if part not in found or name not in arrays:
            raise UserError(f"saved tensor {piece!r} is not part of an adapter of {spec}")
        found[part].setdefault(name, []).append((starts, array))

    def made(part: str, name: str) -> object:
        shape, own = arrays[name].shape, found[part].get(name, [])

        def read(index: Index) -> Float32:
            begins = [one.start or 0 for one in index]
            ends = [size if one.stop is None else one.stop for one, size in zip(index, shape, strict=True)]
            # Always a copy: a CPU device keeps the memory that it is given.
            whole, filled = np.empty([end - begin for begin, end in zip(begins, ends, strict=True)], np.float32), 0
            for starts, array in own:
                if both := _overlap(index, starts, array.shape):
                    into = tuple(slice(a - begin, b - begin) for (a, b), begin in zip(both, begins, strict=True))
                    source = tuple(slice(a - start, b - start) for (a, b), start in zip(both, starts, strict=True))
                    whole[into] = array[source]
                    filled += whole[into].size
            if filled != whole.size:
                raise UserError(f"saved tensor '{part}/{name}' of shape {shape} is missing or cut at {begins}")
            return whole

        return from_callback(shape, places[name], read)

    return {part: from_names(cfg, {name: made(part, name) for name in arrays}) for part in parts}


def _parsed(piece: str) -> tuple[str, tuple[int, ...]]:
    """The array's name, in which there may be an `@` (see `decoder.plain_name`), and where the piece begins in it."""
    name, _, starts = piece.partition("/")[2].rpartition("@")
    try:
        return name, tuple(map(int, starts.split(",")))
    except ValueError:
        raise UserError(f"saved tensor {piece!r} does not say where it begins") from None


def _overlap(index: Index, starts: tuple[int, ...], shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """From where to where, by dimension, a piece holds elements of `index`; [] when it holds none."""
    both = [
        (max(one.start or 0, start), start + size if one.stop is None else min(one.stop, start + size))
        for one, start, size in zip(index, starts, shape, strict=True)
    ]
    return both if all(begin < end for begin, end in both) else []

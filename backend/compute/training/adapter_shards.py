"""Saved shards of adapters: each process writes the array parts on its devices, and reads the parts that they need.

A shard is named `<part>/<projection>.<A|B>@<start>,<start>,…`, or `<part>/<name>@<start>,…` if all parameters are
trained. The part is `weights`, `grad`, or a part of the optimizer's state. The starts are the index of the shard's
first element in the array. Arrays can be assembled from shards on any mesh.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
from jax.sharding import Mesh

from tinkerflow.backend.compute.mesh import from_callback
from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.training.trained import (
    Trained,
    arrays_by_name,
    trained_from_names,
    trained_shapes,
    trained_shardings,
)
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.spec.commands import Float32, LoraSpec

WEIGHTS, GRADIENTS = "weights", "grad"
Index = tuple[slice, ...]


def are_shards(names: Collection[str]) -> bool:
    """Whether the names are names of shards, rather than PEFT's names of tensors."""
    return any("@" in name for name in names)


def shards_of(parts: Mapping[str, Trained]) -> dict[str, Float32]:
    """Host copies of the shards of each part that this process holds. Each element is in only one shard."""
    shards = {
        f"{part}/{name}@{','.join(str(each.start or 0) for each in shard.index)}": shard.data
        for part, lora in parts.items()
        for name, array in arrays_by_name(lora).items()
        for shard in array.addressable_shards
        if shard.replica_id == 0
    }
    for data in shards.values():
        data.copy_to_host_async()
    return {name: np.array(data) for name, data in shards.items()}


def needed_shards(cfg: ModelConfig, mesh: Mesh, spec: LoraSpec, saved: Mapping[str, tuple[int, ...]]) -> list[str]:
    """The names of the saved shards that this process's devices need. saved: the shape of each shard."""
    host = trained_shapes(cfg, mesh, spec)
    places = arrays_by_name(trained_shardings(cfg, mesh, host))
    indices = {
        name: list(places[name].addressable_devices_indices_map(leaf.shape).values())
        for name, leaf in arrays_by_name(host).items()
    }

    def is_needed(shard: str, shape: tuple[int, ...]) -> bool:
        name, starts = _parse(shard)
        return name not in indices or any(_overlap(index, starts, shape) for index in indices[name])

    return [shard for shard, shape in saved.items() if is_needed(shard, shape)]


def assemble_shards(
    cfg: ModelConfig, mesh: Mesh, spec: LoraSpec, shards: Mapping[str, Float32], parts: Collection[str]
) -> dict[str, Trained]:
    """Assemble each of the `parts` on the devices. UserError: a shard is missing, or is not part of this adapter.

    cfg, mesh, spec: the model, its devices, and the adapter's shape. shards: at least those of `needed_shards`.
    """
    host = trained_shapes(cfg, mesh, spec)
    arrays, places = arrays_by_name(host), arrays_by_name(trained_shardings(cfg, mesh, host))
    by_part: dict[str, dict[str, list[tuple[tuple[int, ...], Float32]]]] = {part: {} for part in parts}
    for shard, array in shards.items():
        name, starts = _parse(shard)
        part = shard.partition("/")[0]
        if part not in by_part or name not in arrays:
            raise UserError(f"saved tensor {shard!r} is not part of an adapter of {spec}")
        by_part[part].setdefault(name, []).append((starts, array))

    def assemble(part: str, name: str) -> object:
        shape = arrays[name].shape

        def read(index: Index) -> Float32:
            begins = [each.start or 0 for each in index]
            ends = [size if each.stop is None else each.stop for each, size in zip(index, shape, strict=True)]
            # Always copy, because a CPU device keeps the memory that it is given.
            block, filled = np.empty([end - begin for begin, end in zip(begins, ends, strict=True)], np.float32), 0
            for starts, array in by_part[part].get(name, []):
                if both := _overlap(index, starts, array.shape):
                    into = tuple(slice(a - begin, b - begin) for (a, b), begin in zip(both, begins, strict=True))
                    source = tuple(slice(a - start, b - start) for (a, b), start in zip(both, starts, strict=True))
                    block[into] = array[source]
                    filled += block[into].size
            if filled != block.size:
                raise UserError(f"saved tensor '{part}/{name}' of shape {shape} is missing or cut at {begins}")
            return block

        return from_callback(shape, places[name], read)

    return {part: trained_from_names(cfg, {name: assemble(part, name) for name in arrays}) for part in parts}


def _parse(shard: str) -> tuple[str, tuple[int, ...]]:
    """The array's name, which may contain an `@` (see `decoder.plain_name`), and the shard's index in the array."""
    name, _, starts = shard.partition("/")[2].rpartition("@")
    try:
        return name, tuple(map(int, starts.split(",")))
    except ValueError:
        raise UserError(f"saved tensor {shard!r}: its name must end with its index in the array") from None


def _overlap(index: Index, starts: tuple[int, ...], shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """The range of each dimension in which a shard contains elements of `index`; [] if it contains none."""
    both = [
        (max(each.start or 0, start), start + size if each.stop is None else min(each.stop, start + size))
        for each, start, size in zip(index, starts, shape, strict=True)
    ]
    return both if all(begin < end for begin, end in both) else []

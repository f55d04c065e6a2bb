"""The training programs of an adapter shape: for every micro-batch shape that packing may produce, and optimizer steps.

Programs take memory. On a CPU each also takes hundreds of memory maps. Linux allows a process 65,530 maps by default,
and the compiler ends a process that has used them up. `StepsByShape` drops the programs of unused shapes.

Letters: B rows, T tokens.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial

import jax
import numpy as np
from jax.sharding import Mesh

from tinkerflow.backend.compute.mesh import ROWS, in_pieces, replicated, row_parts, sharding
from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.transformer import ImageFeatures, Params
from tinkerflow.backend.compute.models.vision_tower import VisionTower
from tinkerflow.backend.compute.training.budget import Budget
from tinkerflow.backend.compute.training.optimizer import fresh_state
from tinkerflow.backend.compute.training.token_losses import choose
from tinkerflow.backend.compute.training.train import DeviceBatch, Steps
from tinkerflow.backend.compute.training.trained import Trained, trained_shapes, trained_shardings
from tinkerflow.backend.compute.warming import Program, like, result_of
from tinkerflow.backend.spec.commands import LoraSpec, Optimizer
from tinkerflow.backend.spec.losses import packed_inputs
from tinkerflow.backend.spec.optimizers import OPTIMIZERS
from tinkerflow.backend.spec.packing import Grid, Shape
from tinkerflow.backend.spec.supports import MOST_SUPPORTED

_SHARED = 1  # added to the distance of programs for shared tokens
_FORWARD = 3  # added to the distance of forward passes, which are rarer than training
_UNUSED_SHAPES = 16  # shapes without an adapter whose programs are kept
_CROWDED = 0.75  # of the memory maps: beyond it even shapes in use lose their programs


class StepsByShape:
    """The jitted steps of each shape of adapters. Dropping a shape's steps drops its compiled programs."""

    def __init__(
        self, make: Callable[[], Steps], maps_used: Callable[[], float], forgotten: Callable[[LoraSpec], None]
    ) -> None:
        """Start with no steps.

        make(): returns new steps. maps_used(): the used share of this process's memory maps, 0 to 1. forgotten(shape):
        called when the steps of a shape are dropped. It must drop all references to them.
        """
        self._make, self._maps_used, self._forgotten = make, maps_used, forgotten
        self._steps: dict[LoraSpec, Steps] = {}  # least recently used first

    def steps_of(self, spec: LoraSpec) -> Steps:
        """The steps for adapters of this shape."""
        steps = self._steps.pop(spec, None) or self._make()
        self._steps[spec] = steps
        return steps

    def trim(self, used: Collection[LoraSpec]) -> None:
        """Drop the steps of shapes that are unlikely to be used again. used: the shapes of all adapters.

        While few memory maps are left, the least recently used shapes are dropped, except the most recently used shape.
        Dropped programs are compiled again, or read from the cache, when they are needed.
        """
        unused = [spec for spec in self._steps if spec not in used]
        self._forget(unused[: max(0, len(unused) - _UNUSED_SHAPES)])
        while len(self._steps) > 1 and self._maps_used() > _CROWDED:
            self._forget([next(iter(self._steps))])

    def _forget(self, gone: Collection[LoraSpec]) -> None:
        for spec in gone:
            del self._steps[spec]
            self._forgotten(spec)
        if gone:
            gc.collect()  # functions and their entries in JAX's caches reference each other


def adapter_like(cfg: ModelConfig, mesh: Mesh, spec: LoraSpec) -> Trained:
    """An adapter of this shape on the devices, without values."""
    host = trained_shapes(cfg, mesh, spec)
    lora: Trained = jax.tree.map(like, host, trained_shardings(cfg, mesh, host))
    return lora


def training_programs(
    mesh: Mesh,
    params: Params,
    steps: Steps,
    lora: Trained,
    *,
    optimizer: Optimizer,
    budget: Budget,
    max_context: int,
    tower: VisionTower | None = None,
    trees: bool = False,
    routes: int = 0,
    supports: bool = False,
) -> Iterator[Program]:
    """The programs of an adapter like `lora` with one target per position, the most common first (`distances`).

    mesh: the devices. params: the base model. steps: the jitted functions. lora: the adapter without values.
    optimizer: the adapter's optimizer. budget: the limits of a step. max_context: the maximum number of tokens of an
    example. tower: the model's vision tower; adds the programs of batches with images. trees: adds the programs of
    batches with shared tokens; if there are many shapes, only those of full batches. routes: the experts of a token in
    all layers; adds the programs of all these batches with recorded experts. 0 = none are recorded. supports: adds the
    programs of all these batches with recorded supports.
    """
    whole = replicated(mesh)
    fresh = fresh_state(optimizer, lora)
    state = replace(fresh, count=like(fresh.count, whole))
    spec = OPTIMIZERS[optimizer]
    hyper = like(spec.vector(spec.example), whole)
    what = "all parameters" if isinstance(lora, Params) else f"rank {jax.tree.leaves(lora)[0].shape[-2]}"
    of = f"{what}, {optimizer}"
    yield Program(f"optim_step, {of}", 0, partial(result_of, steps.optimize, lora, lora, state, hyper))
    yield Program(f"a copy of gradients, {of}", 0, partial(result_of, steps.copy, lora))
    grid = budget.grid(row_parts(mesh))
    for (B, T), nearest in distances(grid, max_context).items():
        kinds = [("", batch := batch_like(mesh, B, T))]
        if tower is not None:
            kinds.append((" with images", replace(batch, images=features_like(tower, mesh, B, T))))
        if trees and (grid.few or grid.microbatch_tokens < 2 * B * T):
            kinds.append((" with shared tokens", replace(batch, parents_BT=tokens_like(mesh, B, T))))
        of_tokens = tokens_like(mesh, B, T)
        if routes:
            given = of_tokens.update(shape=(*of_tokens.shape, routes), dtype=np.int16)
            kinds += [(f"{what} with recorded experts", replace(batch, routes_BTn=given)) for what, batch in kinds]
        if supports:
            ids = of_tokens.update(shape=(*of_tokens.shape, MOST_SUPPORTED))
            kinds += [(f"{what} with recorded supports", replace(batch, supports_BTs=ids)) for what, batch in kinds]
        for what, batch in kinds:
            distance = nearest + (0 if batch.parents_BT is None else _SHARED)
            backward = partial(result_of, steps.backward, params, lora, lora, batch)
            yield Program(f"forward_backward of {B}x{T} tokens{what}, {of}", distance, backward)
            forward = partial(result_of, steps.forward, params, lora, batch)
            yield Program(f"forward of {B}x{T} tokens{what}, {of}", distance + _FORWARD, forward)


def distances(grid: Grid, max_context: int) -> dict[Shape, int]:
    """The distance of the programs of each micro-batch shape. Full micro-batches of short rows have distance 0."""
    of_shapes = {
        (B, T): (grid.microbatch_tokens // (B * T)).bit_length() + (T // 512).bit_length()
        for B, T in grid.shapes(max_context)
    }
    return {shape: (distance - min(of_shapes.values())) // 2 for shape, distance in of_shapes.items()}


def batch_like(mesh: Mesh, B: int, T: int) -> DeviceBatch:
    """A micro-batch of B rows on the devices, without values."""
    shape = in_pieces(mesh, B, T)
    rows = sharding(mesh, shape, ROWS)
    return DeviceBatch(
        ints_BTI=jax.ShapeDtypeStruct((*shape, 4), np.int32, sharding=rows),
        floats_BTJK=jax.ShapeDtypeStruct((*shape, len(packed_inputs()), 1), np.float32, sharding=rows),
        choice=like(choose("cross_entropy", {}), replicated(mesh)),
        pieces=shape[0] // B,
    )


def tokens_like(mesh: Mesh, B: int, T: int) -> jax.ShapeDtypeStruct:
    """An integer for each token of a micro-batch of B rows on the devices, without values."""
    shape = in_pieces(mesh, B, T)
    return jax.ShapeDtypeStruct(shape, np.int32, sharding=sharding(mesh, shape, ROWS))


def features_like(tower: VisionTower, mesh: Mesh, B: int, T: int) -> ImageFeatures:
    """The images of a micro-batch of B rows of T tokens on the devices, without values."""
    shape = in_pieces(mesh, B, T)
    images: ImageFeatures = like(tower.no_images(*shape), sharding(mesh, shape, ROWS))
    return images

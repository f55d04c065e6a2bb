"""The training programs of an adapter's shape: every shape of micro-batch that packing may make, and optimizer steps.

Letters: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from tinkerflow.backend.commands import LoraSpec, Optimizer
from tinkerflow.backend.compute.config import ModelConfig
from tinkerflow.backend.compute.full import Trained, shapes, shardings
from tinkerflow.backend.compute.losses import choose
from tinkerflow.backend.compute.mesh import ROWS, replicated, row_parts, sharding
from tinkerflow.backend.compute.optimizer import fresh_state
from tinkerflow.backend.compute.train import DeviceBatch, Steps
from tinkerflow.backend.compute.transformer import Params, Seen
from tinkerflow.backend.compute.warming import Program, like, result_of
from tinkerflow.backend.spec.losses import packed_inputs
from tinkerflow.backend.spec.optimizers import OPTIMIZERS
from tinkerflow.backend.spec.packing import micro_batch_shapes

_FORWARD = 3  # added to the distance of forward passes alone: they are rarer


def adapter_like(cfg: ModelConfig, mesh: Mesh, spec: LoraSpec) -> Trained:
    """An adapter of that shape on the devices, without values."""
    host = shapes(cfg, mesh, spec)
    lora: Trained = jax.tree.map(like, host, shardings(cfg, mesh, host))
    return lora


def training_programs(
    mesh: Mesh,
    params: Params,
    steps: Steps,
    lora: Trained,
    *,
    optimizer: Optimizer,
    microbatch_tokens: int,
    max_context: int,
    sees: ModelConfig | None = None,
) -> Iterator[Program]:
    """The programs of an adapter like `lora`, full micro-batches of short rows first; targets are of one dimension.

    mesh: the devices. params: the base model. steps: the jitted functions. lora: the adapter without values.
    optimizer: the adapter's. microbatch_tokens: padded tokens of a micro-batch at most. max_context: tokens of an
    example at most. sees: the config of a model that sees images, for the programs of batches with images.
    """
    whole = replicated(mesh)
    fresh = fresh_state(optimizer, lora)
    state = replace(fresh, count=like(fresh.count, whole))
    spec = OPTIMIZERS[optimizer]
    hyper = like(spec.vector(spec.example), whole)
    what = "all parameters" if isinstance(lora, Params) else f"rank {jax.tree.leaves(lora)[0].shape[-2]}"
    of = f"{what}, {optimizer}"
    yield Program(f"optim_step, {of}", 1, partial(result_of, steps.optimize, lora, lora, state, hyper))
    yield Program(f"a copy of gradients, {of}", 1, partial(result_of, steps.copy, lora))
    for B, T in micro_batch_shapes(microbatch_tokens, max_context, row_parts(mesh)):
        distance = (microbatch_tokens // (B * T)).bit_length() + (T // 512).bit_length()
        kinds = [("", batch := batch_like(mesh, B, T))]
        if sees is not None:
            kinds.append((" with images", replace(batch, seen=seen_like(sees, mesh, B, T, params.embed_VD.dtype))))
        for what, batch in kinds:
            backward = partial(result_of, steps.backward, params, lora, lora, batch)
            yield Program(f"forward_backward of {B}x{T} tokens{what}, {of}", distance, backward)
            forward = partial(result_of, steps.forward, params, lora, batch)
            yield Program(f"forward of {B}x{T} tokens{what}, {of}", distance + _FORWARD, forward)


def batch_like(mesh: Mesh, B: int, T: int) -> DeviceBatch:
    """A micro-batch on the devices, without values."""
    rows = sharding(mesh, (B, T), ROWS)
    return DeviceBatch(
        ints_BTI=jax.ShapeDtypeStruct((B, T, 4), np.int32, sharding=rows),
        floats_BTJK=jax.ShapeDtypeStruct((B, T, len(packed_inputs()), 1), np.float32, sharding=rows),
        choice=like(choose("cross_entropy", {}), replicated(mesh)),
    )


def seen_like(cfg: ModelConfig, mesh: Mesh, B: int, T: int, dtype: Any) -> Seen:
    """The images of such a micro-batch on the devices, without values. cfg: sees images. dtype: of the weights."""
    assert cfg.vision is not None
    vectors = np.empty((B, T, cfg.vision.vectors, cfg.hidden), dtype)
    seen: Seen = like(
        Seen(np.empty((B, T), np.bool_), np.empty((B, T, 3), np.int32), vectors), sharding(mesh, (B, T), ROWS)
    )
    return seen

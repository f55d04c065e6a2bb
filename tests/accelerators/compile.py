"""Compiles the cases of one target, and prints their records for the budgets. The gate starts this process.

    python compile.py CACHE < cases.json

It needs the environment that `environment.py` makes. CACHE is a folder of programs that are already compiled. The cases
are a JSON list. The output has one line of JSON per case: its name, and its record or the error.
"""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import asdict
from typing import Any

import jax
import jax.numpy as jnp
from jax.errors import JaxRuntimeError
from tests.accelerators.budgets import PLANNED_PROGRAMS, Case, Record
from tests.accelerators.hlo_text import PALLAS, Counts, seconds
from tests.accelerators.model_programs import Programs
from tests.accelerators.models import config
from tests.accelerators.targets import Figures

from tinkerflow.backend.compute.models.vision_tower import most_patches, tower_bytes
from tinkerflow.backend.compute.planning.array_sizes import held_bytes, read_bytes
from tinkerflow.backend.compute.planning.memory_plan import state_bytes
from tinkerflow.backend.compute.planning.roofline import useful_flops
from tinkerflow.backend.compute.planning.topologies import Device, parse_topology
from tinkerflow.backend.compute.sampler.kv_cache import cache_dtype
from tinkerflow.backend.spec.optimizers import DEFAULT_OPTIMIZER, OPTIMIZERS


def record(case: Case, cache: str) -> Record:
    """The figures of one program for the budgets: bytes and flops of one device."""
    programs = Programs(config(case.model), case.target, **dict(case.axes))
    more = {"cache": cache, "unknown_trips": case.unknown_trips, "cublas": bool(programs.cublas)}
    figures: Figures = getattr(programs, case.program)(*case.sizes, **more)
    counts, device = figures.counts, parse_topology(case.target).device
    useful = 0.0
    if case.program == "forward_backward":
        useful = useful_flops(programs.cfg, programs.spec, case.sizes[1]) * math.prod(case.sizes) / programs.mesh.size
    check_flops(counts, useful)
    sent = sum(one.bytes * one.times for one in counts.collectives)
    copies = 2 + len(OPTIMIZERS[DEFAULT_OPTIMIZER].state)  # weights, gradient, moments
    return {
        "arguments": figures.arguments,
        "temporaries": figures.temporaries,
        "peak": figures.peak,
        "memory": programs.limit,
        "flops": counts.flops,
        "bytes": counts.bytes,
        "seconds": figures.seconds,
        "parts": _parts(counts, device, programs.rank, decodes=case.program in ("decode", "prefill")),
        "useful_flops": useful,
        "mfu": useful / device.flops / figures.seconds,
        "largest": {one.dtype: one.nbytes for one in reversed(counts.largest(count=None))},
        "unknown_loops": sorted(loop.name for loop in counts.loops if loop.trips is None),
        "branches": sorted(counts.branches),
        "slices": sum(work.bytes for work in counts.work if re.search("dynamic_(update_)?slice", work.name)),
        "gathered": max((one.bytes for one in counts.collectives if one.kind == "all-gather"), default=0),
        "sent": sent,
        "transfers": sent / device.link,
        "longest_sort": counts.longest_sort,
        "loss_rows": _rows(counts.matmuls(), programs.cfg.vocab // programs.tensor),
        "adapter": held_bytes(programs.lora) * copies,
        "whole_adapter": sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(programs.lora)) * copies,
        "unstated": counts.kernels,
        "kernels": {name: asdict(kernel) for name, kernel in figures.kernels.items()},
        "triton": figures.triton,
        "short_offsets": {name: arrays for name, arrays in figures.short_offsets.items() if arrays},
        **({"planned": _planned(programs, case)} if case.program in PLANNED_PROGRAMS else {}),
        **(
            {
                "step": _step(counts, case.unknown_trips),
                "needed": _needed(programs, case),
                "starts": sum(work.times for work in counts.work) / case.unknown_trips,
            }
            if case.program == "decode"
            else {}
        ),
    }


class MissingFlopsError(Exception):
    """Some flops of a program were not counted."""


def check_flops(counts: Counts, useful: float) -> None:
    """Raise MissingFlopsError if fewer flops were counted than are useful, or a Pallas kernel's flops are unknown."""
    if missing := [name for name in counts.kernels if name.endswith(PALLAS)]:
        raise MissingFlopsError(f"`hlo_kernels.KERNELS` has no flops for {', '.join(missing)}")
    if counts.flops < useful:
        text = f"{counts.flops / 1e12:.2f} TFLOP were counted, but {useful / 1e12:.2f} are useful"
        raise MissingFlopsError(f"{text}: `hlo_kernels.KERNELS` has too few flops for a kernel")


def _planned(programs: Programs, case: Case) -> int:
    """Bytes that the memory plan reserves on each device for an image or for a training step.

    For a training step, these are the bytes besides weights and adapters.
    """
    if case.program == "image":
        vision, context = programs.cfg.vision, programs.max_context
        assert vision is not None and case.sizes == (most_patches(vision, context),)
        return tower_bytes(vision, context, programs.params.embed_VD.dtype.itemsize)
    return programs.plan.uses.temporaries + programs.plan.uses.activations


def _step(counts: Counts, steps: int) -> float:
    """Bytes of one decode step in which no row uses top-k or top-p."""
    filters = "/cond/branch_1_fun/cond/branch_1_fun"  # in `sampling.sample`
    return sum(work.bytes for work in counts.work if filters not in work.name) / steps


def _needed(programs: Programs, case: Case) -> float:
    """The fewest bytes of a decode step on each device.

    The step reads weights and the keys and values that each layer sees. It reads and writes states.
    """
    cfg, (slots, positions), dtype = programs.cfg, case.sizes, programs.params.embed_VD.dtype
    row, cell = 2 * state_bytes(cfg, dtype), jnp.dtype(cache_dtype(programs.kv_cache, dtype.name)).itemsize
    for attention in cfg.attentions:  # a layer that shares keys and values reads them again
        heads, key, value = attention.cached
        row += min(positions, attention.window or positions) * heads * (key + value) * cell
    return read_bytes(programs.params, slots) + slots * row / programs.mesh.size


def _parts(counts: Counts, device: Device, rank: int, *, decodes: bool) -> dict[str, float]:
    """Seconds of the roofline by the purpose of the operations.

    JAX differentiates the layers, but not the loss. decodes: the program is the sampler's, which has only two parts.
    """
    parts: dict[str, float] = {}
    for work in counts.work:
        sizes = [int(size) for shape, _ in work.matmuls for size in re.findall(r"\d+(?=[,\]])", shape)]
        if "attention" in work.name or "splash" in work.name:
            part = "attention over pages" if decodes else "attention"
        elif decodes:
            part = "weights and sampling"
        elif "jvp" not in work.name:
            part = "loss"
        elif not work.flops:
            part = "elementwise work and copies"
        else:
            part = "adapters" if {rank, 2 * rank, 3 * rank} & {*sizes} else "matmuls of the base model"
        parts[part] = parts.get(part, 0) + seconds([work], device)
    return parts


def _rows(matmuls: Any, vocabulary: int) -> int:
    """The rows of the largest matmul, by flops, whose result has a column for each token of the vocabulary, or 0."""
    results = ([int(size) for size in re.findall(r"\d+", one.rsplit("[", 1)[1])] for one in matmuls)
    return next((math.prod(dims) // vocabulary for dims in results if vocabulary in dims), 0)


def main(cache: str) -> None:
    """Compile the cases on standard input."""
    for fields in json.load(sys.stdin):
        case = Case(**{**fields, "sizes": tuple(fields["sizes"]), "axes": tuple(map(tuple, fields["axes"]))})
        try:
            answer: dict[str, Any] = {"record": record(case, cache)}
        except (JaxRuntimeError, MissingFlopsError) as error:  # JaxRuntimeError: the program does not fit the device
            answer = {"error": str(error)[:2000]}
        print(json.dumps({"name": case.name, **answer}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

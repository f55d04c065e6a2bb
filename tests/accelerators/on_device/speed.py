"""Measures training and decoding of a model with random weights, through the executor as in a worker.

Training: tokens per second, MFU by `roofline.useful_flops`, and whether repeated steps give the same bits. Decoding:
the time of a step, from the difference between long and short answers, and its share of the memory bandwidth.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np
from tests.accelerators.models import MODELS
from tests.accelerators.on_device.measure import (
    TINY,
    Run,
    example,
    make_executor,
    memory_gb,
    peaks,
    reply_of,
    same_bits,
    sample,
)

from tinkerflow.backend.compute.executor import Executor
from tinkerflow.backend.compute.models.families import parse_config
from tinkerflow.backend.compute.planning.array_sizes import read_bytes
from tinkerflow.backend.compute.planning.roofline import useful_flops
from tinkerflow.backend.spec.commands import (
    CreateAdapter,
    DropAdapter,
    Example,
    ExportAdapter,
    Forward,
    LoraSpec,
    OptimStep,
    PublishSnapshot,
    SampleRequest,
)
from tinkerflow.backend.spec.optimizers.adamw import AdamParams

_ROUNDS = 3
_LEAST_SECONDS = 45  # seconds that a new shape needs to compile and run


def measure(run: Run) -> None:
    """Measure the run's model, or a tiny model in a tiny run."""
    fields = TINY if run.tiny else MODELS[run.model]
    context, slots = (256, 4) if run.tiny else (32768, 256)
    began = time.perf_counter()
    made = make_executor(fields, max_context=context, sample_slots=slots, microbatch_tokens=256 if run.tiny else 0)
    figures = {"parameters": made.parameters, "microbatch_tokens": made.microbatch_tokens, "context": made.context}
    run.add("start", None, s=time.perf_counter() - began, **figures, memory_gb=memory_gb())
    spec = LoraSpec(8 if run.tiny else 32)
    for count, tokens in [(4, 64)] if run.tiny else [(64, 1024), (8, 8192), (1, 32768)]:
        with run.attempt(f"training of {count} x {tokens} tokens"):
            if tokens <= made.context and run.has_time(f"training of {count} x {tokens} tokens", _LEAST_SECONDS):
                _train(run, made, spec, count, tokens)
    with run.attempt("the same two steps twice"):
        _repeat(run, made, spec)
    reply_of(made, CreateAdapter("s", spec, 5))
    reply_of(made, PublishSnapshot("s", "snapshot"))
    for rows in (1, 3) if run.tiny else (64, 1, 256):
        with run.attempt(f"decoding of {rows} sequences"):
            if run.has_time(f"decoding of {rows} sequences", _LEAST_SECONDS):
                _decode(run, made, rows)


def _step(made: Executor, adapter: str, data: tuple[Example, ...]) -> tuple[float, float]:
    """Run one forward_backward and optimizer step. Returns its seconds, and the mean loss of a token."""
    began = time.perf_counter()
    result = reply_of(made, Forward(adapter, data, "cross_entropy"))
    reply_of(made, OptimStep(adapter, AdamParams(1e-3)))
    return time.perf_counter() - began, result.loss_sum / sum(len(one.tokens_T) for one in data)


def _data(seed: int, vocab: int, sizes: list[int]) -> tuple[Example, ...]:
    draws = [np.random.default_rng([seed, number]) for number in range(len(sizes))]
    return tuple(example(draw.integers(0, vocab, size + 1)) for draw, size in zip(draws, sizes, strict=True))


def _train(run: Run, made: Executor, spec: LoraSpec, count: int, tokens: int) -> None:
    cfg = parse_config(TINY if run.tiny else MODELS[run.model], name=run.model)
    reply_of(made, DropAdapter("a"))
    reply_of(made, CreateAdapter("a", spec, 0))
    data = _data(0, cfg.vocab, [tokens] * count)
    first, loss = _step(made, "a", data)
    steps = [_step(made, "a", data) for _ in range(_ROUNDS)]
    rate = count * tokens / min(took for took, _ in steps)
    figures: dict[str, Any] = {"first_s": first, "tokens_per_s": rate, "losses": [round(x, 4) for _, x in steps]}
    if (device := peaks()) is not None:
        figures["share"] = figures["mfu"] = rate * useful_flops(cfg, spec, tokens) / device.flops / len(jax.devices())
    ok = bool(np.isfinite(steps[-1][1])) and steps[-1][1] < loss
    run.add(f"training of {count} x {tokens} tokens", ok, **figures, memory_gb=memory_gb())


def _repeat(run: Run, made: Executor, spec: LoraSpec) -> None:
    vocab = (TINY if run.tiny else MODELS[run.model])["vocab_size"]
    data, found = _data(1, vocab, [60, 33] if run.tiny else [1000, 700, 333, 1024, 64]), []
    for adapter in ("x", "y"):
        reply_of(made, CreateAdapter(adapter, spec, 3))
        losses = [_step(made, adapter, data)[1] for _ in range(2)]
        state = reply_of(made, ExportAdapter(adapter, optimizer=True))
        found.append((losses, dict(state.weights), dict(state.moments)))
        reply_of(made, DropAdapter(adapter))
    run.add("the same two steps twice", same_bits(*found), same_bits=same_bits(*found))


def _decode(run: Run, made: Executor, rows: int) -> None:
    cfg = parse_config(TINY if run.tiny else MODELS[run.model], name=run.model)
    prompt, short, long = (20, 9, 65) if run.tiny else (500, 17, 145)
    times: dict[int, float] = {}
    for turn, tokens in enumerate((short, long, short, long)):  # the first two compile
        drawn = np.random.default_rng([rows, turn]).integers(0, cfg.vocab, (rows, prompt)).astype(np.int32)
        requests = [
            SampleRequest(f"{rows}.{turn}.{i}", "o", "snapshot", drawn[i], 1, tokens, 1.0, -1, 1.0, i)
            for i in range(rows)
        ]
        began = time.perf_counter()
        results = sample(made, requests)
        times[tokens] = time.perf_counter() - began
        assert sum(len(result.sequences[0].tokens_T) for result in results.values()) == rows * tokens
    per_step = (times[long] - times[short]) / (long - short)
    figures: dict[str, Any] = {
        "ms_per_step": per_step * 1e3,
        "tokens_per_s": rows / per_step,
        "tokens_per_s_with_prefill": rows * long / times[long],
    }
    if (device := peaks()) is not None:
        cell = 2 * cfg.cached_cell  # bytes of a position in bfloat16
        moved = read_bytes(made._params, rows) + rows * (prompt + long / 2) * cell
        figures["share"] = moved / device.bandwidth / per_step
    run.add(f"decoding of {rows} sequences", None, **figures, memory_gb=memory_gb())

"""Results, timing, and executors with random weights: the parts that all stages share."""

from __future__ import annotations

import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tests.accelerators.models import MODELS

from tinkerflow.backend.compute import executor, platforms
from tinkerflow.backend.compute.models.params import params_like
from tinkerflow.backend.compute.planning.topologies import DEVICES, Device
from tinkerflow.backend.spec.commands import Example, GroupConfig, SampleRequest, SampleStep

TINY = {
    **MODELS["0.6B"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 512,
}
_KINDS = {"tpu v5 lite": "v5e", "tpu v5": "v5p", "tpu v6 lite": "v6e"}  # devices by JAX's names of TPUs


@dataclass(frozen=True)
class Run:
    """One stage on one platform.

    stage: its name. platform: cpu, cuda or tpu. tiny: small shapes, with kernels interpreted on the CPU. model: the
    model of `speed`, a name of `models.MODELS`. folder: for results. deadline: in the time of `time.monotonic`.
    """

    stage: str
    platform: str
    tiny: bool
    model: str
    folder: Path
    deadline: float

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def has_time(self, name: str, least: float) -> bool:
        """Whether `least` seconds are left. Otherwise the result `name` is recorded as skipped."""
        if self.left < least:
            self.add(name, skipped="no time is left")
        return self.left >= least

    def add(self, name: str, ok: bool | None = None, **figures: Any) -> None:
        """Print a result, and append it to results.jsonl. ok: whether the result is correct; None for a mere figure."""
        rounded = {key: float(f"{value:.5g}") if isinstance(value, float) else value for key, value in figures.items()}
        line = json.dumps({"stage": self.stage, "name": name, "ok": ok, **rounded})
        print(line, flush=True)
        with (self.folder / "results.jsonl").open("a") as file:
            file.write(line + "\n")

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Record an error of the block as a wrong result, so that the stage continues."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - it becomes a wrong result
            self.add(name, False, error=f"{type(error).__name__}: {error}"[:1500])


def open_platform(name: str) -> None:
    """Prepare JAX as a worker does: only the devices of `name`, our compiler flags, and our share of the memory."""
    os.environ.update(platforms.environment(name, os.environ, 1))
    jax.config.update("jax_platforms", name)
    jax.devices()


def peaks() -> Device | None:
    """The device with its peak rates, or None if it is not in `topologies.DEVICES`, as for CPUs."""
    found = jax.local_devices()[0]
    kind = found.device_kind.lower()
    if kind in _KINDS:
        return DEVICES[_KINDS[kind]]
    words = kind.replace("geforce rtx ", "rtx").replace("-", " ").split()
    device = next((device for name, device in DEVICES.items() if name in words), None)
    if device is not None and device.name == "a100" and (found.memory_stats() or {})["bytes_limit"] < 40 * 2**30:
        return DEVICES["a100-40gb"]
    return device


def memory_gb() -> dict[str, float]:
    """The device's memory in use, its peak and its limit in GB, as far as the platform reports them."""
    stats = jax.local_devices()[0].memory_stats() or {}
    names = ("bytes_in_use", "peak_bytes_in_use", "bytes_limit")
    return {name: round(stats[name] / 1e9, 2) for name in names if name in stats}


def seconds(call: Callable[[], Any], rounds: int = 5) -> float:
    """The time of one call: the median of `rounds` means, each over 0.1 s of calls without waiting in between."""
    jax.block_until_ready(call())
    began = time.perf_counter()
    jax.block_until_ready(call())
    calls = max(1, min(50, int(0.1 / (time.perf_counter() - began))))
    found = []
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(calls):
            last = call()
        jax.block_until_ready(last)
        found.append((time.perf_counter() - began) / calls)
    return statistics.median(found)


def relative_error(found: Any, wanted: Any) -> float:
    """The largest |found - wanted| / |wanted| of two trees of arrays, with Euclidean norms. NaN counts as infinite."""
    errors = [0.0]
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        a, b = (np.asarray(x).astype(np.float64) for x in (one, other))
        error = float(np.linalg.norm(a - b)) / max(float(np.linalg.norm(b)), 1e-30)
        errors.append(math.inf if math.isnan(error) else error)
    return max(errors)


def same_bits(one: Any, other: Any) -> bool:
    """Whether two trees of arrays are equal, bit for bit."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def make_executor(fields: dict[str, Any], **config: Any) -> executor.Executor:
    """An executor of a model with random weights, which are made on the device instead of read from a file.

    fields: of config.json. config: fields of `GroupConfig` that differ from the defaults here.
    """

    def load_params(cfg: Any, _: Any, mesh: Any, dtype: str, *__: Any, base_weights: Any = "full") -> Any:
        return _random_like(params_like(cfg, mesh, dtype, base_weights=base_weights))

    vars(executor)["load_params"] = load_params
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(fields))
    defaults: dict[str, Any] = {
        "model_path": str(folder),
        "dtype": "auto",
        "fsdp": 0,
        "tensor": 1,
        "max_context": 512,
        "microbatch_tokens": 0,
        "sample_slots": 4,
        "decode_chunk": 8,
        "compile_cache_dir": "",
    }
    return executor.Executor(GroupConfig(**{**defaults, **config}), lambda _: None, 1, 0)


def example(tokens: np.ndarray) -> Example:
    """A training sequence that predicts each token after the first."""
    drawn = tokens.astype(np.int32)
    return Example(drawn[:-1], drawn[1:, None], np.ones((len(drawn) - 1, 1), np.float32))


def sample(made: executor.Executor, requests: Sequence[SampleRequest]) -> dict[str, Any]:
    """The results of these requests by id. RuntimeError if a request fails."""
    results, progress = dict[str, Any](), reply_of(made, SampleStep(tuple(requests)))
    while True:
        for result in progress.finished:
            if result.error:
                raise RuntimeError(result.error)
            results[result.request_id] = result
        if not (progress.active or progress.waiting):
            return results
        progress = reply_of(made, SampleStep())


def reply_of(made: executor.Executor, command: Any) -> Any:
    """Execute a command, and return its reply after the devices have computed it."""
    reply = made.execute(command)
    return reply() if callable(reply) else reply


def _random_like(tree: Any) -> Any:
    """Arrays with these shapes and shardings, and with the same numbers on every platform.

    Norms are 1. Other weights are hashes of their positions, uniform with standard deviation 0.02.
    """

    def values(name: str, like: Any) -> Any:
        if "norm" in name:
            return jnp.ones(like.shape, like.dtype)
        salt = sum((i + 1) * ord(letter) for i, letter in enumerate(name)) * 2654435761 % 2**32
        hashed, stride = jnp.full(like.shape, salt, jnp.uint32), 1
        for axis in reversed(range(len(like.shape))):
            hashed += jax.lax.broadcasted_iota(jnp.uint32, like.shape, axis) * jnp.uint32(stride % 2**32)
            stride *= like.shape[axis]
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):  # the finalizer of MurmurHash3
            hashed = (hashed ^ (hashed >> shift)) * jnp.uint32(factor)
        hashed ^= hashed >> 16
        unit = (hashed >> 8).astype(jnp.float32) * jnp.float32(2**-24)
        return ((unit - 0.5) * jnp.float32(0.02 * 12**0.5)).astype(like.dtype)

    def made(path: Any, like: Any) -> Any:
        name = jax.tree_util.keystr(path)
        return jax.jit(lambda: values(name, like), out_shardings=like.sharding)()

    return jax.tree_util.tree_map_with_path(made, tree)

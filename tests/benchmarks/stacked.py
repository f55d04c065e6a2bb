"""Steps of several adapters of one shape: one after another, or stacked in one call (jax.vmap over the adapters).

    python -m tests.benchmarks.stacked [--model FOLDER] [--adapters 8] [--rows 2] [--tokens 32] [--rounds 4]

The base weights are the same for all, so a stacked call multiplies them by more rows at once; but its results may
differ in their last bits from those of the adapter alone, and what an adapter learns would depend on its company.
Prints the CPU-milliseconds of both, for forward_backward and for optim_step, and whether the bits are the same.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tinkerflow.backend.compute.mesh import make_mesh
from tinkerflow.backend.compute.models.families import load_config
from tinkerflow.backend.compute.models.lora import Lora
from tinkerflow.backend.compute.models.lora_weights import init_lora
from tinkerflow.backend.compute.models.params import load_params
from tinkerflow.backend.compute.training.budget import Budget
from tinkerflow.backend.compute.training.optimizer import fresh_state, step
from tinkerflow.backend.compute.training.token_losses import choose
from tinkerflow.backend.compute.training.train import DeviceBatch, make_steps
from tinkerflow.backend.spec.commands import LoraSpec
from tinkerflow.backend.spec.losses import packed_inputs
from tinkerflow.backend.spec.optimizers import OPTIMIZERS
from tinkerflow.backend.spec.optimizers.adamw import AdamParams
from tinkerflow.deployments.tiny_model import make_tiny

RANK = 32
CALLS = 20


def main() -> None:
    """Parse the command line, measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hugging Face folder; the tiny model without")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=4, help="of which the best counts")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = args.model or str(make_tiny(Path(scratch) / "tiny"))
        cfg, mesh = load_config(model), make_mesh(1, 1)
        params, steps = load_params(cfg, model, mesh, "float32"), make_steps(cfg, mesh, Budget(1024, 2**30))
    rng = np.random.default_rng(0)

    def batch() -> DeviceBatch:
        shape = (args.rows, args.tokens)
        numbers = [rng.integers(0, cfg.vocab, shape), np.tile(np.arange(args.tokens), (args.rows, 1)), np.ones(shape)]
        ints = np.stack([*numbers, rng.integers(0, cfg.vocab, shape)], axis=-1).astype(np.int32)
        floats = np.ones((*shape, len(packed_inputs()), 1), np.float32)
        return DeviceBatch(ints_BTI=ints, floats_BTJK=floats, choice=choose("cross_entropy", {}))

    def adapter(seed: int) -> Lora:
        noise = np.random.default_rng(seed)
        fresh = init_lora(cfg, LoraSpec(RANK), seed)
        lora: Lora = jax.tree.map(
            lambda x: jnp.asarray(x + 0.01 * noise.normal(size=x.shape).astype(np.float32)), fresh
        )
        return lora

    loras, batches = [adapter(seed) for seed in range(args.adapters)], [batch() for _ in range(args.adapters)]
    # Gradients are not donated here, on either side: so the same ones can be given again.
    alone, alone_step = jax.jit(steps.backward.__wrapped__), jax.jit(step)  # type: ignore[attr-defined]
    grads = [
        alone(params, lora, jax.tree.map(jnp.zeros_like, lora), one)[0]
        for lora, one in zip(loras, batches, strict=True)
    ]
    states = [fresh_state("adamw", jax.tree.map(jnp.zeros_like, lora)) for lora in loras]
    hyper = OPTIMIZERS["adamw"].vector(AdamParams())
    compare("forward_backward", lambda *one: alone(params, *one), (loras, grads, batches), args.rounds)
    compare("optim_step", lambda *one: alone_step(*one, hyper), (loras, grads, states), args.rounds)


def compare(name: str, call: Callable[..., Any], inputs: tuple[list[Any], ...], rounds: int) -> None:
    """Measure `call` of each entry of the inputs, and of all of them stacked."""
    count = len(inputs[0])

    @jax.jit
    def together(*inputs: list[Any]) -> list[Any]:
        made = jax.vmap(call)(*(jax.tree.map(lambda *leaves: jnp.stack(leaves), *each) for each in inputs))
        return [jax.tree.map(lambda leaf: leaf[number], made) for number in range(count)]  # noqa: B023

    def in_turn() -> list[Any]:
        return [call(*one) for one in zip(*inputs, strict=True)]

    first, second = in_turn(), together(*inputs)
    same = all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True))
    costs = [min(cpu(work) for _ in range(rounds)) for work in (in_turn, lambda: together(*inputs))]
    print(
        f"{name} of {count} adapters: {costs[0]:.1f} CPU-ms one after another, {costs[1]:.1f} stacked; "
        f"{'the same bits' if same else 'other bits'}",
        flush=True,
    )


def cpu(work: Callable[[], Any]) -> float:
    """CPU-milliseconds of one call."""
    began = time.process_time()
    for _ in range(CALLS):
        jax.block_until_ready(work())
    return 1e3 * (time.process_time() - began) / CALLS


if __name__ == "__main__":
    main()

"""A process with several CPU devices for test_decode: one step with and without matrices that kernels read in place."""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any, cast

import jax


def main() -> None:
    """argv: the model's folder, base_weights, and the axes fsdp, expert and tensor. Prints a JSON object.

    difference: the largest difference of hidden states, as a share of the largest hidden state. shapes: of the matrices
    that a device reads in place. parts: the shapes of a device's parts of all matrices that may be read in place.
    of_inputs: for each adapter that is read in place, whether the devices split its inputs.
    """
    folder, base_weights, *sizes = sys.argv[1:]
    fsdp, expert, tensor = map(int, sizes)
    jax.config.update("jax_num_cpu_devices", fsdp * expert * tensor)
    import jax.numpy as jnp
    import numpy as np

    from tinkerflow.backend.compute.kernels import adapter_gpu, grouped_gpu
    from tinkerflow.backend.compute.mesh import make_mesh
    from tinkerflow.backend.compute.models.families import load_config
    from tinkerflow.backend.compute.models.params import load_params
    from tinkerflow.backend.compute.platforms import CUDA, compiling_for
    from tinkerflow.backend.compute.sampler import forward
    from tinkerflow.backend.compute.sampler.kv_cache import empty_cache
    from tinkerflow.backend.compute.sampler.pages import PAGE
    from tinkerflow.backend.compute.sampler.snapshot_cache import empty_stack

    cfg, mesh = load_config(folder), make_mesh(fsdp, tensor, expert)
    params = load_params(cfg, folder, mesh, "float32", base_weights=cast(Any, base_weights))
    cache = empty_cache(cfg, mesh, 8, PAGE, "float32", False)
    random = np.random.default_rng(0)
    empty = empty_stack(cfg, mesh, (32, 32), "float32", False, False)
    stack = jax.tree.map(lambda part: jnp.asarray(random.normal(size=part.shape) / 4, jnp.float32), empty)
    tables_SW, columns_S2 = np.array([[1], [2], [4], [6]], np.int32), np.array([[0, 0], [8, 24]] * 2, np.int32)
    tokens_SQ = np.array([[5], [7], [11], [13]], np.int32)
    shapes: list[tuple[int, ...]] = []
    inputs: list[bool] = []

    def hidden() -> Any:
        def of(params: Any, stack: Any, cache: Any) -> Any:
            inputs = forward.StepInputs(tokens_SQ, jnp.zeros(4, jnp.int32), tables_SW=tables_SW, columns_S2=columns_S2)
            return forward.run_layers(cfg, mesh, params, stack, cache, None, inputs)[2]

        program = jax.jit(of).lower(params, stack, cache)
        assert "tensor<0x" not in program.as_text(), "JAX 0.11 ends a process whose `shard_map` gets an empty array"
        return np.asarray(program.compile()(params, stack, cache))

    def layer_products(x: Any, stacks: Any, *rest: Any, **more: Any) -> Any:
        shapes.extend(jax.tree.leaves(one)[0].shape[1:] for one in stacks)
        return own(x, stacks, *rest, interpret=True, **more)

    def in_place(columns_B2: Any, width: int) -> Any:
        update = updates(columns_B2, width, interpret=True)

        def of_part(x: Any, pairs: Any, part: Any) -> Any:
            inputs.extend([part.of_inputs] * len(pairs))
            return update(x, pairs, part)

        return of_part

    expected = hidden()
    with compiling_for(CUDA):
        names = forward._in_place(cfg, params)
    own, updates = grouped_gpu.layer_products, adapter_gpu.in_place
    grouped_gpu.layer_products = layer_products
    adapter_gpu.in_place = in_place
    grouped_gpu.product = partial(grouped_gpu.product, interpret=True)
    forward._in_place = lambda *_: names
    found = hidden()
    difference = float(np.max(np.abs(found - expected)) / np.max(np.abs(expected)))
    leaves = [jax.tree.leaves(params.layers[name])[0] for name in names]
    parts = sorted({leaf.sharding.shard_shape(leaf.shape)[1:] for leaf in leaves})
    print(json.dumps({"difference": difference, "shapes": sorted(set(shapes)), "parts": parts, "of_inputs": inputs}))


if __name__ == "__main__":
    main()

"""Run by test_experts with eight CPU devices: writes the results of a layer's mixture on several meshes to a file."""

from __future__ import annotations

import functools
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import jax


def main() -> None:
    """argv: model folder, result file. Meshes are named by their sizes of fsdp, expert and tensor."""
    jax.config.update("jax_num_cpu_devices", 8)
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import AxisType

    from tinkerflow.backend.compute.kernels import grouped_tpu
    from tinkerflow.backend.compute.kernels.matmul import OfLayer
    from tinkerflow.backend.compute.mesh import EXPERT, FSDP, TENSOR, expert_axes
    from tinkerflow.backend.compute.models.families import load_config, projections
    from tinkerflow.backend.compute.models.layers import EXPERT_MATRICES
    from tinkerflow.backend.compute.models.layers.step import LayerStep
    from tinkerflow.backend.compute.models.lora import LoraPair, apply_one
    from tinkerflow.backend.compute.models.params import load_params, params_like
    from tinkerflow.backend.compute.platforms import TPU, compiling_for
    from tinkerflow.backend.compute.sampler.snapshot_cache import stack_apply
    from tinkerflow.backend.compute.training.budget import Budget
    from tinkerflow.backend.compute.training.train import make_steps
    from tinkerflow.backend.compute.training.train_programs import adapter_like, batch_like
    from tinkerflow.backend.spec.commands import LoraSpec

    folder, file = sys.argv[1:]
    cfg = load_config(folder)
    rng = np.random.default_rng(0)
    y_BTD = rng.normal(size=(4, 5, cfg.hidden)).astype(np.float32)
    y_BTD[1:] = y_BTD[0, :3] = y_BTD[0, 0]  # one device's experts get most tokens, and more than it computes at once
    columns_B2 = jnp.asarray([[0, 0], [0, 3], [3, 4], [0, 3]], jnp.int32)

    def random_pair(name: str) -> LoraPair:
        sizes = projections(cfg)[name].inputs, projections(cfg)[name].outputs
        A, B = (rng.normal(size=(cfg.experts, 4, n), scale=0.1).astype(np.float32) for n in sizes)
        return LoraPair(A=A, B=B)

    pairs = {name: random_pair(name) for name in EXPERT_MATRICES}
    experts = cfg.mixture
    assert experts is not None

    def mixture(mesh: Any, layer: Any, pairs: Any, y_BTD: Any, apply: Any) -> Any:
        owners = (EXPERT,) if apply is apply_one else expert_axes(mesh, cfg.experts)  # training, or sampling
        step = LayerStep(mesh, layer, pairs, {}, None, apply, owners=owners).of_layer(experts.projections())
        return experts.forward(step, y_BTD, y_BTD)

    found: dict[str, Any] = {}
    for kind, sizes in itertools.product(("int8", "nf4"), ((1, 1, 1), (2, 2, 2), (3, 1, 2))):
        devices = jax.devices()[: int(np.prod(sizes))]
        mesh = jax.make_mesh(sizes, (FSDP, EXPERT, TENSOR), axis_types=(AxisType.Auto,) * 3, devices=devices)
        params: Any = load_params(cfg, folder, mesh, "float32", base_weights=kind)

        def both(layers: Any, y: Any, pairs: Any, mesh: Any = mesh) -> Any:
            layer = jax.tree.map(lambda stacked: stacked[1], layers)

            def slope(y: Any, pairs: Any) -> Any:
                return jnp.sum(jnp.sin(mixture(mesh, layer, pairs, y, apply_one)))

            sampled = mixture(mesh, layer, pairs, y, stack_apply(columns_B2))
            return sampled, *jax.value_and_grad(slope, argnums=(0, 1))(y, pairs)

        leaves = jax.tree.leaves(jax.jit(both)(params.layers, y_BTD, pairs))
        name = f"{kind} {'x'.join(map(str, sizes))}"
        found[name] = [np.asarray(leaf).tolist() for leaf in leaves]
        found[f"{name} holds"] = list(jax.tree.leaves(params.layers["gate"])[0].addressable_shards[0].data.shape)
    mesh = jax.make_mesh((2, 2, 2), (FSDP, EXPERT, TENSOR), axis_types=(AxisType.Auto,) * 3)
    params = load_params(cfg, folder, mesh, "float32")  # over all devices; on TPUs, decoding reads the stack in place
    stacks = {name: LoraPair(A=np.stack([pair.A] * 2), B=np.stack([-pair.B, pair.B])) for name, pair in pairs.items()}
    rest = {name: stacked[1] for name, stacked in params.layers.items() if name not in EXPERT_MATRICES}
    whole = (
        {name: OfLayer(params.layers[name], jnp.int32(1)) for name in EXPERT_MATRICES},
        {name: OfLayer(stack, jnp.int32(1)) for name, stack in stacks.items()},
    )
    own = {name: params.layers[name][1] for name in EXPERT_MATRICES}, pairs
    apply = stack_apply(columns_B2)

    def slopes(mesh: Any, layer: Any) -> Any:
        """The gradients of training, with respect to the input and to the pairs."""

        def loss(y: Any, pairs: Any) -> Any:
            return jnp.sum(jnp.sin(mixture(mesh, {**rest, **layer}, pairs, y, apply_one)))

        leaves = jax.tree.leaves(jax.jit(jax.grad(loss, argnums=(0, 1)))(y_BTD, pairs))
        return [np.asarray(leaf).tolist() for leaf in leaves]

    found["own slopes"] = slopes(mesh, own[0])
    found["own"] = np.asarray(mixture(mesh, {**rest, **own[0]}, own[1], y_BTD, apply)).tolist()
    grouped_tpu.product = functools.partial(grouped_tpu.product, interpret=True)
    with compiling_for(TPU):
        found["in place"] = np.asarray(mixture(mesh, {**rest, **whole[0]}, whole[1], y_BTD, apply)).tolist()
        found["slopes in place"] = slopes(mesh, whole[0])  # devices send tokens
        unequal = jax.make_mesh((3, 1, 2), mesh.axis_names, axis_types=mesh.axis_types, devices=jax.devices()[:6])
        found["slopes of gathered"] = slopes(unequal, jax.device_put(whole[0], jax.devices()[0]))
    for sizes in ((1, 1, 1), (1, 8, 1)):
        devices = jax.devices()[: int(np.prod(sizes))]
        mesh = jax.make_mesh(sizes, (FSDP, EXPERT, TENSOR), axis_types=(AxisType.Auto,) * 3, devices=devices)
        lora = adapter_like(cfg, mesh, LoraSpec(4))
        args = params_like(cfg, mesh, "float32"), lora, lora, batch_like(mesh, 8, 256)
        compiled = make_steps(cfg, mesh, Budget(1024, 2**30)).backward.lower(*args).compile()
        found[f"{'x'.join(map(str, sizes))} flops"] = compiled.cost_analysis()["flops"]
    Path(file).write_text(json.dumps(found))


main()

"""Run by test_context_parallel with eight CPU devices: trains one row on several meshes, and writes the results."""

from __future__ import annotations

import sys
from typing import Any

import jax


def main() -> None:
    """argv: model folder, file for the arrays, and meshes as sizes of fsdp, expert and tensor, for example 4x2x1.

    The first and the last mesh also train all parameters, and a row of examples that share tokens.
    """
    jax.config.update("jax_num_cpu_devices", 8)
    import numpy as np

    from tinkerflow.backend.compute.mesh import over, put, replicated, whole_to_host
    from tinkerflow.backend.compute.models.families import load_config
    from tinkerflow.backend.compute.models.layers.delta_rule import chunk_tokens
    from tinkerflow.backend.compute.models.params import load_params
    from tinkerflow.backend.compute.training.attention import attend_trees
    from tinkerflow.backend.compute.training.budget import Budget
    from tinkerflow.backend.compute.training.full_parameters import load_weights, zero_gradients
    from tinkerflow.backend.compute.training.packing import pack
    from tinkerflow.backend.compute.training.token_losses import choose
    from tinkerflow.backend.compute.training.train import make_steps, needs_tree_program, to_devices
    from tinkerflow.backend.compute.training.train_programs import adapter_like
    from tinkerflow.backend.pool.jax_setup import choose_partitioner
    from tinkerflow.backend.spec.commands import Example, LoraSpec

    choose_partitioner(8)
    folder, file, *meshes = sys.argv[1:]
    cfg, rng = load_config(folder), np.random.default_rng(0)

    def example(tokens: Any, prompt: int = 0) -> Example:
        weights, targets = rng.random((len(tokens), 1), np.float32), np.roll(tokens, -1)[:, None]
        weights[:prompt], targets[:prompt] = 0, 0
        return Example(tokens.astype(np.int32), targets.astype(np.int32), weights)

    tokens = [rng.integers(0, cfg.vocab, length) for length in (150, 60, 40)]
    equal = [np.concatenate([tokens[0][:96], more]) for more in tokens[1:]]
    (row,) = pack([example(one) for one in tokens], microbatch_tokens=256)
    (tree,) = pack([example(one, 96) for one in equal], microbatch_tokens=256, branch_tokens=chunk_tokens())
    assert row.tokens_BT.shape == tree.tokens_BT.shape == (1, 256) and tree.shares and not row.shares
    q, k, v, slope = (rng.normal(size=(1, 256, heads, 8)).astype(np.float32) for heads in (8, 2, 2, 8))
    sinks_H, adapter = rng.normal(size=8).astype(np.float32), dict[int, Any]()
    found: dict[str, Any] = {}
    for name in meshes:
        fsdp, expert, tensor = (int(size) for size in name.split("x"))
        mesh = over(jax.devices()[: fsdp * expert * tensor], fsdp, tensor, expert)
        params, steps = load_params(cfg, folder, mesh, "float32"), make_steps(cfg, mesh, Budget(256, 2**30))
        leaves, shape = jax.tree.flatten(adapter_like(cfg, mesh, LoraSpec(4)))
        for at, leaf in enumerate(leaves):
            adapter.setdefault(at, rng.normal(size=leaf.shape, scale=0.1).astype(np.float32))
        lora = shape.unflatten(put(adapter[at], leaf.sharding) for at, leaf in enumerate(leaves))
        runs = {"": (lora, row)}
        if name in (meshes[0], meshes[-1]):
            runs |= {"full": (load_weights(cfg, folder, mesh), row), "tree": (lora, tree)}
        for kind, (trained, batch) in runs.items():
            given = to_devices(batch, choose("cross_entropy", {}), mesh, trees=needs_tree_program(cfg))
            nothing = [
                zero_gradients(cfg, mesh)
                if kind == "full"
                else shape.unflatten(put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding) for leaf in leaves)
                for _ in range(2)
            ]
            compiled = steps.backward.lower(params, trained, nothing[0], given).compile()
            ran = whole_to_host(mesh, [compiled(params, trained, grads, given) for grads in nothing])
            first, second = (
                (batch.in_rows(scored.logprobs_BTK), scored.loss, *jax.tree.leaves(grads)) for grads, scored in ran
            )
            assert all(np.array_equal(one, other) for one, other in zip(first, second, strict=True)), (name, kind)
            found |= {f"{name} {kind} {at}": array for at, array in enumerate(first)}
            if not kind:
                found[f"{name} flops"] = compiled.cost_analysis()["flops"]
                alone = steps.forward(params, trained, given)
                found[f"{name} forward 0"] = batch.in_rows(np.asarray(alone.logprobs_BTK))
        pieces = fsdp * expert

        def cut(x: Any, pieces: int = pieces) -> Any:
            return x.reshape(pieces, -1, *x.shape[2:])

        for window, sinks in ((None, sinks_H), (40, None), (40, sinks_H)):
            attend = attend_trees(jax.numpy.asarray(cut(row.ends_BT)), mesh, pieces=pieces)

            def both(q: Any, k: Any, v: Any, slope: Any, *, attend: Any = attend, how: Any = (window, sinks)) -> Any:
                o, pull = jax.vjp(lambda q, k, v: attend(q, k, v, window=how[0], sinks_H=how[1]), q, k, v)
                return o, *pull(slope)

            on_devices = put([cut(x) for x in (q, k, v, slope)], replicated(mesh))
            for at, array in enumerate(whole_to_host(mesh, jax.jit(both)(*on_devices))):
                found[f"{name} attention {window} {sinks is None} {at}"] = array.reshape(1, 256, *array.shape[2:])
    np.savez(file, **found)


main()

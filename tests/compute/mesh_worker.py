"""A process with several CPU devices for test_mesh: trains and samples as asked, and prints the results as JSON."""

from __future__ import annotations

import hashlib
import json
import sys

import jax


def main() -> None:
    """argv: model folder, actions, number of devices, the axes fsdp (0 = the remaining devices), expert and tensor.

    An optional argument follows: the most devices that a row is split over. With more than 1, a micro-batch has at most
    64 tokens. The actions, separated by commas, are names of `runs`, "sampled" to sample the last of them, and
    "supports" to train adamw on a top-k sample with its supports.
    """
    folder, wanted = sys.argv[1], sys.argv[2].split(",")
    devices, fsdp, expert, tensor, context = (*map(int, sys.argv[3:]), 1)[:5]
    jax.config.update("jax_num_cpu_devices", devices)
    import numpy as np

    from tinkerflow.backend.compute.executor import Executor
    from tinkerflow.backend.compute.planning.array_sizes import held_bytes, weight_bytes
    from tinkerflow.backend.pool.jax_setup import choose_partitioner
    from tinkerflow.backend.spec.commands import (
        CreateAdapter,
        Example,
        ExportAdapter,
        Forward,
        GroupConfig,
        ImportAdapter,
        LoraSpec,
        OptimStep,
        PublishSnapshot,
        SampledSequence,
        SampleRequest,
        SampleStep,
    )
    from tinkerflow.backend.spec.optimizers.adamw import AdamParams
    from tinkerflow.backend.spec.optimizers.dimuon import DimuonParams
    from tinkerflow.backend.spec.supports import Supports

    choose_partitioner(context)
    tokens = 256 if context == 1 else 64
    config = GroupConfig(
        folder, "float32", fsdp, tensor, 512, tokens, 4, 4, "", expert=expert, context_parallel=context
    )
    executor = Executor(config, lambda line: None, 1, 0)
    rng = np.random.default_rng(0)
    data = tuple(
        Example(
            rng.integers(0, 96, n).astype(np.int32),
            rng.integers(0, 96, (n, 1)).astype(np.int32),
            np.ones((n, 1), np.float32),
        )
        for n in (9, 30, 17)
    )
    weights = {"planned": weight_bytes(executor._cfg, executor._config), "held": held_bytes(executor._params)}
    said: dict[str, object] = {"weights": weights}
    runs = {
        "adamw": (LoraSpec(4), "adamw", AdamParams(learning_rate=1e-2)),
        "dimuon": (LoraSpec(4), "dimuon", DimuonParams(learning_rate=1e-2)),
        "full": (LoraSpec(0), "adamw", AdamParams(learning_rate=1e-3)),
    }
    for name in [name for name in wanted if name in runs]:
        spec, optimizer, params = runs[name]
        executor.execute(CreateAdapter(name, spec, 0, optimizer))
        for step in range(3):
            result = executor.execute(Forward(name, data, "cross_entropy"))
            norm = executor.execute(OptimStep(name, params)).grad_norm
            said |= {f"{name} loss {step}": result.loss_sum, f"{name} norm {step}": norm}
        said[f"{name} logprobs"] = [lp.tolist() for lp in result.logprobs]
        state = executor.execute(ExportAdapter(name, optimizer=True))
        compiled = executor.compiles
        executor.execute(ImportAdapter("again", state))
        executor.execute(Forward("again", data, "cross_entropy"))
        executor.execute(OptimStep("again", params))
        said[f"{name} compiled for a restored state"] = executor.compiles - compiled
        tensors = [array.tobytes() for _, array in sorted((state.weights | state.moments).items())]
        said[f"{name} digest"] = hashlib.sha256(b"".join(tensors)).hexdigest()
        adapter = executor._adapters.get(name)
        said[f"{name} held"] = held_bytes((adapter.lora, adapter.grads, adapter.state.parts))

    def sampled(name: str, temperature: float, top_k: int, **more: bool) -> SampledSequence:
        executor.execute(PublishSnapshot(name, name))
        request = SampleRequest("", "", name, data[1].tokens_T, 1, 8, temperature, top_k, top_p=1.0, seed=0, **more)
        progress = executor.execute(SampleStep((request,)))
        while not progress.finished:
            progress = executor.execute(SampleStep())
        (sequence,) = progress.finished[0].sequences
        return sequence

    if "supports" in wanted:
        sequence = sampled("adamw", 1.0, 5, supports=True)
        whole, before = np.concatenate([data[1].tokens_T, sequence.tokens_T]), len(data[1].tokens_T) - 1
        columns = np.zeros((2, len(whole) - 1, 1), np.float32)
        columns[0, before:], columns[1, before:, 0] = 1, sequence.logprobs_T
        supports = Supports.joined([Supports.unrestricted(before), sequence.supports])
        inputs = {"advantages": columns[0], "logprobs": columns[1]}
        example = Example(whole[:-1], whole[1:, None], columns[0], inputs=inputs, supports=supports)
        loss = executor.execute(Forward("adamw", (example,), "importance_sampling")).loss_sum
        said |= {
            "supports loss": loss,
            "supports norm": executor.execute(OptimStep("adamw", runs["adamw"][2])).grad_norm,
        }
    if "sampled" in wanted:
        sequence = sampled(name, 0.0, -1)
        said |= {"tokens": sequence.tokens_T.tolist(), "logprobs of tokens": sequence.logprobs_T.tolist()}
    print(json.dumps(said))


main()

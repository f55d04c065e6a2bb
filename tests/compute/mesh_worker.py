"""One process with four CPU devices, for test_mesh: trains on a mesh and prints losses, norms and logprobs as JSON."""

from __future__ import annotations

import json
import sys

import jax


def main() -> None:
    """argv: model folder, size of the fsdp axis (0 = what four devices leave), size of the tensor axis."""
    folder, fsdp, tensor = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    jax.config.update("jax_num_cpu_devices", fsdp * tensor or 4)
    import numpy as np

    from tinkerflow.backend.commands import CreateAdapter, Example, Forward, GroupConfig, LoraSpec, OptimStep
    from tinkerflow.backend.compute.executor import Executor
    from tinkerflow.backend.spec.optimizers.adamw import AdamParams

    executor = Executor(GroupConfig(folder, "float32", fsdp, tensor, 512, 256, 4, 4, ""), lambda line: None, 1, 0)
    executor.execute(CreateAdapter("a", LoraSpec(4), 0))
    rng = np.random.default_rng(0)
    data = tuple(
        Example(
            rng.integers(0, 96, n).astype(np.int32),
            rng.integers(0, 96, (n, 1)).astype(np.int32),
            np.ones((n, 1), np.float32),
        )
        for n in (9, 30, 17)
    )
    said: dict[str, object] = {"losses": [], "norms": []}
    for _ in range(3):
        result = executor.execute(Forward("a", data, "cross_entropy"))
        said["losses"] += [result.loss_sum]
        said["norms"] += [executor.execute(OptimStep("a", AdamParams(learning_rate=1e-2))).grad_norm]
    said["logprobs"] = [lp.tolist() for lp in result.logprobs]
    print(json.dumps(said))


main()

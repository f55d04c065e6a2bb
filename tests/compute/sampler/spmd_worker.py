"""One process of a group, for test_spmd: samples a fixed set of requests and prints the results as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import jax
import numpy as np


def main() -> None:
    """argv[1]: JSON with folder, devices (of this process), processes, rank, port, fsdp, tensor, ahead, kv_cache.

    ahead: whether a chunk is dispatched before the previous one is read, and the host decides, as on GPUs.
    """
    told: dict[str, Any] = json.loads(sys.argv[1])
    jax.config.update("jax_num_cpu_devices", told["devices"])
    if told["processes"] > 1:
        jax.config.update("jax_enable_preemption_service", False)
        address = f"127.0.0.1:{told['port']}"
        jax.distributed.initialize(
            address,
            told["processes"],
            told["rank"],
            cluster_detection_method="deactivate",
            coordinator_bind_address=address,
            initialization_timeout=60,
            heartbeat_timeout_seconds=30,
            shutdown_timeout_seconds=10,
        )
    from tinkerflow.backend.compute.mesh import make_mesh
    from tinkerflow.backend.compute.models.families import load_config
    from tinkerflow.backend.compute.models.lora_weights import init_lora
    from tinkerflow.backend.compute.models.params import load_params
    from tinkerflow.backend.compute.planning.memory_plan import plan_group
    from tinkerflow.backend.compute.platforms import CPU
    from tinkerflow.backend.compute.sampler import Sampler
    from tinkerflow.backend.compute.sampler import sampler as sampler_module
    from tinkerflow.backend.spec.commands import (
        Adjustments,
        Constraint,
        GroupConfig,
        LoraSpec,
        SampleRequest,
        SampleStep,
    )

    if told["ahead"]:
        sampler_module.on_cpu = lambda: False
        sampler_module.platform = lambda: replace(CPU, host_decides=True)
    config = GroupConfig(
        told["folder"], "float32", told["fsdp"], told["tensor"], 600, 1024, 6, 8, "", kv_cache=told["kv_cache"]
    )
    cfg, mesh = load_config(told["folder"]), make_mesh(told["fsdp"], told["tensor"])
    params = load_params(cfg, told["folder"], mesh, "float32")
    plan = plan_group(cfg, config)
    sampler = Sampler(
        cfg, params, mesh, config, pages=plan.pages, states=plan.states, snapshot_bytes=plan.snapshot_bytes
    )
    spec = LoraSpec(4)
    lora = init_lora(cfg, spec, 0)
    for pair in lora.layers.values():
        pair.B[...] = np.random.default_rng(1).normal(size=pair.B.shape, scale=0.05)
    sampler.publish("snap", lora, spec)

    def request(name: str, length: int, tokens: int, **changes: Any) -> SampleRequest:
        prompt = np.random.default_rng(length).integers(0, cfg.vocab, length).astype(np.int32)
        plain: dict[str, Any] = {
            "owner": "o",
            "snapshot_id": None,
            "num_samples": 1,
            "temperature": 0.0,
            "top_k": -1,
            "top_p": 1.0,
        }
        return SampleRequest(request_id=name, prompt_T=prompt, max_tokens=tokens, seed=7, **(plain | changes))

    requests = (
        request("greedy", 20, 20),
        request("drawn", 40, 30, temperature=1.0, top_k=30, num_samples=3, snapshot_id="snap"),
        request("scored", 140, 12, temperature=0.7, prompt_logprobs=True),
        request("bad", 5, 5, snapshot_id="nope"),
        request("held", 33, 60, temperature=1.0, constraint=Constraint("regex", r"[ab]{3,9}-\d\d", (256,))),
        request("adjusted", 30, 20, adjustments=Adjustments(1.0, 0.5, 1.3, ((4, 2.0), (9, -100.0)))),
    )
    finished = []
    for admitted in (requests, [request("first", 250, 5)], [request("repeated", 250, 5)]):
        progress = sampler.step(SampleStep(admit=tuple(admitted)))
        finished += progress.finished
        while progress.active or progress.waiting:
            progress = sampler.step(SampleStep())
            finished += progress.finished
    print(
        json.dumps(
            {
                result.request_id: {
                    "error": result.error,
                    "cached": result.prompt_cache_hit_tokens,
                    "tokens": [s.tokens_T.tolist() for s in result.sequences],
                    "logprobs": [s.logprobs_T.tolist() for s in result.sequences],
                    "prompt": None if result.prompt_logprobs_T is None else result.prompt_logprobs_T[1:].tolist(),
                }
                for result in finished
            }
        )
    )


if __name__ == "__main__":
    main()

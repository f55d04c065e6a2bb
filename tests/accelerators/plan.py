"""Prints the plan of `tinkerflow plan`, and compiles its programs with the accelerator's own compiler, in minutes.

    python -m tests.accelerators.plan h100:1 Qwen/Qwen3-8B [rank]

Settings come from the environment, for example TINKERFLOW_TENSOR_PARALLEL. The command needs the compilers that
`environment.py` installs, or `libtpu` or `jax[cuda13]`, but no device.
"""

from __future__ import annotations

import sys

from tests.accelerators.model_programs import Programs

from tinkerflow.backend.compute.planning.memory_plan import GB
from tinkerflow.backend.settings import Settings
from tinkerflow.deployments.plan import ROW, ServicePlan, describe_plan, plan_service


def describe_programs(plan: ServicePlan) -> str:
    """The compiler's figures for training and decoding, as lines of text."""
    config, context = plan.config, plan.memory.context
    programs = Programs(plan.cfg, str(plan.target), plan.spec.rank, config.tensor, config.expert, config.kv_cache)
    tokens, slots, chunk = plan.memory.budget.microbatch_tokens, plan.slots(context), config.decode_chunk
    rows = max(config.fsdp, tokens // ROW)
    compiled = {
        f"forward_backward of {B}x{T} tokens": (programs.forward_backward(B, T), B * T)
        for B, T in ((rows, tokens // rows), (config.fsdp, context))
    }
    decode = programs.decode(slots, context, chunk=chunk, unknown_trips=chunk)
    compiled[f"decode, {slots} slots of {context}"] = (decode, slots * chunk)
    return "\n".join(
        f"{name}, by the compiler: {figures.peak / GB:.1f} GB of each device, of it temporaries "
        f"{figures.temporaries / GB:.1f}; {figures.counts.flops / 1e12:.2f} TFLOP, {figures.counts.bytes / GB:.1f} GB "
        f"accessed; at most {count / figures.seconds:,.0f} tokens/s"
        for name, (figures, count) in compiled.items()
    )


def main(topology: str, base_model: str, rank: str = "32") -> None:
    """Print the plan and the compiler's figures."""
    plan = plan_service(Settings(), base_model, topology, rank=int(rank))
    print(describe_plan(plan))
    print(describe_programs(plan), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
